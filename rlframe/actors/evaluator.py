"""The Evaluator plays full episodes in its own environments and reports their returns."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from rlframe.actors.actor import env_seed
from rlframe.actors.stepper import reset_at_first
from rlframe.envs import as_pool
from rlframe.envs.pool import stepping_phase
from rlframe.errors import EnvError, StoppedError, UsageError
from rlframe.inferencers.base import Inference, as_inference
from rlframe.interprocess.phases import STARTING
from rlframe.types import LAST, Logs, TimeStep, global_env_ids

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
        quota = np.full(num_envs, self._episodes // num_envs)
        quota[: self._episodes % num_envs] += 1
        returns, lengths, played = np.zeros(num_envs), np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        done: list[tuple[float, int]] = []
        initial_state = state = self._inferencer.initial_state(num_envs)
        stepping = stepping_phase(self._env)
        if self._first is None:
            self.reset()
        assert self._first is not None
        timestep, self._first = self._first, None
        while np.any(played < quota):
            if self._stop.is_set():
                raise StoppedError("The evaluation was stopped.")
            output, state = self._inferencer.inference(env_ids, timestep, state)
            with stepping:
                timestep = self._env.step(output.action)
            self.steps += num_envs
            state = reset_at_first(timestep, state, initial_state)
            returns += timestep.reward
            lengths += 1
            for i in np.flatnonzero(timestep.step_type == LAST):
                if played[i] < quota[i]:
                    done.append((returns[i], lengths[i]))
                played[i] += 1
                # The next step only resets the environment. This step ignores its action and belongs to no episode.
                returns[i], lengths[i] = 0.0, -1
            self._check_lengths(np.where(played < quota, lengths, 0))
        values = np.array([value for value, _ in done])
        return {
            "return_mean": float(values.mean()),
            "return_std": float(values.std()),
            "length_mean": float(np.mean([length for _, length in done])),
            "episodes": len(done),
            "params_version": output.params_version,
            "returns": values,
        }

    def _check_lengths(self, lengths: np.ndarray) -> None:
        """Raise EnvError for an episode that is too long. `lengths` [num_envs] is 0 for episodes that do not count."""
        if lengths.max() <= self._max_episode_length:
            return
        raise EnvError(
            f"Evaluation: environment {int(lengths.argmax())} has run for {lengths.max():,} steps without ending its "
            f"episode; the limit is {self._max_episode_length:,}. Give the environment a time limit, or raise this one:"
            " Evaluator(max_episode_length=...), rlframe train --eval-max-episode-length, rlframe evaluate "
            "--max-episode-length."
        )

    def stop(self) -> None:
        """End `evaluate`, now and in later calls. Any thread may call it."""
        self._stop.set()

    def close(self) -> None:
        """Close the environments."""
        self._env.close()
