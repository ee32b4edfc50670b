"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlframe.agents import losses
from rlframe.agents.actor_critic import ActorCritic
from rlframe.agents.base import LearnerState
from rlframe.agents.minibatches import MinibatchAgent
from rlframe.agents.returns import generalized_advantages
from rlframe.agents.schedules import Scheduled, check_schedules, clip_gradients, current, descend_at_rate, scheduled
from rlframe.agents.trees import flatten_batch_and_time
from rlframe.errors import UsageError, check_above, check_at_least, check_fraction
from rlframe.types import LAST, Logs, Params, SequenceBatch, Tree


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Defaults from Schulman et al. 2017, table 3 (MuJoCo). Other defaults are from OpenAI Baselines' ppo2.

    With `max_staleness` above 0, actors may act with parameters that are up to `max_staleness` versions old. The
    clipped ratio corrects for old parameters: it uses the log-probabilities that the actor has stored, as equation 7
    of the paper requires. Hilton et al. 2022 (arXiv:2110.00641) measure the effect of old parameters.
    """

    unroll_length: int = 2048  # Steps of each environment between two updates.
    num_epochs: int = 10  # Passes over the batch per update.
    num_minibatches: int = 32  # Minibatches per epoch. The paper splits 2048 steps into 32.
    target_kl: float | None = None  # Stop the update before a minibatch with a higher approx_kl.
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_epsilon: Scheduled = scheduled(0.2, above=0)  # Number or schedule, such as linear:0.2:0.
    value_clip: float | None = None  # Maximum change of the value. ppo2 uses clip_epsilon.
    entropy_cost: Scheduled = scheduled(0.0)  # Number or schedule, such as linear:0.01:0.
    value_cost: float = 0.5  # Weight of half the squared error. SB3's vf_coef=0.5 is 1.0 here.
    normalize_advantages: bool = True  # Normalize in each minibatch, as in ppo2.
    learning_rate: Scheduled = scheduled(3e-4, above=0)  # Number or schedule, such as linear:3e-4:0.
    adam_epsilon: float = 1e-5  # The default of ppo2.
    max_grad_norm: float | None = 0.5  # Clip the global norm of gradients, as in ppo2.
    total_learner_steps: int | None = None  # Internal: number of updates in the run. Schedules end there.
    # Internal: environments in a full batch. Schedules count a smaller batch as a fraction of an update.
    envs_per_batch: int | None = None
    max_staleness: int = 0  # Maximum age of an unroll, in versions. 0: actors wait for updates.

    def __post_init__(self) -> None:
        check_at_least(self, 1, "unroll_length", "num_epochs", "num_minibatches")
        check_at_least(self, 1, "total_learner_steps", "envs_per_batch")
        check_at_least(self, 0, "max_staleness")
        check_fraction(self, "discount", "gae_lambda")
        check_above(self, 0, "value_clip", "adam_epsilon", "max_grad_norm", "target_kl")
        check_schedules(self)


class Rollout(NamedTuple):
    """The rows of PPO's minibatches. Every leaf is `[N, ...]`, with one row for each step.

    For a recurrent network, a row is the whole unroll of an environment, and the leaves are `[B, T, ...]`.
    `PPO.predictions` returns them with one row for each step.
    """

    observation: Tree
    sample: jax.Array  # sample from the policy, before clipping to the action bounds
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    mask: jax.Array  # 0 where the environment ignored the action
    step_type: Any = ()  # for a recurrent network: [B, T]
    state: Any = ()  # for a recurrent network: [B, ...], the state before step 0


class PPO(ActorCritic, MinibatchAgent):
    """PPO agent with a clipped objective, for discrete, multi-discrete and bounded continuous actions.

    With a recurrent network, minibatches contain whole unrolls, and the recurrent state at the start of each unroll.
    """

    config_cls = PPOConfig

    def acting_extras(self, logits: jax.Array, value: jax.Array, sample: jax.Array) -> dict[str, jax.Array]:
        return {**super().acting_extras(logits, value, sample), "value": value.reshape(logits.shape[0])}

    def make_optimizer(self) -> optax.GradientTransformation:
        adam = optax.scale_by_adam(eps=self.cfg.adam_epsilon)
        return clip_gradients(self.cfg.max_grad_norm, adam, descend_at_rate(self.cfg))

    def rollout_and_logs(self, params: Params, data: SequenceBatch) -> tuple[Rollout, Logs]:
        """Return the rollout, and the explained variance of the values that the actor computed."""
        rollout = self.rollout(params, data)
        if missing := [name for name in ("value", "advantage", "mask") if not hasattr(rollout, name)]:
            raise UsageError(
                f"{type(self).__name__}.rollout must return a Rollout, or rows with at least the same fields; got a "
                f"{type(rollout).__name__} without {', '.join(missing)}."
            )
        targets = rollout.value + rollout.advantage
        return rollout, {"explained_variance": explained_variance(rollout.value, targets, rollout.mask)}

    def rollout(self, params: Params, data: SequenceBatch) -> Rollout:
        """Return the steps of a batch with GAE advantages, computed from the values that the actor stored."""
        value, last_value = jnp.asarray(data.extras["value"]), self._last_value(params, data)
        mask = (data.step_type[:, :-1] != LAST).astype(jnp.float32)
        values = jnp.concatenate([value, last_value[:, None]], axis=1)
        discounts = data.discount * self.cfg.discount
        advantage = generalized_advantages(data.reward.T, discounts.T, values.T, mask.T, self.cfg.gae_lambda).T
        observation = jax.tree.map(lambda leaf: leaf[:, :-1], data.observation)
        rollout = Rollout(observation, self.samples(data), data.extras["log_prob"], value, advantage, mask)
        if self._stepped.is_recurrent:
            return rollout._replace(step_type=data.step_type[:, :-1], state=data.agent_state)
        return flatten_batch_and_time(rollout)

    def minibatch_loss(self, params: Params, learner_state: LearnerState, rows: Rollout) -> tuple[jax.Array, Logs]:
        """Return the PPO loss of a minibatch: clipped objective, value error and entropy. Also return logs."""
        cfg, steps = self.cfg, learner_state.steps
        clip_epsilon = current(cfg, "clip_epsilon", steps)
        logits, value, rows = self.predictions(params, rows)
        log_ratio = self.distribution.log_prob(logits, rows.sample) - rows.log_prob
        ratio = jnp.exp(log_ratio)
        advantage = losses.normalize(rows.advantage, rows.mask) if cfg.normalize_advantages else rows.advantage
        mean = functools.partial(losses.masked_mean, mask=rows.mask)
        policy_loss = mean(losses.clipped_surrogate(ratio, advantage, clip_epsilon))
        value_loss = mean(losses.value_error(value, rows.value, rows.value + rows.advantage, cfg.value_clip))
        entropy = mean(self.distribution.entropy(logits))
        loss = policy_loss + cfg.value_cost * value_loss - current(cfg, "entropy_cost", steps) * entropy
        logs = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "clip_fraction": mean((jnp.abs(ratio - 1.0) > clip_epsilon).astype(jnp.float32)),
            "approx_kl": mean(ratio - 1.0 - log_ratio),  # Schulman 2020, joschu.net/blog/kl-approx.html
        }
        return loss, logs

    @property
    def stop_condition(self) -> Callable[[Logs], jax.Array] | None:
        return None if self.cfg.target_kl is None else self._is_above_target_kl

    def check_num_envs(self, num_envs: int) -> None:
        self._minibatch_updates.check_rows(num_envs * (1 if self._stepped.is_recurrent else self.cfg.unroll_length))

    def _is_above_target_kl(self, logs: Logs) -> jax.Array:
        if "approx_kl" not in logs:
            raise UsageError(
                f"{type(self).__name__}: target_kl needs approx_kl among the logs of minibatch_loss, got "
                f"{', '.join(sorted(logs))}."
            )
        return logs["approx_kl"] > self.cfg.target_kl

    def predictions(self, params: Params, rollout: Rollout) -> tuple[jax.Array, jax.Array, Rollout]:
        """Apply the network to the rows of a minibatch, for any kind of network.

        Returns:
            (distribution parameters [N, P], values [N], the rows with one row per step). With a recurrent network, N
            is the number of steps of all unrolls.
        """
        if self._stepped.is_recurrent:
            outputs, _ = self._stepped.unroll(params, rollout.observation, rollout.step_type, rollout.state)
            logits, value = flatten_batch_and_time(outputs)
            rollout = flatten_batch_and_time(rollout._replace(step_type=(), state=()))
        else:
            logits, value = self.network.apply(params, rollout.observation)
        return logits, value.reshape(logits.shape[0]), rollout

    def _last_value(self, params: Params, data: SequenceBatch) -> jax.Array:
        """Return [B]: the value of the timestep after the unroll."""
        if self._stepped.is_recurrent:
            outputs, _ = self._stepped.unroll(params, data.observation, data.step_type, data.agent_state)
            value = outputs[1][:, -1]
        else:
            value = self.network.apply(params, jax.tree.map(lambda leaf: leaf[:, -1], data.observation))[1]
        return value.reshape(len(data.reward))


def explained_variance(values: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Return [] float32: 1 - Var(targets - values) / Var(targets) where `mask` is 1 (`baselines/common/math_util.py`).

    1 means perfect values. 0 means that the values are no better than a constant, or that all targets are equal.
    """

    def variance(x: jax.Array) -> jax.Array:
        return losses.masked_mean(jnp.square(x - losses.masked_mean(x, mask)), mask)

    total = variance(targets)
    return jnp.where(total > 0.0, 1.0 - variance(targets - values) / total, 0.0)
