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
from rlframe.agents.optimizers import annealed, clipped
from rlframe.agents.returns import generalized_advantages
from rlframe.agents.trees import flatten_batch_and_time
from rlframe.errors import UsageError, check_above, check_at_least, check_fraction
from rlframe.types import LAST, Logs, Params, SequenceBatch, Tree


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Defaults: Schulman et al. 2017, table 3 (MuJoCo); where it is silent, OpenAI Baselines' ppo2."""

    unroll_length: int = 2048  # steps of each environment between two updates
    num_epochs: int = 10
    num_minibatches: int = 32  # 2048 steps over minibatches of 64
    target_kl: float | None = None  # the update ends before the first minibatch whose approx_kl is above; None: never
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_epsilon: float = 0.2
    value_clip: float | None = None  # distance from the old value; ppo2 uses clip_epsilon, the paper none
    entropy_cost: float = 0.0
    value_cost: float = 0.5  # of half the squared error, as ppo2's vf_coef; Stable-Baselines3's 0.5 would be 1.0 here
    normalize_advantages: bool = True  # in each minibatch; ppo2/model.py
    learning_rate: float = 3e-4
    adam_epsilon: float = 1e-5  # ppo2/model.py
    max_grad_norm: float | None = 0.5  # ppo2
    anneal_learning_rate: bool = False  # linearly to 0 over total_learner_steps
    anneal_clip: bool = False  # the same for clip_epsilon
    total_learner_steps: int | None = None  # what annealing reaches 0 at; None: it does not begin
    envs_per_batch: int | None = None  # of a full batch: another counts in schedules by its size; None: as one step
    # Versions that an unroll may be behind. 0: actors wait for each update, as in the paper. Above, they run that many
    # unrolls ahead; the correction is the clipped ratio to the policy that acted, whose log-probabilities are stored:
    # equation 7 of the paper asks for no more than that. Hilton et al. 2022 (arXiv:2110.00641) measure what it costs.
    max_staleness: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "unroll_length", "num_epochs", "num_minibatches")
        check_at_least(self, 1, "total_learner_steps", "envs_per_batch")
        check_at_least(self, 0, "max_staleness")
        check_fraction(self, "discount", "gae_lambda")
        check_above(self, 0, "clip_epsilon", "value_clip", "learning_rate", "adam_epsilon", "max_grad_norm")
        check_above(self, 0, "target_kl")


class Rollout(NamedTuple):
    """What the minibatches are taken from; every leaf is `[N, ...]`, N = B * T.

    Of a recurrent network a row is an environment's whole unroll: the leaves are `[B, T, ...]`.
    """

    observation: Tree
    sample: jax.Array  # of the policy, before clipping to the action's bounds
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    mask: jax.Array  # 0 where the environment ignored the action
    step_type: Any = ()  # of a recurrent network: [B, T]
    state: Any = ()  # the same: [B, ...], before step 0


class PPO(ActorCritic, MinibatchAgent):
    """PPO with a clipped objective, for discrete, multi-discrete and bounded continuous actions.

    Minibatches of a recurrent network are of whole unrolls, from the state that they began with.
    """

    config_cls = PPOConfig

    def acting_extras(self, logits: jax.Array, value: jax.Array, sample: jax.Array) -> dict[str, jax.Array]:
        return {**super().acting_extras(logits, value, sample), "value": value.reshape(logits.shape[0])}

    def make_optimizer(self) -> optax.GradientTransformation:
        return clipped(self.cfg.max_grad_norm, optax.scale_by_adam(eps=self.cfg.adam_epsilon))

    def rollout_and_logs(self, params: Params, data: SequenceBatch) -> tuple[Rollout, Logs]:
        """The rollout, and how well the actor's values explain the returns."""
        rollout = self.rollout(params, data)
        if missing := [name for name in ("value", "advantage", "mask") if not hasattr(rollout, name)]:
            raise UsageError(
                f"{type(self).__name__}.rollout must return a Rollout, or rows with the same fields and more; got a "
                f"{type(rollout).__name__} without {', '.join(missing)}."
            )
        targets = rollout.value + rollout.advantage
        return rollout, {"explained_variance": explained_variance(rollout.value, targets, rollout.mask)}

    def rollout(self, params: Params, data: SequenceBatch) -> Rollout:
        """The steps of a batch with their advantages, by the values that the actor had."""
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
        """The clipped objective, the error of the values and the entropy, of a minibatch of the rollout."""
        cfg = self.cfg
        clip_epsilon = annealed(
            cfg.clip_epsilon, learner_state.steps, cfg.total_learner_steps if cfg.anneal_clip else None
        )
        logits, value, rows = self._forward(params, rows)
        log_ratio = self.distribution.log_prob(logits, rows.sample) - rows.log_prob
        ratio = jnp.exp(log_ratio)
        advantage = losses.normalize(rows.advantage, rows.mask) if cfg.normalize_advantages else rows.advantage
        mean = functools.partial(losses.masked_mean, mask=rows.mask)
        policy_loss = mean(losses.clipped_surrogate(ratio, advantage, clip_epsilon))
        value_loss = mean(losses.value_error(value, rows.value, rows.value + rows.advantage, cfg.value_clip))
        entropy = mean(self.distribution.entropy(logits))
        loss = policy_loss + cfg.value_cost * value_loss - cfg.entropy_cost * entropy
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

    def _forward(self, params: Params, rollout: Rollout) -> tuple[jax.Array, jax.Array, Rollout]:
        """(policy parameters [N, P], values [N], the rollout with rows of one step) of a minibatch."""
        if self._stepped.is_recurrent:
            outputs, _ = self._stepped.unroll(params, rollout.observation, rollout.step_type, rollout.state)
            logits, value = flatten_batch_and_time(outputs)
            rollout = flatten_batch_and_time(rollout._replace(step_type=(), state=()))
        else:
            logits, value = self.network.apply(params, rollout.observation)
        return logits, value.reshape(logits.shape[0]), rollout

    def _last_value(self, params: Params, data: SequenceBatch) -> jax.Array:
        """[B]: the value of the timestep after the unroll."""
        if self._stepped.is_recurrent:
            outputs, _ = self._stepped.unroll(params, data.observation, data.step_type, data.agent_state)
            value = outputs[1][:, -1]
        else:
            value = self.network.apply(params, jax.tree.map(lambda leaf: leaf[:, -1], data.observation))[1]
        return value.reshape(len(data.reward))


def explained_variance(values: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Return [] float32: 1 - Var(targets - values) / Var(targets) where `mask` is 1 (`baselines/common/math_util.py`).

    1 for perfect values, 0 for values no better than a constant. 0, too, if all targets are equal.
    """

    def variance(x: jax.Array) -> jax.Array:
        return losses.masked_mean(jnp.square(x - losses.masked_mean(x, mask)), mask)

    all_of_it = variance(targets)
    return jnp.where(all_of_it > 0.0, 1.0 - variance(targets - values) / all_of_it, 0.0)
