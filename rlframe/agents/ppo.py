"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlframe.agents import losses
from rlframe.agents.base import Agent, LearnerState, NetFactory, PolicyFactory
from rlframe.agents.minibatches import MinibatchUpdates
from rlframe.agents.net_factory import build_network, default_config
from rlframe.agents.networks import Head, has_images
from rlframe.agents.optimizers import annealed, clipped
from rlframe.agents.policies import Policy, default_policy
from rlframe.agents.recurrent import Core
from rlframe.agents.returns import generalised_advantages
from rlframe.errors import UsageError, check_above, check_at_least, check_share
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
    Tree,
)


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
    normalise_advantages: bool = True  # in each minibatch; ppo2/model.py
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
        check_share(self, "discount", "gae_lambda")
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


class PPO(Agent):
    """PPO with a clipped objective, for discrete, multi-discrete and bounded continuous actions.

    A network's `apply` gives (the policy's parameters `[B, P]`, values `[B, 1]` or `[B]`). It may be recurrent
    (`rlframe.agents.recurrent`): minibatches are of whole unrolls then, from the state that they began with.
    """

    config_cls = PPOConfig

    def __init__(
        self,
        cfg: PPOConfig,
        observation_spec: Tree,
        action_spec: Tree,
        net_factory: NetFactory | None = None,
        policy_factory: PolicyFactory | None = None,
    ) -> None:
        super().__init__(cfg, observation_spec, action_spec, net_factory, policy_factory)
        self.policy: Policy = (policy_factory or default_policy)(action_spec)
        # Gains: baselines/common/policies.py. Deviations begin at exp(0).
        heads = (Head(self.policy.num_params, scale=0.01, num_free=self.policy.num_free), Head(1))
        factory = net_factory or default_config(self.networks, observation_spec)
        self.network = build_network(factory, observation_spec, action_spec, heads, may_recur=True)
        self._core = Core(self.network)

    # Acting

    def initial_state(self, batch_size: int) -> AgentState:
        return self._core.initial_state(batch_size)

    def actor_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        (logits, value), state = self._core.step(params, timestep.observation, state)
        sample = self.policy.sample(rng, logits)
        extras = {"log_prob": self.policy.log_prob(logits, sample), "value": value.reshape(logits.shape[0])}
        if self.policy.clips:
            extras["sample"] = sample
        return AgentOutput(self.policy.to_action(sample), extras), state

    def eval_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        (logits, _), state = self._core.step(params, timestep.observation, state)
        return AgentOutput(self.policy.to_action(self.policy.mode(logits)), {}), state

    # Learning

    @property
    def replay_spec(self) -> ReplaySpec:
        item = Sequence(self.cfg.unroll_length)
        capacity, max_staleness = self.cfg.unroll_length * 64, self.cfg.max_staleness
        return ReplaySpec("queue", item, batch_size=None, capacity=capacity, max_staleness=max_staleness)

    @property
    def jit_learner_step(self) -> bool:
        """False for images on a CPU, where each minibatch is jitted on its own; see `MinibatchUpdates`."""
        return not (has_images(self.observation_spec) and jax.default_backend() == "cpu")

    def make_optimizer(self) -> optax.GradientTransformation:
        return clipped(self.cfg.max_grad_norm, optax.scale_by_adam(eps=self.cfg.adam_epsilon))

    def initial_learner_state(self, params: Params) -> LearnerState:
        return super().initial_learner_state(params)._replace(steps=jnp.float32(0))

    def loss(self, params: Params, learner_state: LearnerState, batch: Batch) -> tuple[jax.Array, Logs]:
        """The loss of a minibatch: `batch.data` is a `Rollout`."""
        cfg, clip_epsilon = self.cfg, self._clip_epsilon(learner_state.steps)
        logits, value, rows = self._forward(params, batch.data)
        log_ratio = self.policy.log_prob(logits, rows.sample) - rows.log_prob
        ratio = jnp.exp(log_ratio)
        advantage = losses.normalise(rows.advantage, rows.mask) if cfg.normalise_advantages else rows.advantage
        mean = functools.partial(losses.masked_mean, mask=rows.mask)
        policy_loss = mean(losses.clipped_surrogate(ratio, advantage, clip_epsilon))
        value_loss = mean(losses.value_error(value, rows.value, rows.value + rows.advantage, cfg.value_clip))
        entropy = mean(self.policy.entropy(logits))
        loss = policy_loss + cfg.value_cost * value_loss - cfg.entropy_cost * entropy
        logs = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "clip_fraction": mean((jnp.abs(ratio - 1.0) > clip_epsilon).astype(jnp.float32)),
            "approx_kl": mean(ratio - 1.0 - log_ratio),  # Schulman 2020, joschu.net/blog/kl-approx.html
        }
        return loss, logs

    def rollout(self, params: Params, data: SequenceBatch) -> Rollout:
        """The steps of a batch with their advantages, by the values that the actor had."""
        value, last_value = jnp.asarray(data.extras["value"]), self._last_value(params, data)
        mask = (data.step_type[:, :-1] != LAST).astype(jnp.float32)
        advantage = generalised_advantages(
            data.reward.T,
            data.discount.T,
            jnp.concatenate([value, last_value[:, None]], axis=1).T,
            mask.T,
            discount=self.cfg.discount,
            gae_lambda=self.cfg.gae_lambda,
        ).T
        sample = data.extras["sample"] if self.policy.clips else data.action
        observation = jax.tree.map(lambda leaf: leaf[:, :-1], data.observation)
        rollout = Rollout(observation, sample, data.extras["log_prob"], value, advantage, mask)
        if self._core.is_recurrent:
            return rollout._replace(step_type=data.step_type[:, :-1], state=data.agent_state)
        return _rows(rollout)

    def learner_step(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, Logs]:
        """Epochs of minibatches of the rollout, each a step of `compute_gradients` and `apply_gradients`."""
        rate = self._learning_rate(learner_state.steps)
        params, learner_state, logs = self._minibatch_updates(params, learner_state, batch)
        return params, learner_state, {**logs, "learning_rate": rate}

    def apply_gradients(self, params: Params, grads: Params, learner_state: LearnerState) -> tuple[Params, Any, Logs]:
        """Do one step of Adam."""
        updates, opt_state = self.optimizer.update(grads, learner_state.opt_state, params)
        rate = self._learning_rate(learner_state.steps)
        return jax.tree.map(lambda param, update: param - rate * update, params, updates), opt_state, {}

    def check_num_envs(self, num_envs: int) -> None:
        self._minibatch_updates.check_rows(num_envs if self._core.is_recurrent else num_envs * self.cfg.unroll_length)

    @functools.cached_property
    def _minibatch_updates(self) -> MinibatchUpdates:
        cfg = self.cfg
        stops = None if cfg.target_kl is None else self._is_above_target_kl
        return MinibatchUpdates(
            self, self._rollout_and_logs, cfg.num_epochs, cfg.num_minibatches, cfg.envs_per_batch, stops
        )

    def _is_above_target_kl(self, logs: Logs) -> jax.Array:
        if "approx_kl" not in logs:
            given = ", ".join(sorted(logs))
            raise UsageError(f"{type(self).__name__}: target_kl needs approx_kl among the logs of loss, got {given}.")
        return logs["approx_kl"] > self.cfg.target_kl

    def _rollout_and_logs(self, params: Params, data: SequenceBatch) -> tuple[Rollout, Logs]:
        rollout = self.rollout(params, data)
        targets = rollout.value + rollout.advantage
        return rollout, {"explained_variance": explained_variance(rollout.value, targets, rollout.mask)}

    def _learning_rate(self, steps: jax.Array) -> jax.Array:
        cfg = self.cfg
        return annealed(cfg.learning_rate, steps, cfg.total_learner_steps if cfg.anneal_learning_rate else None)

    def _clip_epsilon(self, steps: jax.Array) -> jax.Array:
        return annealed(self.cfg.clip_epsilon, steps, self.cfg.total_learner_steps if self.cfg.anneal_clip else None)

    def _forward(self, params: Params, rollout: Rollout) -> tuple[jax.Array, jax.Array, Rollout]:
        """(policy parameters [N, P], values [N], the rollout with rows of one step) of a minibatch."""
        if self._core.is_recurrent:
            outputs, _ = self._core.unroll(params, rollout.observation, rollout.step_type, rollout.state)
            logits, value = _rows(outputs)
            rollout = _rows(rollout._replace(step_type=(), state=()))
        else:
            logits, value = self.network.apply(params, rollout.observation)
        return logits, value.reshape(logits.shape[0]), rollout

    def _last_value(self, params: Params, data: SequenceBatch) -> jax.Array:
        """[B]: the value of the timestep after the unroll."""
        if self._core.is_recurrent:
            outputs, _ = self._core.unroll(params, data.observation, data.step_type, data.agent_state)
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


def _rows(tree: Tree) -> Tree:
    """Leaves [B * T, ...] of leaves [B, T, ...]."""
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *leaf.shape[2:])), tree)
