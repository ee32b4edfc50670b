"""Evaluations: episodes played with what a run has learned, during the run and after it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Union

from rlframe.actors import Evaluator
from rlframe.actors.actor import env_seed
from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.agents import Agent
from rlframe.errors import EnvError, RlframeError, StoppedError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.phases import STARTING
from rlframe.programs.experiment import MAX_SEED, Experiment
from rlframe.programs.options.fields import convert
from rlframe.programs.options.make_experiment import with_fields
from rlframe.programs.options.resume import check_backend
from rlframe.programs.policies.saved import NEVER_SYNC, read_policy
from rlframe.programs.policies.video import VideoRecorder
from rlframe.programs.run_dir.directory import RunDir, open_run
from rlframe.programs.topologies.config import EvaluationOptions
from rlframe.programs.topologies.makers import make_agent, make_pool
from rlframe.types import Logs

_log = logging.getLogger(__name__)


class Evaluations:
    """A run's evaluations: greedy, in environments whose seeds training never used, and the same each time.

    The inferencer is compiled once. The environments are built for each evaluation and closed after it. Where not all
    of them can be built or reset, those that can play all episodes.

    Args:
        experiment: the run's; its topology's `eval_episodes`, `eval_num_envs` and `eval_max_episode_length` count.
        agent: the agent.
        learner: where the parameters come from.
        seed: of the environments; None: the run's.
    """

    def __init__(self, experiment: Experiment, agent: Agent, learner: Any, seed: int | None = None) -> None:
        self._experiment, self._seed = experiment.for_evaluation, experiment.seed if seed is None else seed
        cfg = InferencerConfig(greedy=True, seed=self._seed, sync_interval=NEVER_SYNC)
        self._inferencer = Inferencer(cfg, agent, learner)
        self._begin = self._inferencer.get_state()
        self._num_envs = num_eval_envs(experiment)
        self._evaluator: Evaluator | None = None
        self._stopped = False

    def evaluate(self, free_envs: Callable[[], Any] | None = None) -> Logs:
        """Evaluate the newest parameters, as `Evaluator.evaluate` does.

        Args:
            free_envs: closes the environments of training, if they are not needed any more. It is called if no
                environment can be built beside them.
        """
        self._inferencer.set_state(self._begin)
        wanted = self._num_envs
        try:
            evaluator, problem = make_largest(self._ready, wanted)
        except (EnvError, UsageError):
            if free_envs is None:
                raise
            free_envs()
            evaluator, problem = make_largest(self._ready, wanted)
        with contextlib.closing(evaluator):
            if problem is not None:
                self._num_envs = evaluator.num_envs
                _log.warning(
                    "The evaluation plays all its episodes in %d of %d environments; more did not start: %s",
                    self._num_envs,
                    wanted,
                    problem,
                )
            return evaluator.evaluate()

    @property
    def steps(self) -> int:
        """Environment steps of the evaluation under way, or of the last one."""
        return self._evaluator.steps if self._evaluator is not None else 0

    def stop(self) -> None:
        """End this evaluation and all later ones with StoppedError. Any thread may call it."""
        self._stopped = True
        if self._evaluator is not None:
            self._evaluator.stop()

    def _ready(self, num_envs: int) -> Evaluator:
        """Make an evaluator whose environments have begun their first episodes."""
        config = EvaluationOptions.of(self._experiment)
        with STARTING:  # with seeds that training never uses
            seed = env_seed(self._seed, EVALUATOR_RANK)
            pool = make_pool(self._experiment, num_envs, self._experiment.env_kwargs, seed)
        try:
            evaluator = self._evaluator = Evaluator(
                pool,
                self._inferencer,
                config.eval_episodes,
                seed=self._seed,
                max_episode_length=config.eval_max_episode_length,
            )
            if self._stopped:
                evaluator.stop()
            evaluator.reset()
        except BaseException:
            pool.close()
            raise
        return evaluator


def make_largest(make: Callable[[int], Any], count: int) -> tuple[Any, Exception | None]:
    """Return `make(count)`, or that of the largest smaller count that does not fail, and the error of the first try.

    What `make` returns has a `close()`.

    Raises:
        EnvError, UsageError: what `make(count)` raised; `make(1)` fails too.
    """
    try:
        return make(count), None
    except (EnvError, UsageError) as error:
        problem = error
    works, fails = 0, count
    while fails - works > 1:
        middle = (works + fails) // 2
        try:
            make(middle).close()
        except (EnvError, UsageError):
            fails = middle
        else:
            works = middle
    if not works:
        raise problem
    return make(works), problem


def num_eval_envs(experiment: Experiment) -> int:
    """Return the number of environments that an evaluation builds: at most one for each episode."""
    config = EvaluationOptions.of(experiment)
    return min(config.eval_num_envs or config.eval_episodes, config.eval_episodes)


def describe_evaluation(experiment: Experiment) -> str:
    """Describe the evaluation after training in a sentence, for the terminal."""
    config = EvaluationOptions.of(experiment)
    if not config.evaluates:
        return "No evaluation (eval_episodes is 0)."
    episodes, num_envs = config.eval_episodes, num_eval_envs(experiment)
    return (
        f"The evaluation after training: {episodes} episode{'s' * (episodes > 1)}, each of at most "
        f"{config.eval_max_episode_length:,} steps, in {num_envs} more environment{'s' * (num_envs > 1)}."
    )


def explain(error: BaseException | str) -> str:
    """Return the reason why an evaluation failed, as a sentence."""
    is_sentence = isinstance(error, (RlframeError, str))
    text = str(error).strip() if is_sentence else f"{type(error).__name__}: {error}".strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


class EvaluationOutcome(NamedTuple):
    """The values of an evaluation, or the reason why it failed; neither if it was not made."""

    step: int  # at which it began
    values: Logs | None = None
    problem: str | None = None  # a sentence


def try_evaluation(evaluate: Callable[[], Logs], step: int, *, final: bool) -> EvaluationOutcome:
    """Evaluate. A failure does not end the run.

    Args:
        evaluate: returns the values. What it raises is the problem of the outcome, unless it is a StoppedError.
        step: at which the evaluation begins.
        final: after training. A failure during training is warned of.
    """
    try:
        return EvaluationOutcome(step, evaluate())
    except StoppedError:
        raise
    except (Exception, SystemExit) as error:
        problem = explain(error)
    if not final:
        _log.warning("The evaluation at step %s failed; training continues. %s", f"{step:,}", problem)
    return EvaluationOutcome(step, problem=problem)


def evaluate(
    run_dir: str | os.PathLike,
    *,
    episodes: int = 20,
    seed: int | None = None,
    num_envs: int | None = None,
    max_episode_length: int | None = None,
    env: Any = None,
    agent: Any = None,
    network: Any = None,
) -> Logs:
    """Play episodes greedily with the latest checkpoint of a run, and write nothing.

    Args:
        run_dir: the run's directory.
        episodes: how many to play.
        seed: of the environments; None: the run's own, whose evaluation this repeats.
        num_envs: environments to build; None: as the run's own evaluations do.
        max_episode_length: the most steps of an episode; None: as in the run's own evaluations.
        env: as for `rlframe.train`, to play in instead of the run's; needed if that was defined in a notebook and is
            not there any more.
        agent, network: the same.

    Returns:
        As `Evaluator.evaluate`.

    Raises:
        UsageError: there is no run in the directory, or a number is too small.
        CheckpointError: it has no checkpoint, or a damaged one.
        EnvError: no environment could be built, one failed, or an episode was too long.
    """
    names = {"env": env, "agent": agent, "network": network}
    limits = {"num_envs": num_envs, "max_episode_length": max_episode_length}
    directory, experiment, seed = _open(run_dir, names, episodes, seed, **limits)
    made = make_agent(experiment)
    return Evaluations(experiment, made, read_policy(made, directory), seed).evaluate()


def record(
    run_dir: str | os.PathLike,
    path: str | os.PathLike,
    *,
    episodes: int = 1,
    seed: int | None = None,
    max_episode_length: int | None = None,
) -> Logs:
    """Play episodes as `evaluate` does, one after another, and write them as a video.

    Args:
        run_dir: the run's directory.
        path: the video; its suffix (.mp4, .mkv, .webm) decides the format.
        episodes: how many to show.
        seed: of the environment; None: the run's own.
        max_episode_length: the most steps of an episode; None: as in the run's own evaluations.

    Returns:
        As `Evaluator.evaluate`, and `frames`.

    Raises:
        UsageError: the environment does not render, or a package that is needed is missing.
        CheckpointError: the run has no checkpoint, or a damaged one.
    """
    directory, experiment, seed = _open(run_dir, {}, episodes, seed, max_episode_length=max_episode_length)
    limit = EvaluationOptions.of(experiment).eval_max_episode_length
    with VideoRecorder(experiment, path) as film:
        pool = film.make_pool(seed=env_seed(seed, EVALUATOR_RANK))
        agent = make_agent(experiment, pool.codec)
        inferencer = Inferencer(InferencerConfig(greedy=True, seed=seed), agent, read_policy(agent, directory))
        result = Evaluator(pool, inferencer, episodes, seed=seed, max_episode_length=limit).evaluate()
    return {**result, "frames": film.frames}


def _open(
    run_dir: str | os.PathLike, names: dict[str, Any], episodes: int, seed: int | None, **limits: int | None
) -> tuple[RunDir, Experiment, int]:
    """Open a run to evaluate it. Return its directory, the experiment with these limits, and the seed to use."""
    given = _given(seed=seed, episodes=convert(int, episodes, "episodes"), **limits)
    directory, experiment = open_run(run_dir, names)
    check_backend(directory.notes(), experiment)
    seed = given.pop("seed", experiment.seed)
    return directory, with_fields(experiment, **{f"eval_{name}": value for name, value in given.items()}), seed


def _given(**options: Any) -> dict[str, int]:
    """The options of an evaluation that are not None. Raise UsageError for one of a wrong type, or out of range."""
    found = {name: convert(Union[int, None], value, name) for name, value in options.items()}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        if name == "seed" and not 0 <= value <= MAX_SEED:
            raise UsageError(f"seed must be between 0 and {MAX_SEED}, got {value}.")
        if name != "seed" and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}.")
    return found
