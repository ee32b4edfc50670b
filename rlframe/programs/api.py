"""`rlframe.train` and the session options, for a run from Python or from the command line."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, Union

from rlframe import extras, streams
from rlframe.engines import logs
from rlframe.errors import UsageError
from rlframe.metrics import Logger, TerminalLogger, TrackioLogger, WandbLogger
from rlframe.programs import runner
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.fields import field_names, option, with_options
from rlframe.programs.options.make_experiment import change_options, default_experiment
from rlframe.programs.options.registry import name_objects, name_of
from rlframe.programs.options.saved_experiment import experiment_values, import_env, load_experiment
from rlframe.programs.presets import Preset
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.run_dir.status import ControlAddress
from rlframe.programs.training.callbacks import Callback
from rlframe.programs.training.profile import Profile, advise
from rlframe.user_code.files import forget_changed

TRACKERS: dict[str, Any] = {"wandb": WandbLogger, "trackio": TrackioLogger}
_PATHS = ("config", "run_dir", "token_file")
Options = TypeVar("Options", bound="SessionOptions")

# Options that exist only on the command line. Each value tells users of `rlframe.train` what to do instead.
COMMAND_LINE_ONLY = {
    "seeds": "call it once for each seed, train(seed=1) and so on, or run `rlframe train --seeds`",
    "at_once": "it applies only to several seeds, with `rlframe train --seeds`",
    "json": "train() returns the result, and result.to_json() returns the object that --json prints",
    "traceback": "the exception already has its traceback",
}


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """Options of a session. They do not affect the results of a run."""

    help_group: ClassVar[str] = "Run"

    preset: str = option("auto", multi_run="command")  # Tuned values: a name from `rlframe agents`, none, or auto.
    # config.json of the run to repeat. Other options override it.
    config: Union[str, None] = option(None, multi_run="command")
    # Directory for all files of the run. None: a new one in runs/.
    run_dir: Union[str, None] = option(None, multi_run="command")
    # Continue the run in --run-dir from its checkpoint, with its options.
    resume: bool = option(False, multi_run="command")
    resume_from: Union[int, None] = None  # With --resume: continue from this step in RUN_DIR/checkpoints.
    # With --resume: end the process that still writes to --run-dir.
    take_over: bool = option(False, multi_run="command")
    # Port of the live page and metrics. 0: any; auto: elastic only.
    http: Union[Literal["auto"], int, None] = option("auto", multi_run="each", group="Logging")
    # Address at which the HTTP service listens.
    http_host: str = option("127.0.0.1", multi_run="each", group="Logging")
    # File with the token of the HTTP service. None means RUN_DIR/token.
    token_file: Union[str, None] = option(None, group="Logging")
    stop_at: Union[int, None] = None  # Stop and save at this step. Schedules still end at --steps.
    quiet: bool = option(False, multi_run="command", group="Logging")  # Show no progress.
    # Measure the time of each part of the run. Print a table and advice.
    profile: bool = option(False, group="Logging")
    profile_trace: bool = option(False, group="Logging")  # Like --profile, and write a JAX trace to RUN_DIR/trace.
    wandb: bool = option(False, multi_run="each", group="Logging")  # Also log to Weights & Biases.
    trackio: bool = option(False, multi_run="each", group="Logging")  # Also log to Trackio.
    # Project name in Weights & Biases or Trackio.
    project: str = option("rlframe", multi_run="each", group="Logging")


def train(
    agent: str | type | None = None,
    env: str | Callable[..., Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    callbacks: Iterable[Callback] = (),
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Train an agent to its last step, and evaluate the final policy. This is `rlframe train` for Python.

    Args:
        agent: A name that `rlframe agents` lists, `file.py:Class`, or the class. None means ppo.
        env: A name that `rlframe envs` lists, `file.py:make_env`, or a class or function that makes an environment.
            None means the agent's default, for example CartPole-v1.
        run_dir: Directory of all files of the run. None means a new directory under `runs/`.
        resume: Continue the run in `run_dir` from its newest checkpoint. Pass the agent and the environment only if
            they were defined in a notebook that has ended.
        stop_at: Step at which to stop and save. Schedules still end at `steps`.
        callbacks: Functions that are called as `callback(info)` for each row of the logs. `info` has `step`, `values`
            (name -> number), `run_dir`, `policy` (the current policy), `save()`, which saves a checkpoint now, and
            `stop()`, which ends the run early. If a callback raises, the run saves everything and ends, and this
            function raises the exception. `rlframe.StopAt` and `rlframe.EvaluateOn` are ready-made callbacks.
        quiet: Print nothing: no progress, no warnings, no output of nodes. (`--quiet` only hides the progress.) The
            files in `RUN_DIR/logs` and the handlers of `logging` still receive everything.
        **options: Options of `rlframe train`, with underscores: `steps=50_000`, `seed=2`, `num_envs=16`,
            `topology="heavy_env"`, `preset="none"`, `learning_rate=1e-3`, `network_hidden=(64, 64)` (`--network.hidden
            64 64`), `wandb=True`. `--async` is `async_envs=True`, and `--no-NAME` is `NAME=False`. These options exist
            only on the command line: `seeds` and `at_once` (call this function for each seed), `json` (this function
            returns the result) and `traceback`. Missing options have the values of the preset. `network` may be a
            function.

    Returns:
        The result: `return_mean`, `run_dir`, `env_steps` and others.

    Raises:
        UsageError: An option is unknown, has a value of the wrong type, or is not valid for this run.
        RlframeError: The run failed. Everything saved so far is kept.
    """
    streams.prepare()
    forget_changed()
    options = {name.replace("-", "_"): value for name, value in options.items()}
    for name, instead in COMMAND_LINE_ONLY.items():
        if name in options:
            raise UsageError(f"{name} is an option of the command line only, not of rlframe.train: {instead}.")
    own = field_names(SessionOptions)
    given = {"run_dir": run_dir, "resume": resume, "stop_at": stop_at, "quiet": quiet}
    given |= {name: options.pop(name) for name in own if name in options}
    session_options = with_absolute_paths(with_options(SessionOptions(), given), pathlib.Path.cwd())
    if session_options.profile and session_options.quiet:
        raise UsageError("profile prints a table, but quiet=True allows no output. Leave one of them out.")
    with logs.silent(session_options.quiet):
        if env is not None:
            options["env"] = env
        options = name_objects(options)  # make paths absolute now: user code may change the working directory
        defaults, preset = base_experiment(agent, env, session_options, options.get("network"))
        experiment = change_options(defaults, options, [*own, "callbacks"])
        return run_with_options(experiment, session_options, preset, callbacks, silent=quiet)


def run_with_options(
    experiment: Experiment,
    options: SessionOptions,
    preset: Preset | None,
    callbacks: Iterable[Callback] = (),
    *,
    silent: bool = False,
) -> Result:
    """Run an experiment with the given session options. Show the progress, and print the profile if requested.

    Args:
        experiment: The experiment to run.
        options: The session options.
        preset: The preset that was applied to the experiment, or None. Its name is saved in `config.json`.
        callbacks: See `train`.
        silent: If True, print nothing. (`options.quiet` only hides the progress.)
    """
    check_trackers(options)
    profile = Profile(options.profile_trace) if options.profile or options.profile_trace else None
    progress = None if options.quiet else make_progress_logger(experiment, options.stop_at)
    if preset is not None and preset.is_general and progress is not None:
        print(
            f"The preset {preset.name} has general values, for environments without a preset. To turn it off: "
            "--preset none.",
            file=sys.stderr,
        )
    try:
        result = runner.run_experiment(
            experiment,
            run_dir=options.run_dir,
            resume=options.resume,
            resume_from=options.resume_from,
            take_over=options.take_over,
            stop_at=options.stop_at,
            callbacks=callbacks,
            open_trackers=lambda path: open_trackers(experiment, options, path),
            progress=progress,
            profile=profile,
            notes={"preset": preset.name if preset is not None else None},
            control_address=make_control_address(experiment, options),
            quiet=silent,
        )
    finally:
        if progress is not None:
            progress.close()
    if profile is not None and profile.spec is not None and not silent:
        profile.print(advise(profile.rows(), experiment, profile.spec))
    return result


def make_progress_logger(experiment: Experiment, stop_at: int | None) -> TerminalLogger:
    """Make the logger that shows the progress of a session in the terminal."""
    until = min(stop_at or experiment.steps, experiment.steps)
    title = f"{experiment.agent.rpartition(':')[2]} on {experiment.env}"
    return TerminalLogger(until + experiment.topology_config.warm_up_steps(experiment), title=title)


def check_trackers(options: SessionOptions) -> None:
    """Raise UsageError if a requested tracker is not installed."""
    for tracker in TRACKERS:
        if getattr(options, tracker):
            extras.require(f"--{tracker}", tracker)


def open_trackers(experiment: Experiment, options: SessionOptions, path: pathlib.Path) -> list[Logger]:
    """Create the loggers of the requested trackers, for the run in the directory `path`."""
    config = experiment_values(experiment)
    made = [make for tracker, make in TRACKERS.items() if getattr(options, tracker)]
    return [make(path, project=options.project, config=config) for make in made]


def make_control_address(experiment: Experiment, options: SessionOptions) -> ControlAddress | None:
    """Return the address of the run's HTTP service, or None if there is no service.

    Raises:
        UsageError: An option of the HTTP service is set, but there is no service.
    """
    port = options.http
    if port == "auto":
        port = None if experiment.topology_config.control_group is None else 0
    if port is not None:
        return ControlAddress(options.http_host, port, options.token_file)
    for name in ("http_host", "token_file"):
        if getattr(options, name) != getattr(SessionOptions, name):
            raise UsageError(f"{name} is an option of the HTTP service, but this run has none. Add --http PORT.")
    return None


def with_absolute_paths(options: Options, directory: pathlib.Path) -> Options:
    """Return the options with absolute paths. Relative paths start at `directory`."""
    paths = {name: getattr(options, name) for name in _PATHS}
    return dataclasses.replace(
        options, **{name: os.path.abspath(directory / path) for name, path in paths.items() if path}
    )


def base_experiment(
    agent: Any, env: Any, options: SessionOptions, network: Any = None
) -> tuple[Experiment, Preset | None]:
    """Return (experiment, preset), before the user's other options are applied to the experiment.

    With `config` or `resume`, return the saved experiment and None. Otherwise, return an experiment with the defaults
    and the values of the preset.

    Args:
        agent: A name or class. None means the agent of the saved experiment, or ppo.
        env: A name, class or function. None means the agent's default. Ignored for a saved experiment whose environment
            is defined in a file.
        options: The session options. Only `preset`, `config`, `run_dir` and `resume` are read.
        network: A name or function. Used only for a saved experiment whose network is not defined in a file.
    """
    agent, env, network = name_of("agent", agent), name_of("env", env), name_of("network", network)
    saved = _load_saved_experiment(options, {"agent": agent, "env": env, "network": network})
    if saved is not None:
        # With --resume, users repeat the options of the first session.
        if options.preset != SessionOptions.preset and not options.resume:
            raise UsageError(f"preset={options.preset!r} cannot change the saved values of a config. Leave it out.")
        if agent is not None and agent != saved.agent:
            raise UsageError(f"The config has the agent {saved.agent!r}. The option agent={agent!r} cannot change it.")
        import_env(saved)
        return saved, None
    defaults, preset = default_experiment(agent, env, options.preset)
    import_env(defaults)
    return defaults, preset


def _load_saved_experiment(options: SessionOptions, given: Mapping[str, Any]) -> Experiment | None:
    if not options.resume:
        return load_experiment(options.config, given) if options.config is not None else None
    if options.run_dir is None:
        raise UsageError("resume needs run_dir: the directory of the run to continue.")
    if options.config is not None:
        raise UsageError("resume uses the config.json of the run. Leave config out.")
    if not (pathlib.Path(options.run_dir) / "config.json").is_file():
        raise UsageError(
            f"There is no run in {options.run_dir}: it has no config.json. Leave resume out to start a run."
        )
    return load_experiment(options.run_dir, given)
