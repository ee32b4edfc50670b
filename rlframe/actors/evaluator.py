"""The Evaluator plays full episodes in its own environments and reports their returns."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from rlframe.agents.trees import reset_where
from rlframe.envs import as_pool
from rlframe.envs.adapters import env_seed
from rlframe.envs.pool import stepping_phase, true_rewards
from rlframe.errors import EnvError, StoppedError, UsageError
from rlframe.inferencers.base import Inference, as_inference
from rlframe.interprocess.heartbeat import STARTING
from rlframe.types import FIRST, LAST, Logs, TimeStep, global_env_ids

# Ranks of actors are small. The evaluator derives its seeds from a rank that no actor has.
EVALUATOR_RANK = 2**30


class Evaluator:
    """Plays `episodes` episodes and reports their returns.

    The environments play equal numbers of episodes (the numbers differ by at most one). Otherwise short episodes would
    be overrepresented. Nothing is added to a replay buffer.

    Args:
        env_builder: as for `Actor`. Must be a synchronous pool. A pool of `episodes` environments is the fastest.
        inferencer: usually `Inferencer(InferencerConfig(greedy=True), agent, learner)`.
        episodes: number of episodes to play.
        seed: seed of the whole run. The environments get seeds that no actor of the run uses.
        max_episode_length: maximum number of steps in an episode. A longer episode is an error.

    Attributes:
        num_envs: number of environments.
        steps: environment steps so far, over all environments.
    """

    def __init__(
        self,
        env_builder: Any,
        inferencer: Inference | Any,
        episodes: int = 20,
        *,
        seed: int = 0,
        max_episode_length: int = 108_000,  # half an hour of Atari at 60 Hz
    ) -> None:
        for name, value in (("episodes", episodes), ("max_episode_length", max_episode_length)):
            if value < 1:
                raise UsageError(f"Evaluator.{name} must be at least 1, got {value}.")
        with STARTING:
            self._env = as_pool(env_builder, seed=env_seed(seed, EVALUATOR_RANK))
        if not self._env.is_sync:
            raise UsageError("Evaluator needs a synchronous pool (SyncEnv), but env_builder returned an AsyncEnv.")
        self.num_envs = self._env.num_envs
        self._inferencer = as_inference(inferencer)
        self._episodes = episodes
        self._max_episode_length = max_episode_length
        self._stop = threading.Event()
        # the result of `reset`, until `evaluate` uses it
        self._first: TimeStep | None = None
        self.steps = 0

    def reset(self) -> None:
        """Start the first episodes. `evaluate` does this itself. Call it to check that every environment starts."""
        with stepping_phase(self._env):
            self._first = self._env.reset()

    def evaluate(self) -> Logs:
        """Play the episodes, all with the newest version of the parameters at the start.

        Returns:
            `return_mean`, `return_std`, `length_mean`, `episodes`, `params_version` and `returns` ([episodes] float64).

        Raises:
            EnvError: an episode took more than `max_episode_length` steps.
            StoppedError: `stop` was called.
        """
        self._inferencer.refresh()
        num_envs = self.num_envs
        env_ids = global_env_ids(EVALUATOR_RANK, np.arange(num_envs))
        episodes = PlayedEpisodes(self._episodes, num_envs, self._max_episode_length)
        initial_state = state = self._inferencer.initial_state(num_envs)
        stepping = stepping_phase(self._env)
        if self._first is None:
            self.reset()
        assert self._first is not None
        timestep, self._first = self._first, None
        episodes.count(timestep.step_type, timestep.reward)
        while not episodes.are_complete:
            if self._stop.is_set():
                raise StoppedError("The evaluation was stopped.")
            output, state = self._inferencer.inference(env_ids, timestep, state)
            with stepping:
                timestep = self._env.step(output.action)
            self.steps += num_envs
            state = reset_where(timestep.step_type == FIRST, state, initial_state)
            episodes.count(timestep.step_type, true_rewards(self._env, timestep))
        return episodes.result(output.params_version)

    def stop(self) -> None:
        """End `evaluate`, now and in later calls. Any thread may call it."""
        self._stop.set()

    def close(self) -> None:
        """Close the environments."""
        self._env.close()


class PlayedEpisodes:
    """Counts the episodes of an evaluation, and sums their rewards.

    Args:
        episodes: number of episodes to play, over all environments.
        num_envs: number of environments.
        max_episode_length: maximum number of steps in an episode.

    Attributes:
        left: [num_envs] int32, the number of episodes that each environment must still complete. Environments that have
            completed all their episodes can play more. Those do not count.
    """

    def __init__(self, episodes: int, num_envs: int, max_episode_length: int) -> None:
        self.left = np.full(num_envs, episodes // num_envs, np.int32)
        self.left[: episodes % num_envs] += 1
        self._max_episode_length = max_episode_length
        # FIRST belongs to no step of an episode, so the length begins at -1.
        self._returns, self._lengths = np.zeros(num_envs), np.full(num_envs, -1, np.int64)
        self._done: list[tuple[float, int]] = []  # (return, length) of each completed episode

    @property
    def are_complete(self) -> bool:
        """True if all episodes are complete."""
        return not self.left.any()

    def count(self, step_type: np.ndarray, reward: np.ndarray) -> None:
        """Count the next timestep of every environment. Both arguments are [num_envs]. Start with FIRST.

        Raises:
            EnvError: an episode is too long.
        """
        returns, lengths, left = self._returns, self._lengths, self.left
        returns += reward
        lengths += 1
        for i in np.flatnonzero(step_type == LAST):
            if left[i]:
                self._done.append((returns[i], lengths[i]))
                left[i] -= 1
            returns[i], lengths[i] = 0.0, -1
        longest = np.where(left > 0, lengths, 0)
        if longest.max() <= self._max_episode_length:
            return
        raise EnvError(
            f"Evaluation: environment {int(longest.argmax())} has run for {longest.max():,} steps without ending its "
            f"episode; the limit is {self._max_episode_length:,}. Give the environment a time limit, or raise this one:"
            " Evaluator(max_episode_length=...), rlframe train --eval-max-episode-length, rlframe evaluate "
            "--max-episode-length."
        )

    def result(self, params_version: int) -> Logs:
        """Return the result of `Evaluator.evaluate`."""
        returns = np.array([value for value, _ in self._done])
        return {
            "return_mean": float(returns.mean()),
            "return_std": float(returns.std()),
            "length_mean": float(np.mean([length for _, length in self._done])),
            "episodes": len(returns),
            "params_version": params_version,
            "returns": returns,
        }
