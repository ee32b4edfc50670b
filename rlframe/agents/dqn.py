"""Deep Q-networks (Mnih et al. 2015, doi:10.1038/nature14236) and later extensions."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents.action_masks import is_legal
from rlframe.agents.base import TargetState
from rlframe.agents.dqn_heads import Expectation, ReturnHead
from rlframe.agents.net_factory import only_output
from rlframe.agents.networks import MLPConfig, NatureCNNConfig
from rlframe.agents.off_policy import check_replay_size, importance_weights, off_policy_replay_spec
from rlframe.agents.q_learning import ActorParams, TargetNetworkAgent
from rlframe.agents.schedules import Scheduled, check_schedules, clip_gradients, current, scheduled
from rlframe.agents.trees import check_shapes
from rlframe.errors import UsageError, check_above, check_at_least, check_fraction
from rlframe.types import (
    AgentOutput,
    AgentState,
    Batch,
    Logs,
    Params,
    ReplaySpec,
    TimeStep,
    Transition,
    Tree,
)


@dataclasses.dataclass(frozen=True)
class DQNConfig:
    """Defaults from Mnih et al. 2015, extended data table 1 and "Training details"."""

    batch_size: int = 32
    replay_capacity: int = 1_000_000  # environment steps
    min_replay_size: int = 50_000  # items in the replay before learning starts
    update_period: int = 4  # environment steps per learner step
    target_update_period: int = 10_000  # learner steps
    discount: float = 0.99
    # probability of a random action; the paper's 1,000,000 environment steps are 250,000 updates
    epsilon: Scheduled = scheduled("linear:1:0.1@250000", at_most=1)
    # Temporally extended exploration: repeat a random action n times, with probability proportional to n^-exponent.
    # Dabney et al. 2020 (arXiv:2006.01782) use exponent 2. None repeats no action.
    exploration_duration_exponent: float | None = None
    # rmsprop: centered, decay 0.95, epsilon 0.01 (for gradients summed over the batch)
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    learning_rate: Scheduled = scheduled(2.5e-4, above=0)  # Number or schedule, such as linear:3e-4:0.
    adam_epsilon: float = 1e-8  # for `adam` only; Kingma and Ba 2015
    max_grad_norm: float | None = None
    total_learner_steps: int | None = None  # Internal: number of updates in the run. Schedules end there.
    # Network outputs for each action. Each head has its own options, such as `--head.num-atoms`.
    head: ReturnHead = dataclasses.field(default_factory=Expectation)
    double: bool = False  # double Q-learning, van Hasselt et al. 2016
    n_step: int = 1  # number of rewards summed before bootstrapping
    # Munchausen DQN computes targets with a soft policy and adds a bonus for actions that this policy prefers.
    # Defaults from Vieillard et al. 2020, arXiv:2007.14430.
    munchausen: bool = False
    munchausen_scale: float = 0.9  # alpha, scale of the bonus
    munchausen_temperature: float = 0.03  # tau, temperature of the soft policy
    munchausen_clip: float = -1.0  # l_0, lower limit of tau log pi in the bonus
    prioritized: bool = False  # proportional prioritization, Schaul et al. 2016
    priority_exponent: float = 0.6  # alpha
    importance_exponent: Scheduled = scheduled("linear:0.4:1")  # beta

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "min_replay_size", "update_period", "target_update_period", "n_step")
        check_fraction(self, "discount")
        check_at_least(self, 1, "total_learner_steps")
        check_at_least(self, 0, "munchausen_scale", "priority_exponent")
        check_schedules(self)
        check_above(self, 0, "adam_epsilon", "max_grad_norm", "munchausen_temperature")
        check_above(self, 1, "exploration_duration_exponent")
        if not isinstance(self.head, typing.get_args(ReturnHead)):
            heads = ", ".join(each.__name__ for each in typing.get_args(ReturnHead))
            raise UsageError(f"DQNConfig.head must be one of {heads}, got {self.head!r}.")
        if self.munchausen and (self.double or self.n_step > 1 or not isinstance(self.head, Expectation)):
            raise UsageError(
                "DQNConfig.munchausen defines its own targets: one-step means from the target network. It cannot be "
                f"combined with double={self.double}, n_step={self.n_step}, head={self.head.name}. "
                "Use double=False, n_step=1, head=expectation."
            )
        if not self.munchausen_clip <= 0.0:  # log-probabilities are at most 0
            raise UsageError(f"DQNConfig.munchausen_clip must be at most 0, got {self.munchausen_clip}.")
        if self.optimizer not in ("rmsprop", "adam"):
            raise UsageError(f"DQNConfig.optimizer must be 'rmsprop' or 'adam', got {self.optimizer!r}.")
        check_replay_size(self)


class Repetition(NamedTuple):
    """The agent state of an actor that repeats random actions."""

    action: Any  # [B]
    steps_left: Any  # [B] int32: remaining repetitions


_MAX_DURATION = 1_000  # With exponent 2, a longer duration would have a probability of only 0.0006.


class DQN(TargetNetworkAgent):
    """Q-learning with a target network and replay, for discrete actions.

    A network's `apply` returns `[B, A N]`: N outputs for each of the A actions. The head defines N (1 for
    `Expectation`). A noisy network has `sample(rng, params)`, which adds noise to the parameters.
    """

    config_cls = DQNConfig
    network_configs = (MLPConfig(activation="relu", orthogonal=False), NatureCNNConfig(orthogonal=False))
    may_be_noisy = True

    @property
    def outputs_per_action(self) -> int:
        """Number of outputs that the head needs for each action."""
        return self.cfg.head.size

    # Acting

    def actor_step(
        self, rng: jax.Array, params: ActorParams, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        # Derive separate keys, because `_explore` uses `rng`.
        duration_rng, noise_rng = jax.random.fold_in(rng, 1), jax.random.fold_in(rng, 2)
        noisy_params = self._sample(noise_rng, params.params)
        greedy = self.greedy(self._values(noisy_params, timestep.observation))
        chosen, explores = self._explore(rng, greedy, params.epsilon, timestep.observation)
        if self.cfg.exploration_duration_exponent is None:
            return AgentOutput(chosen, {}), state
        repeats, legal = state.steps_left > 0, self._mask.legal(timestep.observation)
        if legal is not None:
            repeats &= _chosen(legal[..., None], state.action)[:, 0]
        duration = self._duration(duration_rng, greedy.shape)
        action = jnp.where(repeats, state.action, chosen)
        steps_left = jnp.where(repeats, state.steps_left, jnp.where(explores, duration, 1)) - 1
        return AgentOutput(action, {}), Repetition(action, steps_left)

    def initial_state(self, batch_size: int) -> AgentState:
        if self.cfg.exploration_duration_exponent is None:
            return ()
        zeros = np.zeros((batch_size,), np.int32)
        return Repetition(zeros.astype(self.action_spec.dtype), zeros)

    def _duration(self, rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Draw int32 durations n in [1, _MAX_DURATION], with a probability proportional to n^-exponent."""
        weights = np.arange(1, _MAX_DURATION + 1, dtype=np.float64) ** -self.cfg.exploration_duration_exponent
        cumulative = jnp.asarray(np.cumsum(weights)[:-1] / weights.sum(), jnp.float32)
        return 1 + jnp.searchsorted(cumulative, jax.random.uniform(rng, shape)).astype(jnp.int32)

    def actor_params(self, params: Params, learner_state: TargetState) -> ActorParams:
        return ActorParams(params, current(self.cfg, "epsilon", learner_state.steps))

    # Learning

    @property
    def replay_spec(self) -> ReplaySpec:
        cfg = self.cfg
        return off_policy_replay_spec(
            cfg, Transition(cfg.n_step, cfg.discount), "prioritized" if cfg.prioritized else "uniform"
        )

    def make_optimizer(self) -> optax.GradientTransformation:
        cfg, rate = self.cfg, functools.partial(current, self.cfg, "learning_rate")
        if cfg.optimizer == "adam":
            optimizer = optax.adam(rate, eps=cfg.adam_epsilon)
        else:
            # The paper's epsilon of 0.01 is for gradients of the sum over the batch.
            # Here, gradients of the mean are used, so epsilon is smaller (0.01 / 32^2 in dqn_zoo, dqn/run_atari.py).
            optimizer = optax.rmsprop(rate, decay=0.95, eps=0.01 / cfg.batch_size**2, centered=True)
        return clip_gradients(cfg.max_grad_norm, optimizer)

    def loss(self, params: Params, learner_state: TargetState, batch: Batch) -> tuple[jax.Array, Logs]:
        cfg, head, data = self.cfg, self.cfg.head, batch.data
        rngs = jax.random.split(jax.random.fold_in(learner_state.rng, learner_state.steps), 3)
        online = self._sample(rngs[0], params)
        target = self._sample(rngs[1], learner_state.target_params)
        outputs = self._outputs(online, data.observation)
        next_outputs = self._outputs(target, data.next_observation)
        reward = data.reward
        if cfg.munchausen:
            target_values = head.values(self._outputs(target, data.observation))
            reward += munchausen_bonus(target_values, data.action, cfg)
            next_chosen = soft_value(head.values(next_outputs), cfg.munchausen_temperature)[:, None]
        else:
            selector_outputs = next_outputs
            if cfg.double:  # the online network selects the next action (van Hasselt et al. 2016)
                selector_outputs = self._outputs(self._sample(rngs[2], params), data.next_observation)
            next_action = jnp.argmax(head.values(selector_outputs), axis=-1)
            next_chosen = _chosen(next_outputs, next_action)
        loss, priority = head.loss(_chosen(outputs, data.action), reward, data.discount, next_chosen)
        values = head.values(outputs)
        logs = {"value": jnp.mean(values, where=is_legal(values)), "td_error": jnp.mean(priority)}
        if not cfg.prioritized:
            return jnp.mean(loss), logs
        exponent = current(cfg, "importance_exponent", learner_state.steps)
        weights = importance_weights(batch.probabilities, exponent)
        # Schaul et al. 2016, section 3.3: priorities are never 0.
        return jnp.mean(weights * loss), {**logs, "priorities": priority + 1e-6}

    def _outputs(self, params: Params, observation: Tree) -> jax.Array:
        """Return [B, A, N]: the network outputs for each action."""
        outputs = only_output(self.network.apply(params, observation))
        return outputs.reshape(outputs.shape[0], self._num_actions, -1)  # shape[0] may be symbolic during `export`

    def _sample(self, rng: jax.Array, params: Params) -> Params:
        """Return the parameters. If the network is noisy, add noise to them."""
        sample = getattr(self.network, "sample", None)
        return params if sample is None else sample(rng, params)

    def _values(self, params: Params, observation: Tree) -> jax.Array:
        """Return the action values [B, A]."""
        return self.cfg.head.values(self._outputs(params, observation))


def munchausen_bonus(target_values: jax.Array, action: jax.Array, cfg: DQNConfig) -> jax.Array:
    """Return [B]: the reward bonus of Munchausen DQN, which is the scaled and clipped log-probability of the action.

    See Vieillard et al. 2020, equation 3. The policy is softmax(values / temperature) for the target network's values
    [B, A].
    """
    check_shapes(target_values=(target_values, "B A"), action=(action, "B"))
    log_policy = cfg.munchausen_temperature * jax.nn.log_softmax(target_values / cfg.munchausen_temperature)
    chosen = _chosen(log_policy[..., None], action)[:, 0]
    return cfg.munchausen_scale * jnp.clip(chosen, cfg.munchausen_clip, 0.0)


def soft_value(values: jax.Array, temperature: float) -> jax.Array:
    """Return [B]: the soft values, the mean of (value - temperature * log-probability) over actions.

    The mean is weighted by the policy softmax(values / temperature), for values [B, A].
    """
    return temperature * jax.nn.logsumexp(values / temperature, axis=-1)


def _chosen(outputs: jax.Array, action: jax.Array) -> jax.Array:
    """Return [B, N]: the outputs [B, A, N] of the chosen actions [B]."""
    return jnp.take_along_axis(outputs, action[:, None, None].astype(jnp.int32), axis=1)[:, 0]
