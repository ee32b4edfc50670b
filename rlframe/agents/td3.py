"""Twin delayed deep deterministic policy gradient (TD3; Fujimoto et al. 2018, arXiv:1802.09477)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlframe.agents import losses
from rlframe.agents.base import TargetState
from rlframe.agents.networks import MLPConfig, NatureCNNConfig
from rlframe.agents.off_policy import check_replay_size
from rlframe.agents.returns import soft_targets
from rlframe.agents.schedules import Scheduled, check_schedules, current, current_values, descend_at_rate, scheduled
from rlframe.agents.twin_critics import TwinCriticAgent
from rlframe.errors import check_at_least, check_fraction
from rlframe.types import Batch, Logs, Params, Tree


@dataclasses.dataclass(frozen=True)
class TD3Config:
    """Defaults from Fujimoto et al. 2018, section 6.1 and appendix C. Noise is for actions scaled to [-1, 1]."""

    batch_size: int = 100
    replay_capacity: int = 1_000_000  # environment steps
    # Items in the replay before learning starts. Until then, actions are uniform.
    # The paper uses 1,000 for tasks whose episodes end early.
    min_replay_size: int = 10_000
    update_period: int = 1  # environment steps per learner step
    discount: float = 0.99
    learning_rate: Scheduled = scheduled(1e-3, above=0)  # Number or schedule, such as linear:3e-4:0.
    target_update_rate: float = 0.005  # tau: fraction by which target networks move in each policy update
    policy_period: int = 2  # learner steps per update of the policy and the target networks
    exploration_noise: Scheduled = scheduled(0.1)  # standard deviation of the exploration noise on actions
    smoothing_noise: float = 0.2  # standard deviation of the noise on the target policy's actions
    smoothing_clip: float = 0.5  # limit of the smoothing noise
    total_learner_steps: int | None = None  # Internal: number of updates in the run. Schedules end there.

    def __post_init__(self) -> None:
        check_at_least(
            self, 1, "batch_size", "min_replay_size", "update_period", "policy_period", "total_learner_steps"
        )
        check_fraction(self, "discount", "target_update_rate")
        check_at_least(self, 0, "smoothing_noise", "smoothing_clip")
        check_schedules(self)
        check_replay_size(self)


class TD3Params(NamedTuple):
    """The parameters that a TD3 learner trains."""

    policy: Params
    critics: Params


class TD3ActorParams(NamedTuple):
    """The parameters that a TD3 actor uses."""

    policy: Params
    uniform: Any  # [] float32: 1 until the first update; actions are uniform while it is 1
    noise: Any  # [] float32: standard deviation of the exploration noise


class TD3(TwinCriticAgent):
    """Deterministic policy gradient with twin critics and delayed policy updates, for bounded continuous actions.

    The policy network outputs actions `[B, n]` before tanh.
    """

    config_cls = TD3Config
    replaced_methods = dict.fromkeys(("apply_gradients", "update_learner_state"), "learner_step")
    network_configs = (MLPConfig((400, 300), "relu", orthogonal=False), NatureCNNConfig(orthogonal=False))

    def initial_params(self, rng: jax.Array) -> TD3Params:
        return TD3Params(*self._nets.init(rng))

    # Acting

    def exploring_action(self, rng: jax.Array, params: TD3ActorParams, observation: Tree) -> jax.Array:
        action = self.greedy(params.policy, observation)
        return action + params.noise * jax.random.normal(rng, action.shape)

    def greedy(self, policy_params: Params, observation: Tree) -> jax.Array:
        return jnp.tanh(self._nets.policy_outputs(policy_params, observation))

    def actor_params(self, params: TD3Params, learner_state: TargetState) -> TD3ActorParams:
        uniform = (learner_state.steps == 0).astype(jnp.float32)
        return TD3ActorParams(params.policy, uniform, current(self.cfg, "exploration_noise", learner_state.steps))

    # Learning

    def make_optimizer(self) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(), descend_at_rate(self.cfg))

    def initial_learner_state(self, params: TD3Params) -> TargetState:
        _, steps, rng = super().initial_learner_state(params)
        opt_state = TD3Params(self.optimizer.init(params.policy), self.optimizer.init(params.critics))
        return TargetState(opt_state, steps, rng, target_params=params)

    def learner_step(
        self, params: TD3Params, learner_state: TargetState, batch: Batch
    ) -> tuple[TD3Params, TargetState, Logs]:
        """Update the critics. In every `policy_period`-th step, also update the policy and the target networks."""
        logs, grads = self.compute_gradients(params, learner_state, batch)
        steps = learner_state.steps
        critics, opt_state = self._descend(params.critics, grads.critics, learner_state.opt_state.critics, steps)
        params = params._replace(critics=critics)
        state = learner_state._replace(opt_state=learner_state.opt_state._replace(critics=opt_state), steps=steps + 1)

        def delayed(params: TD3Params, state: TargetState) -> tuple[TD3Params, TargetState]:
            grads = jax.grad(self.policy_loss)(params.policy, params.critics, batch.data.observation)
            policy, opt_state = self._descend(params.policy, grads, state.opt_state.policy, steps)
            params = params._replace(policy=policy)
            target = optax.incremental_update(params, state.target_params, self.cfg.target_update_rate)
            return params, state._replace(opt_state=state.opt_state._replace(policy=opt_state), target_params=target)

        is_due = steps % self.cfg.policy_period == 0
        params, state = jax.lax.cond(is_due, delayed, lambda *unchanged: unchanged, params, state)
        return params, state, {**logs, **current_values(self.cfg, lambda: steps)}

    def loss(self, params: TD3Params, learner_state: TargetState, batch: Batch) -> tuple[jax.Array, Logs]:
        """Return the loss of the critics, and logs."""
        data, cfg, target = batch.data, self.cfg, learner_state.target_params
        rng = jax.random.fold_in(learner_state.rng, learner_state.steps)
        next_action = self.greedy(target.policy, data.next_observation)
        noise = cfg.smoothing_noise * jax.random.normal(rng, next_action.shape)
        next_action = smoothed_action(next_action, noise, cfg.smoothing_clip)
        next_values = self._nets.values(target.critics, data.next_observation, next_action)
        targets = soft_targets(data.reward, data.discount, next_values, 0.0, 0.0)
        values = self._nets.values(params.critics, data.observation, self._range.to_units(data.action))
        logs = {"value": jnp.mean(values), "td_error": jnp.mean(jnp.abs(targets - values))}
        return jnp.mean(losses.twin_td_error(values, targets)), logs

    def policy_loss(self, policy_params: Params, critic_params: Params, observation: Tree) -> jax.Array:
        """Return []: the negative mean of the first critic's values for the policy's actions (algorithm 1)."""
        return -jnp.mean(self._nets.values(critic_params, observation, self.greedy(policy_params, observation))[0])

    def _descend(self, params: Params, grads: Params, opt_state: Any, steps: jax.Array) -> tuple[Params, Any]:
        updates, opt_state = self.optimizer.update(grads, opt_state, params, steps=steps)
        return optax.apply_updates(params, updates), opt_state


def smoothed_action(action: jax.Array, noise: jax.Array, clip: float) -> jax.Array:
    """Return an action scaled to [-1, 1] plus noise clipped to `clip` (Fujimoto et al. 2018, section 5.3)."""
    return jnp.clip(action + jnp.clip(noise, -clip, clip), -1.0, 1.0)
