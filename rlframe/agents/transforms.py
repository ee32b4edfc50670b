"""Transforms: Agents that wrap another Agent. `Normalized` normalizes the inputs of an unchanged inner agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.agents.base import Agent
from rlframe.errors import UsageError, check_above, check_fraction
from rlframe.types import (
    FIRST,
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

_EPSILON = 1e-8  # added to variances, as in baselines/common/vec_env/vec_normalize.py


class Moments(NamedTuple):
    """Running mean and variance of several arrays."""

    count: Any  # [] float32
    mean: tuple[Any, ...]  # float32 arrays
    variance: tuple[Any, ...]


class RunningStatistics(NamedTuple):
    """The statistics of one parameter version. A field is () if its values are not normalized."""

    observation: Any  # `Moments` of the normalized leaves
    returns: Any  # `Moments` of the discounted sum of rewards since the start of the episode


class NormalizedParams(NamedTuple):
    """The published parameters of a `Normalized` agent."""

    params: Any  # `actor_params` of the inner agent
    statistics: RunningStatistics


class NormalizedAgentState(NamedTuple):
    """The state of a `Normalized` agent that normalizes rewards."""

    agent: AgentState  # state of the inner agent
    return_so_far: Any  # [B] float32: the discounted sum of the episode's rewards


class NormalizedLearnerState(NamedTuple):
    """The learner state of a `Normalized` agent."""

    agent: Any  # learner state of the inner agent
    statistics: RunningStatistics


def initial_moments(shapes: list[tuple[int, ...]]) -> Moments:
    """Return moments with mean 0, variance 1 and nearly zero weight (`baselines/common/running_mean_std.py`)."""
    ones = tuple(jnp.ones(shape, jnp.float32) for shape in shapes)
    return Moments(jnp.float32(1e-4), tuple(jnp.zeros_like(one) for one in ones), ones)


def updated_moments(moments: Moments, values: list[jax.Array], mask: jax.Array) -> Moments:
    """Add `values` to the moments (Chan et al. 1979, equation 2.1).

    Args:
        moments: moments of all earlier values.
        values: one array [N, ...] for each array of means.
        mask: [N] float32, 0 for rows to ignore.
    """
    seen = jnp.sum(mask)
    count = moments.count + seen
    means, variances = [], []
    for mean, variance, rows in zip(moments.mean, moments.variance, values, strict=True):
        weights = mask.reshape(-1, *[1] * (rows.ndim - 1)) / jnp.maximum(seen, 1.0)
        rows_mean = jnp.sum(weights * rows, axis=0)
        rows_variance = jnp.sum(weights * jnp.square(rows - rows_mean), axis=0)
        difference, share = rows_mean - mean, seen / count
        means.append(mean + difference * share)
        variances.append(variance + (rows_variance - variance) * share + jnp.square(difference) * share * (1.0 - share))
    return Moments(count, tuple(means), tuple(variances))


class Normalized(Agent):
    """A transform that normalizes the observations, and optionally the rewards, of an agent.

    Observations: subtract the running mean from each floating-point leaf that is not an image, divide the leaf by its
    standard deviation, and clip it. Rewards: divide by the standard deviation of the return so far (the discounted sum
    of the episode's rewards), and clip. For acting, `timestep.reward` is not changed.

    The statistics are part of the learner state. Each learner step updates them from its batch, and `actor_params`
    publishes them with the parameters. Therefore the statistics have versions, checkpoints contain them, all actors use
    the same statistics, and evaluations do not change them. A batch is normalized with the observation statistics that
    actors use with the newest parameters, and then updates these statistics. This order keeps log-probabilities exact.
    The return statistics are updated before the rewards of the batch are scaled.

    The return so far of each environment is part of the agent state. The learner receives it as `extras["return"]`,
    which is removed before the inner agent receives the batch.

    Args:
        agent: the agent to wrap.
        observations: True to normalize observations.
        observation_clip: limit of a normalized observation, in standard deviations.
        rewards: True to normalize rewards. Only for agents that learn from a `Sequence`.
        reward_clip: limit of a normalized reward.
        discount: discount of the return so far. None uses `agent.cfg.discount`, or 0.99 if the config has no discount.

    Raises:
        UsageError: a number is out of range, no leaf of the observation can be normalized, or rewards should be
            normalized but the agent learns from `Transition` items.
    """

    def __init__(
        self,
        agent: Agent,
        /,
        *,
        observations: bool = True,
        observation_clip: float = 10.0,
        rewards: bool = False,
        reward_clip: float = 10.0,
        discount: float | None = None,
    ) -> None:
        super().__init__(agent.cfg, agent.observation_spec, agent.action_spec)
        self.agent = agent
        self.network_configs, self.learns_from = agent.network_configs, agent.learns_from
        self.observations, self.observation_clip = observations, observation_clip
        self.rewards, self.reward_clip = rewards, reward_clip
        self.discount = getattr(agent.cfg, "discount", 0.99) if discount is None else discount
        check_above(self, 0, "observation_clip", "reward_clip")
        check_fraction(self, "discount")
        leaves = jax.tree.leaves(agent.observation_spec)
        self._is_normalized = [np.issubdtype(leaf.dtype, np.floating) and len(leaf.shape) < 3 for leaf in leaves]
        self._shapes = [tuple(leaf.shape) for leaf in self._selected(leaves)]
        if observations and not self._shapes:
            raise UsageError(
                f"{agent.type_name}: normalize_observations is for vectors of floats, and the observations have "
                f"none: {agent.observation_spec!r}. Leave it False."
            )
        if rewards and not isinstance(agent.replay_spec.item, Sequence):
            raise UsageError(
                f"{agent.type_name}: normalize_rewards is for agents that learn from a Sequence, but this agent "
                f"learns from {agent.replay_spec.item!r}. Leave it False."
            )

    @property
    def type_name(self) -> str:
        """The `type_name` of the inner agent."""
        return self.agent.type_name

    def with_inner(self, change: Callable[[Agent], Agent]) -> Agent:
        """Return this transform, applied to the changed inner agent."""
        return type(self)(self.agent.with_inner(change), **self._constructed_with[1])

    # Acting

    def initial_params(self, rng: jax.Array) -> Params:
        """Return the parameters of the inner agent."""
        return self.agent.initial_params(rng)

    def initial_state(self, batch_size: int) -> AgentState:
        """Return the state of the inner agent. If rewards are normalized, add a discounted reward sum of 0."""
        state = self.agent.initial_state(batch_size)
        return NormalizedAgentState(state, np.zeros((batch_size,), np.float32)) if self.rewards else state

    def actor_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        """Act as the inner agent does, on normalized observations."""
        output, state = self._act(self.agent.actor_step, rng, params, timestep, state)
        if self.rewards:
            if "return" in output.extras:
                raise UsageError(
                    f'{type(self.agent).__name__}: extras["return"] is reserved for normalize_rewards. '
                    "Give the extra of this agent another name."
                )
            output = output._replace(extras={**output.extras, "return": state.return_so_far})
        return output, state

    def eval_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        """Act without exploration as the inner agent does, on normalized observations."""
        return self._act(self.agent.eval_step, rng, params, timestep, state)

    def actor_params(self, params: Params, learner_state: NormalizedLearnerState) -> Tree:
        """Return the `actor_params` of the inner agent. If observations are normalized, add the statistics."""
        published = self.agent.actor_params(params, learner_state.agent)
        return NormalizedParams(published, learner_state.statistics) if self.observations else published

    def _act(
        self, step: Any, rng: jax.Array, params: Any, timestep: TimeStep, state: Any
    ) -> tuple[AgentOutput, AgentState]:
        if self.observations:
            timestep = timestep._replace(observation=self._observed(params.statistics, timestep.observation))
            params = params.params
        if not self.rewards:
            return step(rng, params, timestep, state)
        output, after = step(rng, params, timestep, state.agent)
        return output, NormalizedAgentState(after, self.discount * state.return_so_far + timestep.reward)

    def _observed(self, statistics: RunningStatistics, observation: Tree) -> Tree:
        """Normalize an observation `[..., *shape]`."""
        moments, clip = statistics.observation, self.observation_clip
        known = iter(zip(moments.mean, moments.variance, strict=True))
        leaves, treedef = jax.tree.flatten(observation)
        for i, is_normalized in enumerate(self._is_normalized):
            if is_normalized:
                mean, variance = next(known)
                leaves[i] = jnp.clip((leaves[i] - mean) / jnp.sqrt(variance + _EPSILON), -clip, clip)
        return treedef.unflatten(leaves)

    def _selected(self, leaves: list[Any]) -> list[Any]:
        """Return the normalized leaves of an observation."""
        return [leaf for leaf, is_normalized in zip(leaves, self._is_normalized, strict=True) if is_normalized]

    # Learning

    @property
    def jit_learner_step(self) -> bool:
        """The `jit_learner_step` of the inner agent."""
        return self.agent.jit_learner_step

    @property
    def replay_spec(self) -> ReplaySpec:
        """The `replay_spec` of the inner agent."""
        return self.agent.replay_spec

    def check_num_envs(self, num_envs: int) -> None:
        """Call `check_num_envs` of the inner agent."""
        self.agent.check_num_envs(num_envs)

    def initial_learner_state(self, params: Params) -> NormalizedLearnerState:
        """Return the learner state of the inner agent, with initial statistics."""
        observation = initial_moments(self._shapes) if self.observations else ()
        statistics = RunningStatistics(observation, initial_moments([()]) if self.rewards else ())
        return NormalizedLearnerState(self.agent.initial_learner_state(params), statistics)

    def seeded(self, learner_state: NormalizedLearnerState, rng: jax.Array) -> NormalizedLearnerState:
        """Seed the learner state of the inner agent."""
        return learner_state._replace(agent=self.agent.seeded(learner_state.agent, rng))

    def learner_step(
        self, params: Params, learner_state: NormalizedLearnerState, batch: Batch
    ) -> tuple[Params, NormalizedLearnerState, Logs]:
        """Update the inner agent from the normalized batch. Update the statistics from the original batch."""
        data, statistics = self.normalized(learner_state.statistics, batch.data)
        params, inner, logs = self.agent.learner_step(params, learner_state.agent, batch._replace(data=data))
        return params, NormalizedLearnerState(inner, statistics), logs

    def normalized(self, statistics: RunningStatistics, data: Any) -> tuple[Any, RunningStatistics]:
        """Return the normalized data of a batch for the inner agent, and the updated statistics.

        Args:
            statistics: statistics of the newest parameters.
            data: a `SequenceBatch`, or a `TransitionBatch` if rewards are not normalized.
        """
        raw, updated = data, statistics
        if self.rewards:
            # Update the return statistics before scaling, so that the first batch is also scaled.
            # Log-probabilities do not depend on the return statistics, so this is allowed.
            returns = _with_returns(statistics.returns, raw)
            updated = updated._replace(returns=returns)
            reward = jnp.clip(
                raw.reward / jnp.sqrt(returns.variance[0] + _EPSILON), -self.reward_clip, self.reward_clip
            )
            extras = {name: value for name, value in raw.extras.items() if name != "return"}
            data = data._replace(reward=reward, extras=extras, agent_state=raw.agent_state.agent)
        if self.observations:
            data = data._replace(observation=self._observed(statistics, raw.observation))
            leaves = self._selected(jax.tree.leaves(raw.observation))
            if isinstance(raw, SequenceBatch):  # skip the last timestep, because the next sequence contains it too
                leaves = [leaf[:, :-1] for leaf in leaves]
            else:
                data = data._replace(next_observation=self._observed(statistics, raw.next_observation))
            rows = [leaf.reshape(-1, *shape) for leaf, shape in zip(leaves, self._shapes, strict=True)]
            moments = updated_moments(statistics.observation, rows, jnp.ones(len(rows[0]), jnp.float32))
            updated = updated._replace(observation=moments)
        return data, updated


def _with_returns(moments: Moments, data: SequenceBatch) -> Moments:
    returns = jnp.asarray(data.extras["return"]).reshape(-1)
    has_reward = (data.step_type[:, :-1] != FIRST).astype(jnp.float32).reshape(-1)
    return updated_moments(moments, [returns], has_reward)
