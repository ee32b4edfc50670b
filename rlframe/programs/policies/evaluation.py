"""Evaluations: play episodes with the policy of a run, during training and after it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import jax

from rlframe.actors import Evaluator
from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.agents import Agent
from rlframe.envs.adapters import env_seed
from rlframe.envs.jax_pool import env_keys
from rlframe.errors import EnvError, RlframeError, StoppedError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.heartbeat import STARTING
from rlframe.learners.saving import BestCheckpoint
from rlframe.programs.experiment import MAX_SEED, Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.fields import convert
from rlframe.programs.options.make_experiment import with_fields
from rlframe.programs.options.saved_experiment import check_backend
from rlframe.programs.policies.saved import (
    NEVER_SYNC,
    Checkpoint,
    checkpoint_of_version,
    read_checkpoint,
    read_policy,
)
from rlframe.programs.run_dir.directory import RunDir, open_run
from rlframe.programs.topologies.config import EnvOptions, EvaluationOptions
from rlframe.programs.topologies.makers import (
    env_pool_type,
    make_agent,
    make_jax_envs,
    make_pool,
    read_codec,
)
from rlframe.retry import make_largest
from rlframe.types import Logs, Tree

if TYPE_CHECKING:
    from rlframe.device.evaluation import DeviceEvaluator, EvaluationProgram
    from rlframe.device.seeds import JointSeeds

_log = logging.getLogger(__name__)


class Evaluations:
    """The evaluations of a run. They use no exploration. All evaluations use the same environment seeds.

    Training never uses these seeds. The inferencer is compiled once. Each evaluation builds its environments and closes
    them at the end. If some environments cannot be built or reset, fewer environments play all episodes.

    JAX environments play in jitted calls, in every topology (`DeviceEvaluator`).

    Args:
        experiment: experiment of the run. The options `eval_episodes`, `eval_num_envs` and `eval_max_episode_length`
            configure the evaluation.
        agent: the agent.
        learner: source of the parameters.
        seed: seed of the environments. None means the run's seed.
        group: the runs of other seeds in this process, which use the same jitted function. None without other runs.
        best: keeps the checkpoint of the evaluated version if it is the best one. None keeps nothing.
    """

    def __init__(
        self,
        experiment: Experiment,
        agent: Agent,
        learner: Any,
        seed: int | None = None,
        group: JointSeeds | None = None,
        best: BestCheckpoint | None = None,
    ) -> None:
        self._experiment, self._seed = experiment.for_evaluation, experiment.seed if seed is None else seed
        cfg = InferencerConfig(greedy=True, seed=self._seed, sync_interval=NEVER_SYNC)
        self._agent, self._learner, self._group, self._best = agent, learner, group, best
        self._inferencer = Inferencer(cfg, agent, learner)
        self._begin = self._inferencer.get_state()
        self._num_envs = num_eval_envs(experiment)
        self._evaluator: Evaluator | DeviceEvaluator | None = None
        self._stopped = False

    def evaluate(self, free_envs: Callable[[], Any] | None = None) -> Logs:
        """Evaluate the newest parameters. Return the result of `Evaluator.evaluate`.

        Args:
            free_envs: function that closes the training environments. It is called if no evaluation environment can
                be built while the training environments are open. None means that they stay open.
        """
        if self._best is None:
            return self._play(free_envs)
        step = checkpoint_of_version(self._best.checkpoints, self._learner.version)
        if step is not None:
            self._best.keep(step)
        logs = self._play(free_envs)
        if step is not None:
            self._best.offer(step, logs["return_mean"])
        return logs

    def _play(self, free_envs: Callable[[], Any] | None) -> Logs:
        wanted = self._num_envs
        if self._is_on_device:
            return self._on_device().evaluate()
        self._inferencer.set_state(self._begin)
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
                    "The evaluation uses only %d of %d environments, because more could not be started: %s",
                    self._num_envs,
                    wanted,
                    problem,
                )
            return evaluator.evaluate()

    def compile_ahead(self) -> None:
        """Compile the network's call in another thread. The first evaluation waits for this thread."""
        if not self._is_on_device:
            self._inferencer.compile_ahead(self._num_envs)

    @property
    def _is_on_device(self) -> bool:
        env = registry.env_name_or_builder(self._experiment.env)
        return env_pool_type(self._experiment, self._num_envs, env) == "jax"

    @property
    def steps(self) -> int:
        """Number of environment steps in the current or last evaluation."""
        return self._evaluator.steps if self._evaluator is not None else 0

    def stop(self) -> None:
        """End the current evaluation, and each later one, with StoppedError. Any thread may call this method."""
        self._stopped = True
        if self._evaluator is not None:
            self._evaluator.stop()

    def _on_device(self) -> DeviceEvaluator:
        """Return the evaluator of JAX environments. All evaluations use the same one, because it compiles."""
        from rlframe.device.evaluation import DeviceEvaluator

        if not isinstance(self._evaluator, DeviceEvaluator):
            config = EvaluationOptions.of(self._experiment)
            make = self._make_program
            self._evaluator = DeviceEvaluator(
                make() if self._group is None else self._group.share(make),
                env_keys(env_seed(self._seed, EVALUATOR_RANK), self._num_envs),
                self._learner,
                config.eval_episodes,
                seed=self._seed,
                max_episode_length=config.eval_max_episode_length,
            )
            if self._stopped:
                self._evaluator.stop()
        return self._evaluator

    def _make_program(self) -> EvaluationProgram:
        from rlframe.device.evaluation import EvaluationProgram

        checks = EnvOptions.of(self._experiment).check_finite is not False
        return EvaluationProgram(self._agent, make_jax_envs(self._experiment), checks)

    def _ready(self, num_envs: int) -> Evaluator:
        """Create an evaluator and reset its environments."""
        config = EvaluationOptions.of(self._experiment)
        with STARTING:  # only evaluations use EVALUATOR_RANK, so training never uses this seed
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


def num_eval_envs(experiment: Experiment) -> int:
    """Return the number of environments in an evaluation. It is never greater than the number of episodes."""
    config = EvaluationOptions.of(experiment)
    return min(config.eval_num_envs or config.eval_episodes, config.eval_episodes)


def describe_evaluation(experiment: Experiment) -> str:
    """Return a sentence for the terminal that describes the evaluation after training."""
    config = EvaluationOptions.of(experiment)
    if not config.evaluates:
        return "No evaluation (eval_episodes is 0)."
    episodes, num_envs = config.eval_episodes, num_eval_envs(experiment)
    return (
        f"The evaluation after training: {episodes} episode{'s' * (episodes > 1)}, each of at most "
        f"{config.eval_max_episode_length:,} steps, in {num_envs} more environment{'s' * (num_envs > 1)}."
    )


def explain(error: BaseException | str) -> str:
    """Return the cause of a failed evaluation, as a sentence."""
    is_sentence = isinstance(error, (RlframeError, str))
    text = str(error).strip() if is_sentence else f"{type(error).__name__}: {error}".strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


class EvaluationOutcome(NamedTuple):
    """The result of an evaluation: its values, or a problem if it failed. Both are None if there was no evaluation."""

    step: int  # step at which the evaluation began
    values: Logs | None = None
    problem: str | None = None  # description of the failure, in one sentence


def try_evaluation(evaluate: Callable[[], Logs], step: int, *, final: bool) -> EvaluationOutcome:
    """Evaluate, and return the outcome. If the evaluation fails, the outcome contains the problem.

    Args:
        evaluate: function that returns the values. If it raises StoppedError, so does this function.
        step: step at which the evaluation begins.
        final: True if training is complete. If False, a failure is also logged as a warning.
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
    checkpoint: Checkpoint = None,
    episodes: int = 20,
    seed: int | None = None,
    num_envs: int | None = None,
    max_episode_length: int | None = None,
    env: Any = None,
    env_kwargs: dict[str, Any] | None = None,
    agent: Any = None,
    network: Any = None,
) -> Logs:
    """Play episodes with a checkpoint of a run, without exploration. Write no files.

    Args:
        run_dir: directory of the run.
        checkpoint: name of a checkpoint, "best", or None for the newest one (see `rlframe.load`).
        episodes: number of episodes to play.
        seed: seed of the environments. None means the run's seed, which repeats the run's own evaluation.
        num_envs: number of environments. None means the number in the run's own evaluations.
        max_episode_length: maximum steps of an episode. None means the limit of the run's own evaluations.
        env: environment to use instead of the run's environment (see `rlframe.train`). Required if the run's
            environment was defined in a notebook and does not exist in this process.
        env_kwargs: keyword arguments of `env`. Without `env`, changes of those of the run's own evaluations.
        agent, network: replace the run's agent and network, in the same way as `env`.

    Returns:
        The result of `Evaluator.evaluate`.

    Raises:
        UsageError: the directory contains no run, a number is too small, or the environment has other observations or
            actions than the environment of the run.
        CheckpointError: the checkpoint does not exist or is damaged.
        EnvError: no environment could be built, an environment failed, or an episode was too long.
    """
    names = {"env": env, "agent": agent, "network": network}
    limits = {"num_envs": num_envs, "max_episode_length": max_episode_length}
    directory, experiment, seed = _open(run_dir, names, episodes, seed, **limits)
    changes = convert(Union[dict[str, Any], None], env_kwargs, "env_kwargs")
    if changes is not None and env is not None:
        experiment = with_fields(experiment, env_kwargs=changes, eval_env_kwargs={})
    elif changes is not None:
        of_run = EvaluationOptions.of(experiment).eval_env_kwargs
        experiment = with_fields(experiment, eval_env_kwargs={**of_run, **changes})
    saved = read_checkpoint(directory, convert(Checkpoint, checkpoint, "checkpoint"))
    codec = read_codec(experiment.for_evaluation)
    of_run = saved.extras.get("codec")
    if codec is not None and of_run is not None:
        _check_fits("observations", codec.observation_spec, of_run.observation_spec)
        _check_fits("actions", codec.action_spec, of_run.action_spec)
    made = make_agent(experiment, codec)
    return Evaluations(experiment, made, read_policy(made, saved), seed).evaluate()


def _check_fits(name: str, spec: Tree, spec_of_run: Tree) -> None:
    """Raise UsageError if the observations or actions have other sizes than those that the policy was trained with."""
    ours, theirs = _sizes(spec), _sizes(spec_of_run)
    if ours != theirs:
        raise UsageError(
            f"The policy cannot act in this environment, which has the {name} {ours}: it was trained with the {name} "
            f"{theirs}. Use an environment with the same spaces."
        )


def _sizes(spec: Tree) -> str:
    """Describe the sizes of a spec, such as `(4,)`, `2 choices`, or `['angle'] (2,), ['speed'] (1,)`."""

    def describe(leaf: Any) -> str:
        return f"{leaf.num_values} choices" if hasattr(leaf, "num_values") else str(leaf.shape)

    return ", ".join(
        f"{jax.tree_util.keystr(path)} {describe(leaf)}".strip() for path, leaf in jax.tree.leaves_with_path(spec)
    )


def record(
    run_dir: str | os.PathLike,
    path: str | os.PathLike,
    *,
    checkpoint: Checkpoint = None,
    episodes: int = 1,
    seed: int | None = None,
    max_episode_length: int | None = None,
) -> Logs:
    """Record a video of episodes with a checkpoint of a run, without exploration.

    Args:
        run_dir: directory of the run.
        path: video file. Its suffix (.mp4, .mkv, .webm) determines the format.
        checkpoint: name of a checkpoint, "best", or None for the newest one.
        episodes: number of episodes to record.
        seed: seed of the environment. None means the run's seed.
        max_episode_length: maximum steps of an episode. None means the limit of the run's own evaluations.

    Returns:
        The result of `Evaluator.evaluate`, and the number of `frames`.

    Raises:
        UsageError: the environment does not render, or a required package is missing.
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    from rlframe.programs.policies.video import VideoRecorder

    directory, experiment, seed = _open(run_dir, {}, episodes, seed, max_episode_length=max_episode_length)
    limit = EvaluationOptions.of(experiment).eval_max_episode_length
    with VideoRecorder(experiment, path) as recorder:
        pool = recorder.make_pool(seed=env_seed(seed, EVALUATOR_RANK))
        agent = make_agent(experiment, pool.codec)
        policy = read_policy(agent, read_checkpoint(directory, checkpoint))
        inferencer = Inferencer(InferencerConfig(greedy=True, seed=seed), agent, policy)
        result = Evaluator(pool, inferencer, episodes, seed=seed, max_episode_length=limit).evaluate()
    return {**result, "frames": recorder.frames}


def _open(
    run_dir: str | os.PathLike, names: dict[str, Any], episodes: int, seed: int | None, **limits: int | None
) -> tuple[RunDir, Experiment, int]:
    """Open a run to evaluate it. Return its directory, its experiment with the given limits, and the seed."""
    given = _given(seed=seed, episodes=convert(int, episodes, "episodes"), **limits)
    directory, experiment = open_run(run_dir, names)
    check_backend(directory.notes() if names.get("env") is None else {}, experiment)
    seed = given.pop("seed", experiment.seed)
    return directory, with_fields(experiment, **{f"eval_{name}": value for name, value in given.items()}), seed


def _given(**options: Any) -> dict[str, int]:
    """Return the options that are not None. Raise UsageError if a value has the wrong type or is out of range."""
    found = {name: convert(Union[int, None], value, name) for name, value in options.items()}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        if name == "seed" and not 0 <= value <= MAX_SEED:
            raise UsageError(f"seed must be between 0 and {MAX_SEED}, got {value}.")
        if name != "seed" and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}.")
    return found
