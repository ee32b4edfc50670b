"""`rlframe.train` and the options of a session: a run from Python, or from the command line."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from rlframe import extras, streams
from rlframe.engines import logs
from rlframe.errors import UsageError
from rlframe.metrics import Logger, TerminalLogger, TrackioLogger, WandbLogger
from rlframe.programs import runner
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.config_file import experiment_values, load_experiment
from rlframe.programs.options.fields import field_names, option, with_options
from rlframe.programs.options.make_experiment import change_options, default_experiment
from rlframe.programs.options.registry import name_objects, name_of
from rlframe.programs.options.resume import import_env
from rlframe.programs.presets import Preset
from rlframe.programs.run_dir.control import ControlAddress
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.training.callbacks import Callback
from rlframe.programs.training.profile import Profile
from rlframe.user_code.files import forget_changed

TRACKERS: dict[str, Any] = {"wandb": WandbLogger, "trackio": TrackioLogger}
_PATHS = ("config", "run_dir", "token_file")
Options = TypeVar("Options", bound="SessionOptions")

# Options of `rlframe train` that are of the command line alone, and what a script does.
COMMAND_LINE_ONLY = {
    "seeds": "call it once for each seed, train(seed=1) and so on, or run `rlframe train --seeds`",
    "at_once": "it is of several seeds: run `rlframe train --seeds`",
    "json": "the result is returned: result.to_json() is what --json prints",
    "traceback": "an exception has its traceback",
}


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """Options of a session. They do not change the numbers of a run."""

    # auto: the one that fits the agent and environment; none; or a name (`rlframe agents`)
    preset: str = option("auto", multi_run="command")
    # repeat the run of this config.json; other options change it
    config: Union[str, None] = option(None, multi_run="command")
    # where everything is written; None: a new directory under runs/
    run_dir: Union[str, None] = option(None, multi_run="command")
    resume: bool = option(False, multi_run="command")  # go on with the run in --run-dir from its latest checkpoint
    resume_from: Union[int, None] = None  # with --resume: go on from this one of RUN_DIR/checkpoints, not the newest
    # with --resume: end the process that still writes to --run-dir, and go on in its place
    take_over: bool = option(False, multi_run="command")
    # port of /status, /metrics, /healthz and a live page; 0: a free one; None: nowhere; auto: 0 for elastic, else None
    http: Union[Literal["auto"], int, None] = option("auto", multi_run="each")
    http_host: str = option("127.0.0.1", multi_run="each")  # address that these listen at
    token_file: Union[str, None] = None  # the token of these; None: one that is made, RUN_DIR/token
    stop_at: Union[int, None] = None  # environment steps at which to stop and save; schedules still end at --steps
    quiet: bool = option(False, multi_run="command")  # show no progress
    profile: bool = False  # measure where the time goes and print it
    profile_trace: bool = False  # --profile, and a trace of JAX in RUN_DIR/trace
    wandb: bool = option(False, multi_run="each")  # log to Weights & Biases as well
    trackio: bool = option(False, multi_run="each")  # log to Trackio as well
    project: str = option("rlframe", multi_run="each")  # the project's name there


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
    """Train an agent to its last step, and evaluate what it has learned: `rlframe train`, from Python.

    Args:
        agent: a name that `rlframe agents` lists, `file.py:Class` or the class; None: ppo.
        env: a name that `rlframe envs` lists, `file.py:make_env`, or a class or function that makes an environment;
            None: the agent's default, as CartPole-v1.
        run_dir: where everything is written; None: a new directory under `runs/`.
        resume: go on with the run in `run_dir` from its newest checkpoint. Its agent and environment need not be given,
            unless they were defined in a notebook that has ended.
        stop_at: the step at which to stop and save; schedules still end at `steps`.
        callbacks: each is called as `callback(info)` with each row of the logs: `info.step`, `info.values` (name ->
            number), `info.stop()`, which ends the run early. If one raises, the run saves everything and ends, and the
            exception is raised from here. See docs/api.md.
        quiet: print nothing: no progress, no warning, no output of nodes (`--quiet` leaves out the progress alone). The
            files in `RUN_DIR/logs` and handlers of `logging` get everything.
        **options: those of `rlframe train`, with underscores: `steps=50_000`, `seed=2`, `num_envs=16`,
            `topology="heavy_env"`, `preset="none"`, `learning_rate=1e-3`, `network_hidden=(64, 64)` (`--network.hidden
            64 64`), `wandb=True`. `--async` is `async_envs=True`, and `--no-NAME` is `NAME=False`. Not taken, as a
            script has no use for them: `seeds` and `at_once` (call this function for each seed), `json` (the result is
            returned) and `traceback`. What is not given is the preset's. `network` may be a function.

    Returns:
        How it ended: `return_mean`, `run_dir`, `env_steps` and others.

    Raises:
        UsageError: an option is unknown, has a value of a wrong type, or does not fit.
        RlframeError: the run failed; what was saved is kept.
    """
    streams.prepare()
    forget_changed()
    options = {name.replace("-", "_"): value for name, value in options.items()}
    for name, instead in COMMAND_LINE_ONLY.items():
        if name in options:
            raise UsageError(f"{name} is an option of the command line, and not of rlframe.train: {instead}.")
    own = field_names(SessionOptions)
    given = {"run_dir": run_dir, "resume": resume, "stop_at": stop_at, "quiet": quiet}
    given |= {name: options.pop(name) for name in own if name in options}
    of_session = read_session_options(given)
    if of_session.profile and of_session.quiet:
        raise UsageError("profile prints a table, and quiet prints nothing: leave one of them out.")
    with logs.silent(of_session.quiet):
        if env is not None:
            options["env"] = env
        options = name_objects(options)  # before the files are loaded: a file may change the directory
        defaults, preset = base_experiment(agent, env, of_session, options.get("network"))
        experiment = change_options(defaults, options, [*own, "callbacks"])
        return run_with_options(experiment, of_session, preset, callbacks, silent=quiet)


def run_with_options(
    experiment: Experiment,
    options: SessionOptions,
    preset: Preset | None,
    callbacks: Iterable[Callback] = (),
    *,
    silent: bool = False,
) -> Result:
    """Call `run_experiment` as the options of the session say. Show the progress, and print the profile if asked for.

    Args:
        experiment: what to run.
        options: how.
        preset: what the experiment is based on; None: none.
        callbacks: see `train`.
        silent: print nothing, where `options.quiet` only leaves out the progress.
    """
    check_trackers(options)
    profile = Profile(options.profile_trace) if options.profile or options.profile_trace else None
    progress = None if options.quiet else make_progress_logger(experiment, options.stop_at)
    try:
        result = runner.run_experiment(
            experiment,
            run_dir=options.run_dir,
            resume=options.resume,
            resume_from=options.resume_from,
            take_over=options.take_over,
            stop_at=options.stop_at,
            callbacks=callbacks,
            open_loggers=lambda path: open_trackers(experiment, options, path),
            progress=progress,
            profile=profile,
            notes={"preset": preset.name if preset is not None else None},
            control_address=make_control_address(experiment, options),
            quiet=silent,
        )
    finally:
        if progress is not None:
            progress.close()
    if profile is not None and not silent:
        profile.print()
    return result


def make_progress_logger(experiment: Experiment, stop_at: int | None) -> TerminalLogger:
    """Return the logger that shows the progress of a session in the terminal."""
    until = min(stop_at or experiment.steps, experiment.steps)
    title = f"{experiment.agent.rpartition(':')[2]} on {experiment.env}"
    return TerminalLogger(until + experiment.topology_config.warm_up_steps(experiment), title=title)


def check_trackers(options: SessionOptions) -> None:
    """Raise UsageError for a tracker that is not installed."""
    for tracker in TRACKERS:
        if getattr(options, tracker):
            extras.require(f"--{tracker}", tracker)


def open_trackers(experiment: Experiment, options: SessionOptions, path: pathlib.Path) -> list[Logger]:
    """Open the trackers that the options ask for, for the run in the directory `path`."""
    config = experiment_values(experiment)
    made = [make for tracker, make in TRACKERS.items() if getattr(options, tracker)]
    return [make(path, project=options.project, config=config) for make in made]


def make_control_address(experiment: Experiment, options: SessionOptions) -> ControlAddress | None:
    """Return the address of the run's HTTP service; None if it has none. Raise UsageError for options of none."""
    port = options.http
    if port == "auto":
        port = None if experiment.topology_config.control_group is None else 0
    if port is not None:
        return ControlAddress(options.http_host, port, options.token_file)
    for name in ("http_host", "token_file"):
        if getattr(options, name) != getattr(SessionOptions, name):
            raise UsageError(f"{name} is of the HTTP service of the run, and there is none: give it a port by --http.")
    return None


def read_session_options(options: Mapping[str, Any]) -> SessionOptions:
    """Return the session options of a script, with absolute paths. Raise UsageError for a value of a wrong type."""
    return with_absolute_paths(with_options(SessionOptions(), options), pathlib.Path.cwd())


def with_absolute_paths(options: Options, directory: pathlib.Path) -> Options:
    """Return the options with their paths, which are relative to a directory, made absolute."""
    paths = {name: getattr(options, name) for name in _PATHS}
    return dataclasses.replace(
        options, **{name: os.path.abspath(directory / path) for name, path in paths.items() if path}
    )


def base_experiment(
    agent: Any, env: Any, options: SessionOptions, network: Any = None
) -> tuple[Experiment, Preset | None]:
    """Return the experiment that other options change: that of `config` or `resume`, or the defaults with their preset.

    Args:
        agent: a name or class; None: that of the saved experiment, or ppo.
        env: a name, class or function; None: the agent's default. The one of a saved experiment is left as it is,
            unless no file defines it.
        options: of which `preset`, `config`, `run_dir` and `resume` are read.
        network: a name or function, for a saved experiment whose own one no file defines.
    """
    agent, env, network = name_of("agent", agent), name_of("env", env), name_of("network", network)
    saved = _saved(options, {"agent": agent, "env": env, "network": network})
    if saved is not None:
        if agent is not None and agent != saved.agent:
            raise UsageError(f"The config is of the agent {saved.agent!r}: agent {agent!r} cannot replace it.")
        import_env(saved)
        return saved, None
    defaults, preset = default_experiment(agent, env, options.preset)
    import_env(defaults)
    return defaults, preset


def _saved(options: SessionOptions, given: Mapping[str, Any]) -> Experiment | None:
    if not options.resume:
        return load_experiment(options.config, given) if options.config is not None else None
    if options.run_dir is None:
        raise UsageError("resume needs run_dir: the directory of the run to go on with.")
    if options.config is not None:
        raise UsageError("resume goes on with the run's own config.json: leave config out.")
    if not (pathlib.Path(options.run_dir) / "config.json").is_file():
        raise UsageError(f"There is no run in {options.run_dir}: it has no config.json. Start it without resume.")
    return load_experiment(options.run_dir, given)
