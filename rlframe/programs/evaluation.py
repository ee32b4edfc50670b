"""Evaluations: episodes played with what a run has learned, during the run and after it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

from rlframe.actors import Evaluator
from rlframe.actors.actor import env_seed
from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.agents import Agent
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.progress import STARTING
from rlframe.programs.experiment import Experiment
from rlframe.programs.restored import restored
from rlframe.programs.run_dir import RunDir, open_run
from rlframe.programs.topologies.parts import make_agent, make_pool
from rlframe.programs.video import Film
from rlframe.types import Logs


class Evaluations:
    """A run's evaluations: greedy, in environments whose seeds training never used, and the same each time.

    The inferencer is compiled once; the environments are built for each evaluation and closed after it.
    """

    _NEVER = 2**62  # calls: an evaluation is of one version, whatever the learner does meanwhile

    def __init__(self, experiment: Experiment, agent: Agent, learner: Any) -> None:
        self._experiment = experiment.synchronous
        cfg = InferencerConfig(greedy=True, seed=experiment.seed, sync_interval=self._NEVER)
        self._inferencer = Inferencer(cfg, agent, learner)
        self._begin = self._inferencer.get_state()
        self._evaluator: Evaluator | None = None
        self._stopped = False

    def evaluate(self) -> Logs:
        """As `Evaluator.evaluate`, by the newest parameters."""
        episodes, seed = self._experiment.topology.eval_episodes, self._experiment.seed
        self._inferencer.set_state(self._begin)
        with contextlib.closing(_make_pool(self._experiment, episodes, seed)) as pool:
            self._evaluator = Evaluator(pool, self._inferencer, episodes, seed=seed)
            if self._stopped:
                self._evaluator.stop()
            return self._evaluator.evaluate()

    @property
    def steps(self) -> int:
        """Environment steps of the evaluation under way, or of the last one."""
        return self._evaluator.steps if self._evaluator is not None else 0

    def stop(self) -> None:
        """Ends the evaluation under way, and all that come, with StoppedError. Any thread may call it."""
        self._stopped = True
        if self._evaluator is not None:
            self._evaluator.stop()


def evaluate(run_dir: str | os.PathLike, *, episodes: int = 20, seed: int | None = None) -> Logs:
    """Plays episodes greedily with the latest checkpoint of a run, and writes nothing.

    Args:
        run_dir: the run's directory.
        episodes: how many to play.
        seed: of the environments; None: the run's own, whose evaluation this repeats.

    Returns:
        As `Evaluator.evaluate`.

    Raises:
        UsageError: there is no run in the directory.
        CheckpointError: it has no checkpoint, or a damaged one.
    """
    directory, experiment = open_run(run_dir)
    seed = experiment.seed if seed is None else seed
    with contextlib.closing(_make_pool(experiment.synchronous, episodes, seed)) as pool:
        return _play(directory, experiment, pool, episodes, seed)


def record(run_dir: str | os.PathLike, path: str | os.PathLike, *, episodes: int = 1, seed: int | None = None) -> Logs:
    """Plays episodes as `evaluate` does, one after another, and writes them as a video.

    Args:
        run_dir: the run's directory.
        path: the video; its suffix (.mp4, .mkv, .webm) decides the format.
        episodes: how many to show.
        seed: of the environment; None: the run's own.

    Returns:
        As `Evaluator.evaluate`, and `frames`.

    Raises:
        UsageError: the environment does not render, or a package that is needed is missing.
        CheckpointError: the run has no checkpoint, or a damaged one.
    """
    directory, experiment = open_run(run_dir)
    seed = experiment.seed if seed is None else seed
    with Film(experiment, path) as film:
        pool = film.make_pool(seed=env_seed(seed, EVALUATOR_RANK))
        result = _play(directory, experiment, pool, episodes, seed)
    return {**result, "frames": film.frames}


def _make_pool(experiment: Experiment, num_envs: int, seed: int) -> Any:
    """Environments for evaluation, with seeds that training never uses."""
    env_kwargs = {**experiment.env_kwargs, **experiment.topology.eval_env_kwargs}
    # True rewards, whatever training saw.
    experiment = dataclasses.replace(experiment, topology=dataclasses.replace(experiment.topology, clip_rewards=None))
    with STARTING:
        return make_pool(experiment, num_envs, env_kwargs, env_seed(seed, EVALUATOR_RANK))


def _play(directory: RunDir, experiment: Experiment, pool: Any, episodes: int, seed: int) -> Logs:
    agent = make_agent(experiment, pool.codec)
    inferencer = Inferencer(InferencerConfig(greedy=True, seed=seed), agent, restored(agent, directory))
    return Evaluator(pool, inferencer, episodes, seed=seed).evaluate()
