"""Normalisation by running statistics: observations by their mean and deviation, rewards by their returns' deviation.

The statistics belong to the parameters: the learner state holds them, the learner updates them from its batches, and
`actor_params` publishes them, so that they have versions, are saved, are the same for all actors, and stand still in
evaluations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.errors import UsageError, check_above
from rlframe.types import FIRST, AgentState, Batch, Logs, Params, SequenceBatch, TransitionBatch, Tree

_EPSILON = 1e-8  # added to variances; baselines/common/vec_env/vec_normalize.py


class Moments(NamedTuple):
    """Mean and variance of what was seen, over all axes in front of an array's own."""

    count: Any  # [] float32
    mean: tuple[Any, ...]  # float32 arrays
    variance: tuple[Any, ...]


class Statistics(NamedTuple):
    """What a learner state holds; () in the place of what is not normalised."""

    observation: Any  # Moments of the leaves that are normalised
    returns: Any  # Moments of one number: the discounted sum of an episode's rewards so far


class AccumulatingState(NamedTuple):
    """An agent's state where rewards are normalised."""

    network: AgentState  # of a recurrent network, or ()
    return_so_far: Any  # [B] float32: the discounted sum of the episode's rewards


class NormalisedParams(NamedTuple):
    """What is published: parameters, and the statistics that they go with."""

    params: Params
    statistics: Statistics


class NormalisedState(NamedTuple):
    """A `LearnerState`, with running statistics; () where nothing is normalised."""

    opt_state: Any
    steps: Any
    rng: Any
    statistics: Any


def initial_moments(shapes: list[tuple[int, ...]]) -> Moments:
    """Mean 0 and variance 1, of almost no weight (OpenAI Baselines, `baselines/common/running_mean_std.py`)."""
    ones = tuple(jnp.ones(shape, jnp.float32) for shape in shapes)
    return Moments(jnp.float32(1e-4), tuple(jnp.zeros_like(one) for one in ones), ones)


def updated_moments(moments: Moments, values: list[jax.Array], mask: jax.Array) -> Moments:
    """The moments after `values` have been seen, too (Chan et al. 1979, equation 2.1).

    Args:
        moments: of what was seen before.
        values: arrays [N, ...], as many as the moments are of.
        mask: [N] float32, 0 where a row is left out.
    """
    seen = jnp.sum(mask)
    count = moments.count + seen
    means, variances = [], []
    for mean, variance, rows in zip(moments.mean, moments.variance, values, strict=True):
        weights = mask.reshape(-1, *[1] * (rows.ndim - 1)) / jnp.maximum(seen, 1.0)
        rows_mean = jnp.sum(weights * rows, axis=0)
        rows_variance = jnp.sum(weights * jnp.square(rows - rows_mean), axis=0)
        apart, share = rows_mean - mean, seen / count
        means.append(mean + apart * share)
        variances.append(variance + (rows_variance - variance) * share + jnp.square(apart) * share * (1.0 - share))
    return Moments(count, tuple(means), tuple(variances))


class Normaliser:
    """Normalises what an agent sees and learns from, if its config asks for it; all methods are pure.

    Observations: leaves of floating point that are no images, less their mean, over their deviation, clipped. They are
    normalised by the statistics that the actor had, which are updated after it: so log-probabilities stay exact.
    Rewards: over the deviation of the discounted return so far, clipped. Each environment's return so far is a part of
    the agent's state (`initial_state`, `accumulate`), and the learner finds it in `extras["return"]`.

    Args:
        cfg: a config with `normalise_observations` and `observation_clip`; for rewards `normalise_rewards`,
            `reward_clip` and `discount` as well.
        observation_spec: of one environment.

    Raises:
        UsageError: a clip is not above 0, or no leaf of the observation can be normalised.
    """

    def __init__(self, cfg: Any, observation_spec: Tree) -> None:
        self.observations: bool = cfg.normalise_observations
        self.rewards: bool = getattr(cfg, "normalise_rewards", False)
        self._cfg = cfg
        leaves = jax.tree.leaves(observation_spec)
        self._which = [np.issubdtype(leaf.dtype, np.floating) and len(leaf.shape) < 3 for leaf in leaves]
        self._shapes = [tuple(leaf.shape) for leaf, normalised in zip(leaves, self._which, strict=True) if normalised]
        check_above(cfg, 0, *(name for name in ("observation_clip", "reward_clip") if hasattr(cfg, name)))
        if self.observations and not self._shapes:
            raise UsageError(
                f"{type(cfg).__name__}.normalise_observations is for vectors of floats, of which the observations have "
                f"none: {observation_spec!r}. Leave it False."
            )

    @property
    def is_on(self) -> bool:
        """Whether anything is normalised."""
        return self.observations or self.rewards

    def initial_statistics(self) -> Any:
        """Those of a learner at step 0."""
        if not self.is_on:
            return ()
        observation = initial_moments(self._shapes) if self.observations else ()
        return Statistics(observation, initial_moments([()]) if self.rewards else ())

    # Acting

    def actor_params(self, params: Params, statistics: Any) -> Any:
        """What to publish: the parameters with the statistics, or alone where observations are not normalised."""
        return NormalisedParams(params, statistics) if self.observations else params

    def acting(self, published: Any, observation: Tree) -> tuple[Params, Tree]:
        """(parameters, what the network sees) of what was published."""
        if not self.observations:
            return published, observation
        return published.params, self.observe(published.statistics, observation)

    def observe(self, statistics: Any, observation: Tree) -> Tree:
        """Observations `[..., *shape]`, normalised."""
        if not self.observations:
            return observation
        moments, clip = statistics.observation, self._cfg.observation_clip
        known = iter(zip(moments.mean, moments.variance, strict=True))
        leaves, treedef = jax.tree.flatten(observation)
        for i, normalised in enumerate(self._which):
            if normalised:
                mean, variance = next(known)
                leaves[i] = jnp.clip((leaves[i] - mean) / jnp.sqrt(variance + _EPSILON), -clip, clip)
        return treedef.unflatten(leaves)

    def initial_state(self, network_state: AgentState, batch_size: int) -> AgentState:
        """The agent's state at FIRST, of a network's: with a return of 0 where rewards are normalised."""
        return AccumulatingState(network_state, np.zeros((batch_size,), np.float32)) if self.rewards else network_state

    def network_state(self, state: AgentState) -> AgentState:
        """The network's part of the agent's state."""
        return state.network if self.rewards else state

    def accumulate(
        self, state: AgentState, network_state: AgentState, reward: jax.Array
    ) -> tuple[AgentState, dict[str, Any]]:
        """(the agent's state after a timestep with this reward, extras for the learner).

        Args:
            state: of the agent before.
            network_state: what the network's part of it has become.
            reward: [B], of the timestep.
        """
        if not self.rewards:
            return network_state, {}
        so_far = self._cfg.discount * state.return_so_far + reward
        return AccumulatingState(network_state, so_far), {"return": so_far}

    # Learning

    def learn(
        self, update: Callable[..., tuple[Any, Any, Logs]], params: Any, learner_state: Any, batch: Batch
    ) -> tuple[Any, Any, Logs]:
        """One `update(params, learner_state, batch)` from the batch as it is to be learned from; as `learner_step`."""
        data, statistics = self.batch(learner_state.statistics, batch.data)
        params, learner_state, logs = update(params, learner_state, batch._replace(data=data))
        return params, learner_state._replace(statistics=statistics), logs

    def batch(self, statistics: Any, data: Any) -> tuple[Any, Any]:
        """(a batch's data as the agent is to learn from it, the statistics that have seen it).

        Args:
            statistics: those by which the newest parameters act.
            data: a `SequenceBatch`; or a `TransitionBatch`, whose rewards stay as they are.
        """
        if not self.is_on:
            return data, statistics
        seen, raw = statistics, data
        if self.rewards:
            # First: no log-probability depends on them, and so the first batch is scaled, too.
            seen = seen._replace(returns=_with_returns(seen.returns, raw))
            scale = jnp.sqrt(seen.returns.variance[0] + _EPSILON)
            clip = self._cfg.reward_clip
            reward = jnp.clip(raw.reward / scale, -clip, clip)
            data = data._replace(reward=reward, agent_state=self.network_state(raw.agent_state))
        if self.observations:
            data = data._replace(observation=self.observe(statistics, raw.observation))
            if isinstance(raw, TransitionBatch):
                data = data._replace(next_observation=self.observe(statistics, raw.next_observation))
            seen = seen._replace(observation=self._with_observations(seen.observation, raw))
        return data, seen

    def _with_observations(self, moments: Moments, data: Any) -> Moments:
        leaves = [leaf for leaf, seen in zip(jax.tree.leaves(data.observation), self._which, strict=True) if seen]
        if isinstance(data, SequenceBatch):  # the last timestep of one is the first of the next
            leaves = [leaf[:, :-1] for leaf in leaves]
        rows = [leaf.reshape(-1, *shape) for leaf, shape in zip(leaves, self._shapes, strict=True)]
        return updated_moments(moments, rows, jnp.ones(len(rows[0]), jnp.float32))


def _with_returns(moments: Moments, data: SequenceBatch) -> Moments:
    returns = jnp.asarray(data.extras["return"]).reshape(-1)
    has_reward = (data.step_type[:, :-1] != FIRST).astype(jnp.float32).reshape(-1)
    return updated_moments(moments, [returns], has_reward)
