"""Playing with what a run has learned."""

from __future__ import annotations

import os
from typing import Any

from rlframe.actors import Evaluator
from rlframe.actors.actor import env_seed
from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.errors import UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.programs.assemble import EnvBuilder, make_agent
from rlframe.programs.experiment import Experiment, load_experiment
from rlframe.programs.restored import Restored
from rlframe.programs.run_dir import RunDir
from rlframe.programs.video import Film
from rlframe.types import Logs


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
    directory, described = _open(run_dir)
    env_builder = EnvBuilder(described.synchronous, episodes, {**described.env_kwargs, **described.eval_env_kwargs})
    try:
        return _play(directory, described, env_builder, episodes, seed)
    finally:
        env_builder.close()


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
    directory, described = _open(run_dir)
    with Film(described, path) as film:
        result = _play(directory, described, film.make_pool, episodes, seed)
    return {**result, "frames": film.frames}


def _open(run_dir: str | os.PathLike) -> tuple[RunDir, Experiment]:
    directory = RunDir(run_dir)
    directory.check_holds_run()
    described = load_experiment(directory.config)
    if not isinstance(described, Experiment):
        raise UsageError(
            f"The run in {run_dir} is of a language model. Serve it (rlframe serve policy --run-dir {run_dir}), and "
            "have its environment ask it: python ENV_FILE.py evaluate --openai.base_url http://localhost:8001/v1"
        )
    return directory, described


def _play(directory: RunDir, described: Experiment, env_builder: Any, episodes: int, seed: int | None) -> Logs:
    seed = described.seed if seed is None else seed
    pool = env_builder(seed=env_seed(seed, EVALUATOR_RANK))
    agent = make_agent(described, pool.observation_spec, pool.action_spec)
    inferencer = Inferencer(InferencerConfig(greedy=True, seed=seed), agent, Restored(agent, directory))
    return Evaluator(pool, inferencer, episodes, seed=seed).evaluate()
