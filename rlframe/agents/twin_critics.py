"""The base class of SAC and TD3, and their networks: a policy for continuous actions, and two critics.

The targets of the critics are `returns.soft_targets`. The losses are in losses.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.agents.base import Agent, NetFactory, PolicyFactory
from rlframe.agents.distributions import ActionRange, check_bounds
from rlframe.agents.net_factory import build_network, default_network_config, only_output
from rlframe.agents.networks import Head
from rlframe.agents.off_policy import off_policy_replay_spec
from rlframe.agents.trees import zeros_like_spec
from rlframe.errors import UsageError
from rlframe.types import AgentOutput, AgentState, Params, ReplaySpec, TimeStep, Transition, Tree, specs


class PolicyAndCritics:
    """The networks of a policy and of twin critics. Actions are scaled to [-1, 1].

    Args:
        net_factory: a `NetworkConfig` that builds each of the three networks with its own layers, or a function
            `f(observation_spec, action_spec)` that returns a pair (policy, critics). The policy's `apply` takes
            observations and returns `[B, num_policy_params]`. The critics' `apply` takes `{"observation": ...,
            "action": [B, num_actions]}` and returns two `[B, 1]`.
        observation_spec: spec of one environment.
        num_actions: number of dimensions of an action.
        num_policy_params: number of outputs of the policy network.

    Raises:
        UsageError: `net_factory` does not return a pair (policy, critics), or a network is recurrent.
    """

    def __init__(self, net_factory: Any, observation_spec: Tree, num_actions: int, num_policy_params: int) -> None:
        action = specs.BoundedArray((num_actions,), np.float32, -1.0, 1.0, "action")
        critics_spec = {"action": action, "observation": observation_spec}
        name = getattr(net_factory, "__qualname__", type(net_factory).__name__)
        if hasattr(net_factory, "build"):
            policy = critics = net_factory
            if hasattr(net_factory, "separate"):
                critics = dataclasses.replace(net_factory, separate=True)
        else:
            policy, critics = _pair(net_factory, observation_spec, action)
        policy_heads, critic_heads = (Head(num_policy_params),), (Head(1), Head(1))
        self._policy = build_network(policy, observation_spec, action, policy_heads, name=f"{name} (policy)")
        self._critics = build_network(critics, critics_spec, action, critic_heads, name=f"{name} (critics)")
        self._specs = observation_spec, critics_spec

    def init(self, rng: jax.Array) -> tuple[Params, Params]:
        """Return initial parameters of the policy and of both critics."""
        networks, rngs = (self._policy, self._critics), jax.random.split(rng)
        policy, critics = (
            network.init(rng, zeros_like_spec(spec, 1)) for network, rng, spec in zip(networks, rngs, self._specs)
        )
        return policy, critics

    def policy_outputs(self, params: Params, observation: Tree) -> jax.Array:
        """Return the outputs of the policy network, [B, num_policy_params]."""
        return only_output(self._policy.apply(params, observation))

    def values(self, params: Params, observation: Tree, action: jax.Array) -> jax.Array:
        """Return [2, B]: the values of both critics for actions [B, num_actions]."""
        first, second = self._critics.apply(params, {"action": action, "observation": observation})
        return jnp.stack([first.reshape(len(action)), second.reshape(len(action))])


def _pair(net_factory: Any, observation_spec: Tree, action_spec: Tree) -> tuple[NetFactory, NetFactory]:
    """Split a net factory that returns a pair into two net factories."""
    pair = net_factory(observation_spec, action_spec)
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(hasattr(each, "apply") for each in pair)):
        raise UsageError(
            f"net_factory must give a pair for this agent, (policy, critics), each with init and apply; got {pair!r}."
        )
    return lambda *specs: pair[0], lambda *specs: pair[1]


class TwinCriticAgent(Agent):
    """Base class of agents with a policy for bounded continuous actions, and twin critics of these actions.

    A `net_factory` that is a function returns a pair (policy, critics). The policy's `apply(params, observation)`
    returns `[B, outputs_per_dimension n]`. The critics' `apply(params, {"observation": ..., "action": [B, n]})` returns
    two values `[B, 1]`. Both use actions scaled to [-1, 1]. The published parameters have the fields `policy`
    and `uniform`. `uniform` is 1 until the first update, and actions are uniform while it is 1.
    """

    takes_policy = False
    outputs_per_dimension = 1  # outputs of the policy network for each dimension of an action

    def __init__(
        self,
        cfg: Any,
        observation_spec: Tree,
        action_spec: Tree,
        net_factory: NetFactory | None = None,
        policy_factory: PolicyFactory | None = None,
    ) -> None:
        super().__init__(cfg, observation_spec, action_spec, net_factory, policy_factory)
        check_bounds(self.type_name, action_spec)
        self._range = ActionRange(action_spec)
        factory, size = net_factory or default_network_config(self.network_configs, observation_spec), self._range.size
        self._nets = PolicyAndCritics(factory, observation_spec, size, self.outputs_per_dimension * size)

    def actor_step(
        self, rng: jax.Array, params: Any, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        action = self.exploring_action(rng, params, timestep.observation)
        uniform_rng = jax.random.fold_in(rng, 1)  # a separate key, because `exploring_action` uses `rng`
        uniform = jax.random.uniform(uniform_rng, action.shape, minval=-1.0)
        return AgentOutput(self._range.to_action(jnp.where(params.uniform > 0.0, uniform, action)), {}), state

    def eval_step(
        self, rng: jax.Array, params: Any, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        return AgentOutput(self._range.to_action(self.greedy(params.policy, timestep.observation)), {}), state

    def exploring_action(self, rng: jax.Array, params: Any, observation: Tree) -> jax.Array:
        """Return actions [B, n] scaled to [-1, 1] for exploration. `params` are the published parameters."""
        raise NotImplementedError

    def greedy(self, policy_params: Params, observation: Tree) -> jax.Array:
        """Return the best actions [B, n] scaled to [-1, 1]."""
        raise NotImplementedError

    @property
    def replay_spec(self) -> ReplaySpec:
        return off_policy_replay_spec(self.cfg, Transition(1, self.cfg.discount), "uniform")
