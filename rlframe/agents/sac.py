"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) for continuous control."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlframe.agents import losses
from rlframe.agents.base import TargetState
from rlframe.agents.distributions import SquashedGaussian
from rlframe.agents.networks import MLPConfig, NatureCNNConfig
from rlframe.agents.off_policy import check_replay_size
from rlframe.agents.returns import soft_targets
from rlframe.agents.schedules import Scheduled, check_schedules, current, scheduled
from rlframe.agents.twin_critics import TwinCriticAgent
from rlframe.errors import UsageError, check_above, check_at_least, check_fraction
from rlframe.types import Batch, Logs, Params, Tree


@dataclasses.dataclass(frozen=True)
class SACConfig:
    """Defaults from Haarnoja et al. 2018, table 1, and from the authors' code (softlearning)."""

    batch_size: int = 256
    replay_capacity: int = 1_000_000  # environment steps
    min_replay_size: int = 1_000  # items in the replay before learning starts; until then, actions are uniform
    update_period: int = 1  # environment steps per learner step
    discount: float = 0.99
    learning_rate: Scheduled = scheduled(3e-4, above=0)  # Number or schedule, such as linear:3e-4:0.
    # learning rate of critics and temperature; None uses learning_rate
    critic_learning_rate: Scheduled | None = scheduled(None, above=0)
    target_update_rate: float = 0.005  # tau: fraction by which the target critics move to the critics in each update
    initial_temperature: float = 1.0  # alpha: weight of the entropy
    learn_temperature: bool = True  # False keeps the temperature constant
    target_entropy: float | None = None  # nats, for actions scaled to [-1, 1]; None uses -(number of action dimensions)
    min_log_std: float = -20.0  # limits of the log standard deviation of the policy, before tanh
    max_log_std: float = 2.0
    total_learner_steps: int | None = None  # Internal: number of updates in the run. Schedules end there.

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "min_replay_size", "update_period", "total_learner_steps")
        check_fraction(self, "discount", "target_update_rate")
        check_above(self, 0, "initial_temperature")
        check_schedules(self)
        check_replay_size(self)
        if not -math.inf < self.min_log_std < self.max_log_std < math.inf:
            raise UsageError(
                f"SACConfig.min_log_std ({self.min_log_std}) must be below max_log_std ({self.max_log_std}), and both "
                "must be finite."
            )
        if self.target_entropy is not None and not math.isfinite(self.target_entropy):
            raise UsageError(f"SACConfig.target_entropy must be a finite number or None, got {self.target_entropy}.")


class SACParams(NamedTuple):
    """The parameters that a SAC learner trains."""

    policy: Params
    critics: Params
    log_temperature: Any  # [] float32


class SACActorParams(NamedTuple):
    """The parameters that a SAC actor uses."""

    policy: Params
    uniform: Any  # [] float32: 1 until the first update; actions are uniform while it is 1


class SAC(TwinCriticAgent):
    """Soft actor-critic with twin critics and a learned temperature, for bounded continuous actions.

    The policy network outputs means and log standard deviations `[B, 2 n]` of actions before tanh.
    """

    config_cls = SACConfig
    network_configs = (MLPConfig((256, 256), "relu", orthogonal=False), NatureCNNConfig(orthogonal=False))
    outputs_per_dimension = 2

    @functools.cached_property
    def distribution(self) -> SquashedGaussian:
        """The distribution of actions."""
        return SquashedGaussian(self.action_spec, self.cfg.min_log_std, self.cfg.max_log_std)

    def initial_params(self, rng: jax.Array) -> SACParams:
        log_temperature = jnp.asarray(math.log(self.cfg.initial_temperature), jnp.float32)
        return SACParams(*self._nets.init(rng), log_temperature)

    # Acting

    def exploring_action(self, rng: jax.Array, params: SACActorParams, observation: Tree) -> jax.Array:
        return self._act(rng, params.policy, observation)[0]

    def greedy(self, policy_params: Params, observation: Tree) -> jax.Array:
        return jnp.tanh(self.distribution.mode(self._nets.policy_outputs(policy_params, observation)))

    def actor_params(self, params: SACParams, learner_state: TargetState) -> SACActorParams:
        return SACActorParams(params.policy, (learner_state.steps == 0).astype(jnp.float32))

    # Learning

    def make_optimizer(self) -> optax.GradientTransformation:
        cfg = self.cfg
        of_critics = "learning_rate" if cfg.critic_learning_rate is None else "critic_learning_rate"
        policy, critics = (optax.adam(functools.partial(current, cfg, name)) for name in ("learning_rate", of_critics))
        temperature = critics if cfg.learn_temperature else optax.set_to_zero()
        return optax.multi_transform(
            {"policy": policy, "critics": critics, "temperature": temperature},
            SACParams("policy", "critics", "temperature"),
        )

    def initial_learner_state(self, params: SACParams) -> TargetState:
        state = super().initial_learner_state(params)
        return TargetState(state.opt_state, state.steps, state.rng, target_params=params.critics)

    def loss(self, params: SACParams, learner_state: TargetState, batch: Batch) -> tuple[jax.Array, Logs]:
        """Return the sum of three losses (of the critics, the policy and the temperature), and logs.

        Each parameter affects only one of the three losses, so a single gradient step is enough.
        """
        data, target_entropy = batch.data, self.cfg.target_entropy
        rng, next_rng = jax.random.split(jax.random.fold_in(learner_state.rng, learner_state.steps))
        temperature = jnp.exp(jax.lax.stop_gradient(params.log_temperature))

        next_action, next_log_prob = self._act(next_rng, params.policy, data.next_observation)
        next_values = self._nets.values(learner_state.target_params, data.next_observation, next_action)
        targets = soft_targets(data.reward, data.discount, next_values, next_log_prob, temperature)
        values = self._nets.values(params.critics, data.observation, self._range.to_units(data.action))
        critic_loss = jnp.mean(losses.twin_td_error(values, targets))

        action, log_prob = self._act(rng, params.policy, data.observation)
        action_values = self._nets.values(jax.lax.stop_gradient(params.critics), data.observation, action)
        policy_loss = jnp.mean(losses.soft_policy_loss(action_values, log_prob, temperature))
        target_entropy = -float(self._range.size) if target_entropy is None else target_entropy
        temperature_loss = jnp.mean(losses.temperature_loss(params.log_temperature, log_prob, target_entropy))
        logs = {
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "value": jnp.mean(values),
            "entropy": -jnp.mean(log_prob),
            "temperature": temperature,
        }
        return critic_loss + policy_loss + temperature_loss, logs

    def update_learner_state(self, params: SACParams, opt_state: Any, learner_state: TargetState) -> TargetState:
        learner_state = super().update_learner_state(params, opt_state, learner_state)
        rate = self.cfg.target_update_rate
        target = optax.incremental_update(params.critics, learner_state.target_params, rate)
        return learner_state._replace(target_params=target)

    def _act(self, rng: jax.Array, policy_params: Params, observation: Tree) -> tuple[jax.Array, jax.Array]:
        """Return (actions [B, n] scaled to [-1, 1], log-probabilities [B]). Both are differentiable."""
        logits = self._nets.policy_outputs(policy_params, observation)
        sample = self.distribution.sample(rng, logits)
        return jnp.tanh(sample), self.distribution.log_prob(logits, sample)
