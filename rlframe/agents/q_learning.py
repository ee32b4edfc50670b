"""Base classes of DQN, PQN and R2D2: values of discrete actions, and epsilon-greedy exploration."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlframe.agents.action_masks import ActionMask
from rlframe.agents.base import Agent, NetFactory, PolicyFactory, TargetState
from rlframe.agents.net_factory import build_network, default_network_config, only_output
from rlframe.agents.networks import action_values
from rlframe.agents.recurrent import SteppedNetwork
from rlframe.errors import UsageError
from rlframe.types import AgentOutput, AgentState, Params, TimeStep, Tree, specs


class ActorParams(NamedTuple):
    """Parameters for actors whose environments all have the same exploration rate."""

    params: Params  # parameters of the network
    epsilon: Any  # [] float32: probability of a random action


def epsilon_greedy(
    rng: jax.Array, greedy: jax.Array, epsilon: jax.Array, num_actions: int, legal: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Replace each of the `greedy` actions `[B]` with a random action, with probability `epsilon` ([] or [B]).

    `legal` `[B, A]` is True for the actions that may be drawn. None draws from all `num_actions`.

    Returns:
        (actions `[B]`, `[B]` bool that is True for random actions).
    """
    # One random number decides twice: whether to explore (below epsilon), and which action (uniform in [0, epsilon)).
    draw = jax.random.uniform(rng, greedy.shape)
    count = num_actions if legal is None else jnp.sum(legal, axis=-1)
    random = jnp.minimum(draw / epsilon * count, count - 1).astype(greedy.dtype)
    if legal is not None:  # `random` is a position among the legal actions
        random = jnp.sum(jnp.cumsum(legal, axis=-1) <= random[:, None], axis=-1).astype(greedy.dtype)
    explores = draw < epsilon
    return jnp.where(explores, random, greedy), explores


class QLearning(Agent):
    """Base class of agents that learn the values of discrete actions.

    A network's `apply` returns `[B, A N]`: N numbers for each action (`outputs_per_action`), ordered by action.
    """

    takes_policy = False
    may_recur: ClassVar[bool] = False  # whether the agent supports recurrent networks
    may_be_noisy: ClassVar[bool] = False  # whether the agent supports noisy networks

    def __init__(
        self,
        cfg: Any,
        observation_spec: Tree,
        action_spec: Tree,
        net_factory: NetFactory | None = None,
        policy_factory: PolicyFactory | None = None,
    ) -> None:
        super().__init__(cfg, observation_spec, action_spec, net_factory, policy_factory)
        if not isinstance(action_spec, specs.DiscreteArray):
            raise UsageError(
                f"{self.type_name} needs Discrete actions, got the action spec {action_spec!r}. Use SAC, PPO or IMPALA."
            )
        self._num_actions = action_spec.num_values
        self._mask = ActionMask(observation_spec)
        factory = net_factory or self.default_network
        heads = (action_values(self._num_actions, self.outputs_per_action),)
        self.network = build_network(
            factory, observation_spec, action_spec, heads, may_recur=self.may_recur, may_be_noisy=self.may_be_noisy
        )
        self._stepped = SteppedNetwork(self.network)

    @property
    def default_network(self) -> Any:
        """The config of the network if there is no `net_factory`."""
        return default_network_config(self.network_configs, self.observation_spec)

    @property
    def outputs_per_action(self) -> int:
        """Number of network outputs for each action."""
        return 1

    def eval_step(
        self, rng: jax.Array, params: ActorParams, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        return AgentOutput(self.greedy(self._values(params.params, timestep.observation)), {}), state

    def _values(self, params: Params, observation: Tree) -> jax.Array:
        """Return the action values [B, A]."""
        return only_output(self.network.apply(params, observation))

    def _explore(
        self, rng: jax.Array, greedy: jax.Array, epsilon: jax.Array, observation: Tree
    ) -> tuple[jax.Array, jax.Array]:
        """Return `epsilon_greedy` over the legal actions of an observation."""
        return epsilon_greedy(rng, greedy, epsilon, self._num_actions, self._mask.legal(observation))

    def greedy(self, values: jax.Array) -> jax.Array:
        """Return [B]: the action with the highest value in each row of the values [B, A]."""
        return jnp.argmax(values, axis=-1).astype(self.action_spec.dtype)


class TargetNetworkAgent(QLearning):
    """Base class of Q-learning agents with a target network, copied after every `target_update_period` updates."""

    def initial_learner_state(self, params: Params) -> TargetState:
        state = super().initial_learner_state(params)
        return TargetState(state.opt_state, state.steps, state.rng, target_params=params)

    def update_learner_state(self, params: Params, opt_state: Any, learner_state: TargetState) -> TargetState:
        learner_state = super().update_learner_state(params, opt_state, learner_state)
        target = optax.periodic_update(
            params, learner_state.target_params, learner_state.steps, self.cfg.target_update_period
        )
        return learner_state._replace(target_params=target)
