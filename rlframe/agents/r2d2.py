"""R2D2 (Kapturowski et al. 2019, openreview.net/forum?id=r1lyTjAqYX): recurrent Q-learning from replayed sequences."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents import losses
from rlframe.agents.base import TargetState
from rlframe.agents.net_factory import only_output
from rlframe.agents.networks import MLPConfig, NatureCNNConfig, has_images
from rlframe.agents.off_policy import check_replay_size, importance_weights, off_policy_replay_spec, sequence_priorities
from rlframe.agents.q_learning import ActorParams, TargetNetworkAgent
from rlframe.agents.recurrent import GRUConfig, LSTMConfig
from rlframe.agents.returns import n_step_returns, rescale, unscale
from rlframe.agents.schedules import Scheduled, check_schedules, clip_gradients, current, scheduled
from rlframe.agents.trees import swap_batch_and_time
from rlframe.errors import check_above, check_at_least, check_fraction
from rlframe.types import (
    LAST,
    AgentOutput,
    AgentState,
    Batch,
    Logs,
    Params,
    ReplaySpec,
    Sequence,
    SequenceBatch,
    TimeStep,
)


@dataclasses.dataclass(frozen=True)
class R2D2Config:
    """Defaults from Kapturowski et al. 2019, sections 2.3 and 3 and the table of hyper-parameters."""

    batch_size: int = 64  # sequences per update
    sequence_length: int = 80  # steps of one environment to learn from
    burn_in: int = 40  # steps before `sequence_length`; they only update the recurrent state
    period: int = 40  # environment steps between the starts of two sequences
    replay_capacity: int = 4_000_000  # environment steps
    min_replay_size: int = 1_250  # sequences in the replay before learning starts; as in Ape-X (50,000 steps)
    # environment steps per learner step; paper: 256 actors x 260 steps/s, 5 updates/s
    update_period: int = 13_312
    target_update_period: int = 2_500  # learner steps
    discount: float = 0.997
    n_step: int = 5  # number of rewards summed before bootstrapping
    # Rescaling of values: epsilon in h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x. None disables rescaling.
    rescaling: float | None = 1e-3
    # An environment takes a random action with probability epsilon^(1 + epsilon_exponent * position).
    # Positions are spread evenly over [0, 1] (`ladder_positions`), as in Horgan et al. 2018 (arXiv:1803.00933).
    epsilon: Scheduled = scheduled(0.4, at_most=1)
    epsilon_exponent: float = 7.0
    learning_rate: Scheduled = scheduled(1e-4, above=0)  # learning rate of Adam
    adam_epsilon: float = 1e-3
    total_learner_steps: int | None = None  # Internal: number of updates in the run. Schedules end there.
    max_grad_norm: float | None = None
    priority_exponent: float = 0.9
    max_share: float = 0.9  # eta: weight of the largest error in a priority; the mean error has weight 1 - eta
    importance_exponent: Scheduled = scheduled(0.6)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "sequence_length", "period", "min_replay_size", "update_period")
        check_at_least(self, 1, "target_update_period", "n_step", "total_learner_steps")
        check_at_least(self, 0, "burn_in", "rescaling", "epsilon_exponent", "priority_exponent")
        check_fraction(self, "discount", "max_share")
        check_above(self, 0, "adam_epsilon", "max_grad_norm")
        check_schedules(self)
        check_replay_size(self)


class Explorer(NamedTuple):
    """The recurrent state of an environment."""

    core: Any  # the network's state, a tree of [B, ...]
    exponent: Any  # [B] float32: a random action has the probability epsilon ** exponent; constant


class R2D2(TargetNetworkAgent):
    """Double, dueling Q-learning on sequences, for discrete actions and partially observable environments.

    A network's `apply` returns action values `[B, A]`. The network should be recurrent (`rlframe.agents.recurrent`) and
    dueling, as in the paper. Learning unrolls the network from the state that is stored with the sequence. The first
    `burn_in` steps only update the state with the newest parameters. They have no loss.
    """

    config_cls = R2D2Config
    network_configs = (
        LSTMConfig(activation="relu", orthogonal=False, dueling=True),
        GRUConfig(activation="relu", orthogonal=False, dueling=True),
        MLPConfig(activation="relu", orthogonal=False, dueling=True),
        NatureCNNConfig(orthogonal=False, dueling=True),
    )

    may_recur = True

    @property
    def default_network(self) -> Any:
        """The default network: the paper's network for images, and a small network for vectors."""
        paper = LSTMConfig((), 512, "relu", orthogonal=False, dueling=True)
        return paper if has_images(self.observation_spec) else self.network_configs[0]

    # Acting

    def initial_state(self, batch_size: int) -> Explorer:
        exponent = 1.0 + self.cfg.epsilon_exponent * ladder_positions(batch_size)
        return Explorer(self._stepped.initial_state(batch_size), exponent.astype(np.float32))

    def actor_step(
        self, rng: jax.Array, params: ActorParams, timestep: TimeStep, state: Explorer
    ) -> tuple[AgentOutput, AgentState]:
        output, after = self.eval_step(rng, params, timestep, state)
        epsilon = jnp.power(params.epsilon, jnp.asarray(state.exponent))
        action, _ = self._explore(rng, output.action, epsilon, timestep.observation)
        return AgentOutput(action, {}), after

    def eval_step(
        self, rng: jax.Array, params: ActorParams, timestep: TimeStep, state: Explorer
    ) -> tuple[AgentOutput, AgentState]:
        outputs, core = self._stepped.step(params.params, timestep.observation, state.core)
        return AgentOutput(self.greedy(only_output(outputs)), {}), Explorer(core, state.exponent)

    def actor_params(self, params: Params, learner_state: TargetState) -> ActorParams:
        return ActorParams(params, current(self.cfg, "epsilon", learner_state.steps))

    # Learning

    @property
    def replay_spec(self) -> ReplaySpec:
        cfg = self.cfg
        return off_policy_replay_spec(cfg, Sequence(cfg.burn_in + cfg.sequence_length, cfg.period), "prioritized")

    def make_optimizer(self) -> optax.GradientTransformation:
        cfg, rate = self.cfg, functools.partial(current, self.cfg, "learning_rate")
        return clip_gradients(cfg.max_grad_norm, optax.adam(rate, eps=cfg.adam_epsilon))

    def loss(self, params: Params, learner_state: TargetState, batch: Batch) -> tuple[jax.Array, Logs]:
        """Return half the squared errors, summed over each sequence and averaged over sequences. Also return logs."""
        cfg = self.cfg
        values = self._unroll(params, batch.data)
        targets = self._targets(values, self._unroll(learner_state.target_params, batch.data), batch.data)
        action = batch.data.action[:, cfg.burn_in :].T
        chosen = _select(values[:-1], action)
        mask = (batch.data.step_type[:, cfg.burn_in : -1].T != LAST).astype(jnp.float32)
        errors = mask * (jax.lax.stop_gradient(targets) - chosen)
        exponent = current(cfg, "importance_exponent", learner_state.steps)
        weights = importance_weights(batch.probabilities, exponent)
        logs = {
            "value": losses.masked_mean(self._unscale(chosen), mask),
            "td_error": losses.masked_mean(jnp.abs(errors), mask),
            "priorities": sequence_priorities(errors, mask, cfg.max_share) + 1e-6,  # priorities are never 0
        }
        return jnp.mean(weights * jnp.sum(losses.huber(errors, None), axis=0)), logs

    def _unroll(self, params: Params, data: SequenceBatch) -> jax.Array:
        """Return action values [T + 1, B, A] of the timesteps after the burn-in."""
        state, burn_in = data.agent_state.core, self.cfg.burn_in
        if burn_in:
            early = jax.tree.map(lambda leaf: leaf[:, :burn_in], data.observation)
            state = self._stepped.unroll(params, early, data.step_type[:, :burn_in], state)[1]
            state = jax.lax.stop_gradient(state)
        late = jax.tree.map(lambda leaf: leaf[:, burn_in:], data.observation)
        outputs, _ = self._stepped.unroll(params, late, data.step_type[:, burn_in:], state)
        return swap_batch_and_time(only_output(outputs))

    def _targets(self, values: jax.Array, target_values: jax.Array, data: SequenceBatch) -> jax.Array:
        """Return [T, B]: the targets of the values [T + 1, B, A].

        The online network selects the next actions, and the target network evaluates them.
        """
        cfg = self.cfg
        next_values = self._unscale(_select(target_values[1:], jnp.argmax(values[1:], axis=-1)))
        reward, discount = data.reward[:, cfg.burn_in :].T, cfg.discount * data.discount[:, cfg.burn_in :].T
        continues = data.step_type[:, cfg.burn_in + 1 :].T != LAST
        returns = n_step_returns(reward, discount, next_values, continues, cfg.n_step)
        return returns if cfg.rescaling is None else rescale(returns, cfg.rescaling)

    def _unscale(self, values: jax.Array) -> jax.Array:
        return values if self.cfg.rescaling is None else unscale(values, self.cfg.rescaling)


def ladder_positions(count: int) -> np.ndarray:
    """Return positions [count] on the epsilon ladder: 1/2, 0, 1, 1/4, 3/4, 1/8, 5/8, 3/8, ...

    For every count, the positions are spread almost evenly over [0, 1]. The position of an environment depends on its
    index, and is the same for every count.
    """
    numbers, positions, half = np.arange(1, count + 1), np.zeros(count), 0.5
    while numbers.any():  # van der Corput sequence: the reversed binary digits are the binary fraction
        positions, numbers, half = positions + half * (numbers & 1), numbers >> 1, half / 2
    return np.concatenate([positions[:1], [0.0, 1.0], positions[1:]])[:count]


def _select(values: jax.Array, actions: jax.Array) -> jax.Array:
    """Return [T, B]: the values [T, B, A] of the actions [T, B]."""
    # Do not use take_along_axis, whose gradient is a scatter.
    # If the network has no state, compiling this scatter aborts the process with jaxlib 0.5.3 on a CPU.
    return jnp.sum(values * jax.nn.one_hot(actions, values.shape[-1], dtype=values.dtype), axis=-1)
