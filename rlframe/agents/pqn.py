"""PQN (Gallici et al. 2024, arXiv:2407.04811): on-policy Q-learning without replay and without target network."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlframe.agents import losses
from rlframe.agents.base import LearnerState
from rlframe.agents.minibatches import MinibatchAgent
from rlframe.agents.networks import MLPConfig, NatureCNNConfig
from rlframe.agents.q_learning import ActorParams, QLearning
from rlframe.agents.returns import q_lambda_returns
from rlframe.agents.schedules import Scheduled, check_schedules, clip_gradients, current, descend_at_rate, scheduled
from rlframe.agents.trees import flatten_batch_and_time
from rlframe.errors import check_above, check_at_least, check_fraction
from rlframe.types import (
    LAST,
    AgentOutput,
    AgentState,
    Logs,
    Params,
    SequenceBatch,
    TimeStep,
    Tree,
)


@dataclasses.dataclass(frozen=True)
class PQNConfig:
    """Defaults from Gallici et al. 2024 for Atari (128 environments)."""

    unroll_length: int = 32  # steps of each environment between two updates
    num_epochs: int = 2
    num_minibatches: int = 32
    discount: float = 0.99
    q_lambda: float = 0.65  # 0 for one-step targets, 1 for Monte Carlo returns
    epsilon: Scheduled = scheduled("linear:1:0.001@0.1", at_most=1)  # probability of a random action
    learning_rate: Scheduled = scheduled(2.5e-4, above=0)  # learning rate of RAdam
    adam_epsilon: float = 1e-8  # epsilon of RAdam, as in the code of Liu et al. 2020, arXiv:1908.03265
    total_learner_steps: int | None = None  # Internal: number of updates in the run. Schedules end there.
    # Internal: environments in a full batch. Schedules count a smaller batch as a fraction of an update.
    envs_per_batch: int | None = None
    max_grad_norm: float | None = 10.0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "unroll_length", "num_epochs", "num_minibatches")
        check_fraction(self, "discount", "q_lambda")
        check_at_least(self, 1, "total_learner_steps", "envs_per_batch")
        check_above(self, 0, "adam_epsilon", "max_grad_norm")
        check_schedules(self)


class QRollout(NamedTuple):
    """The rows for minibatches. Every leaf is `[N, ...]` with N = B * T."""

    observation: Tree
    action: jax.Array
    target: jax.Array  # the lambda-return
    mask: jax.Array  # 0 where the environment ignored the action


class PQN(QLearning, MinibatchAgent):
    """Q-learning on lambda-returns of fresh unrolls, for discrete actions.

    A network's `apply` returns action values `[B, A]`. It should have layer normalization (`layer_norm`), which
    stabilizes the values without a target network.
    """

    config_cls = PQNConfig
    network_configs = (
        MLPConfig((128, 128), "relu", orthogonal=False, layer_norm=True),
        NatureCNNConfig(orthogonal=False, layer_norm=True),
    )

    # Acting

    def actor_step(
        self, rng: jax.Array, params: ActorParams, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        values = self._values(params.params, timestep.observation)
        action, _ = self._explore(rng, self.greedy(values), params.epsilon, timestep.observation)
        return AgentOutput(action, {"value": jnp.max(values, axis=-1)}), state

    def actor_params(self, params: Params, learner_state: LearnerState) -> ActorParams:
        return ActorParams(params, current(self.cfg, "epsilon", learner_state.steps))

    # Learning

    def make_optimizer(self) -> optax.GradientTransformation:
        radam = optax.scale_by_radam(eps=self.cfg.adam_epsilon)
        return clip_gradients(self.cfg.max_grad_norm, radam, descend_at_rate(self.cfg))

    def rollout(self, params: Params, data: SequenceBatch) -> QRollout:
        """Return the steps of a batch with lambda-returns, computed from the values that the actor stored."""
        last_values = self._values(params, jax.tree.map(lambda leaf: leaf[:, -1], data.observation))
        next_values = jnp.concatenate([data.extras["value"][:, 1:], jnp.max(last_values, axis=-1)[:, None]], axis=1)
        targets = q_lambda_returns(
            data.reward.T,
            self.cfg.discount * data.discount.T,
            next_values.T,
            data.step_type[:, 1:].T != LAST,
            self.cfg.q_lambda,
        ).T
        mask = (data.step_type[:, :-1] != LAST).astype(jnp.float32)
        observation = jax.tree.map(lambda leaf: leaf[:, :-1], data.observation)
        return flatten_batch_and_time(QRollout(observation, data.action, targets, mask))

    def minibatch_loss(self, params: Params, learner_state: LearnerState, rows: QRollout) -> tuple[jax.Array, Logs]:
        """Return half the squared error of a minibatch, and logs."""
        values = self._values(params, rows.observation)
        chosen = jnp.take_along_axis(values, rows.action[:, None].astype(jnp.int32), axis=-1)[:, 0]
        errors = rows.target - chosen
        mean = functools.partial(losses.masked_mean, mask=rows.mask)
        return mean(losses.huber(errors, None)), {"value": mean(chosen), "td_error": mean(jnp.abs(errors))}
