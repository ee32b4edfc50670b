"""`run_experiment`: one session of a run, from its start or its checkpoint to its result, in every topology."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlframe import extras
from rlframe.engines import Engine, EngineOptions, logs
from rlframe.engines.group_rules import ending_group
from rlframe.envs.names import split
from rlframe.errors import ProgramError, UsageError
from rlframe.learners import Checkpointer
from rlframe.metrics import LenientLogger, Logger, MultiLogger, plot_learning_curve
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.config_file import load_experiment
from rlframe.programs.options.make_experiment import fill_configs, with_fields
from rlframe.programs.options.resume import backend_note, check_backend, continue_experiment, import_env
from rlframe.programs.policies.evaluation import describe_evaluation
from rlframe.programs.run_dir.control import ControlAddress, serve_control_of
from rlframe.programs.run_dir.directory import Result, RunDir, default_path
from rlframe.programs.run_dir.lock import RunLock
from rlframe.programs.run_dir.status import StatusFile
from rlframe.programs.session import Session
from rlframe.programs.topologies import Topology
from rlframe.programs.topologies.config import ProgramConfig, find_topology
from rlframe.programs.topologies.parts import check_answer_timeout, make_agent, read_codec
from rlframe.programs.training.callbacks import Callback, Callbacks
from rlframe.programs.training.profile import Profile
from rlframe.programs.training.progress import Progress
from rlframe.programs.training.row_writer import following
from rlframe.programs.training.updates import check_updates
from rlframe.user_code.files import check_main_is_guarded, check_not_loading, keep_files

_log = logging.getLogger(__name__)


def run_experiment(
    experiment: Experiment,
    *,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    resume_from: int | None = None,
    take_over: bool = False,
    stop_at: int | None = None,
    callbacks: Iterable[Callback] = (),
    open_loggers: Callable[[pathlib.Path], Iterable[Logger]] | None = None,
    progress: Logger | None = None,
    profile: Profile | None = None,
    notes: dict[str, Any] | None = None,
    control_address: ControlAddress | None = None,
    quiet: bool = False,
) -> Result:
    """Train an experiment's agent to its last step, and evaluate the final policy.

    The first Ctrl-C (or SIGTERM) finishes the current step, saves everything and returns without an evaluation; a
    second one ends the run at once.

    Args:
        experiment: on resume the experiment of the run, perhaps with other `steps` (see `continue_experiment`).
        run_dir: of the run's files; None: a new directory under `runs/`.
        resume: continue from the newest checkpoint in `run_dir`; a run that ended before its first one starts again.
        resume_from: continue from this checkpoint, and move newer ones aside. None: the newest.
        take_over: end the process that writes to `run_dir` now, if there is one, and continue in its place.
        stop_at: the step at which this session stops and saves; schedules still end at `experiment.steps`.
        callbacks: each is called as `callback(info)` with each row of the logs, in this process; see `CallbackInfo`.
            `info.stop()` ends the run early, as at its last step. If one raises, the run saves and ends, and the
            exception is raised from here. If nodes are processes, a thread calls them during training.
        open_loggers: `open_loggers(run_dir)` returns more loggers for the rows; they are closed at the end.
        progress: a logger that a single process also writes to, without values, a few times a second.
        profile: measures the time that the parts of a single process take.
        notes: for a reader of `config.json`; those of a resumed run stay as they are.
        control_address: of the HTTP service that shows and controls the run; None: no service.
        quiet: print nothing, also no output of the nodes.

    Returns:
        See `Result`. If a resumed run has reached its last step already, its earlier result.

    Raises:
        UsageError: an option or the directory is invalid.
        ProgramError: a node failed more often than it may, or did not save when the program was stopped.
        RlframeError: the run failed; all that was saved is kept.
    """
    _check_can_run(experiment, profile, with_control=control_address is not None)
    called = Callbacks(callbacks)
    directory = RunDir(run_dir if run_dir is not None else default_path(experiment))
    import_env(experiment)
    with keep_files(), contextlib.ExitStack() as opened:
        experiment = opened.enter_context(open_session(experiment, directory, resume, stop_at, take_over, resume_from))
        if resume and resume_from is None and (earlier := _earlier_result(directory, experiment, progress)) is not None:
            return earlier
        is_program = isinstance(experiment.topology_config, ProgramConfig)
        opened.enter_context(logs.kept(directory.logs, "launcher" if is_program else "train"))
        try:
            if not resume:  # first: a run that is killed early can be resumed
                directory.write_config(experiment, {**(notes or {}), **backend_note(experiment)})
            session = _make_session(experiment, directory, resume, stop_at, quiet, profile)
            _print_plan(session, progress)
            trackers = [] if open_loggers is None else list(open_loggers(directory.path))
            opened.callback(MultiLogger(trackers).close)
            loggers = _all_loggers(progress, trackers, called)
            engine, next_program = _make_program(session, loggers, progress)
            if resume:
                directory.write_config(experiment, directory.notes())
            group = experiment.topology_config.control_group
            coordinator = None if group is None else engine.handle_of(group)
            opened.enter_context(serve_control_of(session.path, control_address, coordinator, quiet))
        except BaseException:
            if not resume:
                directory.remove()  # a run whose nodes cannot be made leaves nothing
            raise
        status = StatusFile(directory, experiment, session.until + experiment.topology_config.warm_up_steps(experiment))
        with status.until_the_end():
            directory.result.unlink(missing_ok=True)
            with following(directory.metrics, [] if engine.in_process else loggers, called):
                signal_number = _run_programs(engine, next_program, session, status, called)
            result = _write_result(directory, session, signal_number, called)
        status.end(result)
        return result


def _check_can_run(experiment: Experiment, profile: Profile | None, *, with_control: bool) -> None:
    """Raise UsageError if this process, the installed packages or the topology do not fit. Nothing is written."""
    check_not_loading()
    if not experiment.topology_config.engine_class.in_process:
        check_main_is_guarded(filter(None, experiment.named_options.values()))
    check_extras(experiment, with_control=with_control)
    check_answer_timeout(experiment)
    if profile is not None and isinstance(experiment.topology_config, ProgramConfig):
        raise UsageError(f"A profile is of a single process; the topology is {experiment.topology_config.name}.")


def _make_session(
    experiment: Experiment,
    directory: RunDir,
    resume: bool,
    stop_at: int | None,
    quiet: bool,
    profile: Profile | None,
) -> Session:
    """Make the agent and the `Session`."""
    codec = read_codec(experiment)
    return Session(
        experiment,
        make_agent(experiment, codec),
        directory.path.absolute(),
        until=min(experiment.steps, stop_at or experiment.steps),
        began=time.time(),
        resumes=resume,
        resumed_at=Progress(directory.progress, "").counts.env_steps,
        quiet=quiet,
        profile=profile,
        codec=codec,
    )


def _print_plan(session: Session, progress: Logger | None) -> None:
    """Print the environment's library, and when updates and the evaluation come. Raise UsageError if no update does."""
    experiment, lines = session.experiment, []
    for backend in backend_note(experiment).values():
        lines.append(f"The environment {experiment.env} is made by {backend}.")
    if experiment.topology_config.learns_from == "steps":
        updates = "" if session.resumes else f"{check_updates(experiment, session.agent)} "
        lines.append(f"{updates}{describe_evaluation(experiment)}")
    if progress is not None and lines:
        print("\n".join(lines), file=sys.stderr)


def _all_loggers(progress: Logger | None, trackers: list[Logger], callbacks: Callbacks) -> list[Logger]:
    """List what gets each row beside the run's files. Callbacks come last: they may read what the others wrote."""
    shown = trackers if progress is None else [progress, *trackers]
    return [*(LenientLogger([each], Exception) for each in shown), *([callbacks] if callbacks else [])]


def _make_program(session: Session, loggers: list[Logger], progress: Logger | None) -> tuple[Engine, Topology | None]:
    """Make the nodes of the first program. Return its engine, and the topology of a second program or None.

    Only language has a second one: the supervised warm-up runs first.
    """
    engine = make_engine(session.experiment, session.directory.logs, session.quiet)
    if engine.in_process:
        session = dataclasses.replace(session, loggers=tuple(loggers), progress=progress)
    wire = find_topology(session.topology_config.name, session.topology_config.learns_from)
    return engine, wire(engine, session)


def _run_programs(
    engine: Engine, next_program: Topology | None, session: Session, status: StatusFile, callbacks: Callbacks
) -> int | None:
    """Run a program, then the next one, if any. Return the number of the signal that ended one, or None."""
    if callbacks:  # they end the node whose end is the program's
        group = ending_group(engine.groups) or next(iter(engine.groups))
        callbacks.connect(engine.handle_of(group), group)
    try:
        signal_number = engine.run(status.watch)
    except ProgramError as error:
        raise ProgramError(f"{error}\n{session.directory.what_is_saved()}") from callbacks.error or error
    if next_program is None or signal_number is not None or callbacks.error is not None:
        return signal_number
    engine = make_engine(session.experiment, session.directory.logs, session.quiet)
    return _run_programs(engine, next_program(engine, session), session, status, callbacks)


def _write_result(directory: RunDir, session: Session, signal_number: int | None, callbacks: Callbacks) -> Result:
    """Complete the result that the program wrote, and draw the learning curve. Raise the error of a callback.

    Args:
        directory: of the run.
        session: the session.
        signal_number: that of the signal that stopped it, or None.
        callbacks: those of the caller.
    """
    if directory.result.exists():
        result = Result.read(directory.result)
    else:  # The program was told to stop before its monitor had begun.
        env_steps = Progress(directory.progress, session.session_id).counts.env_steps
        result = Result(env_steps, 0, None, None, 0, 0.0, time.time() - session.began, 0, str(directory.path))
    by = result.stopped_by if signal_number is None else "interrupt"
    result = dataclasses.replace(result, signal=signal_number, stopped_by=by if callbacks.error is None else "error")
    if result.evaluation_error is not None:
        problem = directory.describe_failed_evaluation(result.evaluation_error)
        result = dataclasses.replace(result, evaluation_error=problem)
        _log.warning(problem)
    directory.write_result(result)
    if directory.metrics.exists():  # not where it was stopped at once
        _draw(directory)
    if callbacks.error is not None:
        raise callbacks.error
    return result


def _earlier_result(directory: RunDir, experiment: Experiment, progress: Logger | None) -> Result | None:
    """Return the result of a run that reached its last step with these options; None if there is more to do.

    A run may have gone beyond its last step, and so have made the steps that a later session asks for.
    """
    if not directory.result.exists():
        return None
    saved, result = load_experiment(directory.config, experiment.named_options), Result.read(directory.result)
    options_unchanged = continue_experiment(saved, with_fields(saved, steps=experiment.steps)) == experiment
    counts_env_steps = experiment.topology_config.learns_from == "steps"
    went_beyond = counts_env_steps and result.env_steps >= experiment.steps > saved.steps
    reached_last_step = saved.steps == experiment.steps or went_beyond
    ended_well = result.stopped_by == "steps" and result.evaluation_error is None
    if not (options_unchanged and reached_last_step and ended_well):
        return None
    if progress is not None:
        print(
            f"Nothing is left to do: {directory.path} reached its {experiment.steps:,} steps. To train more, resume it "
            "with more --steps.",
            file=sys.stderr,
        )
    return result


def _draw(directory: RunDir) -> None:
    """Draw the learning curve. The run is over and saved: a picture that cannot be drawn is only warned of."""
    try:
        plot_learning_curve(directory.path, directory.learning_curve)
    except Exception as error:
        _log.warning("The learning curve was not drawn: %s Draw it later: rlframe plot %s", error, directory.path)


def make_engine(experiment: Experiment, logs: pathlib.Path | None, quiet: bool = False) -> Engine:
    """Make the engine that the experiment asks for.

    Args:
        experiment: the experiment.
        logs: the directory in which the nodes' lines are kept; None: nowhere.
        quiet: show no line of the nodes.
    """
    config = experiment.topology_config
    options = config.node_options if isinstance(config, ProgramConfig) else {}
    return config.engine_class(EngineOptions(**options, logs=logs, quiet=quiet))


def check_extras(experiment: Experiment, *, with_control: bool = False) -> None:
    """Raise UsageError if the run needs an extra that is not installed: before its directory is made.

    Args:
        experiment: of the run.
        with_control: whether the run has an HTTP service.
    """
    if split(experiment.env)[0] == "dm_control":
        extras.require(f"--env {experiment.env}", "dm_control")
    config = experiment.topology_config
    if with_control and config.control_group is None:  # where it is not by itself
        extras.require("--http", "trajectories")
    needed = [*config.engine_class.requires, *config.requires(experiment)]
    needed += ["trajectories"] if with_control else []
    without = "or leave its control out by --http None" if with_control else ""
    extras.require(config.asked_by(experiment), *needed, otherwise=without)


@contextlib.contextmanager
def open_session(
    experiment: Experiment,
    directory: RunDir,
    resume: bool,
    stop_at: int | None,
    take_over: bool = False,
    resume_from: int | None = None,
) -> Iterator[Experiment]:
    """Lock a new directory, or that of the run to resume, and yield the experiment of the session.

    Raises:
        UsageError: the directory holds something else, or another process writes there; a resumed run would change a
            fixed option; or its checkpoint is damaged.
    """
    experiment = fill_configs(experiment)
    if stop_at is not None and stop_at < 1:
        raise UsageError(f"stop_at must be at least 1 environment step, got {stop_at}.")
    if resume:
        directory.check_holds()
    elif take_over or resume_from is not None:
        raise UsageError("take_over and resume_from need resume: they continue a run.")
    else:
        directory.create()
    ends_within = experiment.topology_config.grace_seconds + 22.0  # with all that comes after
    with RunLock(directory.path, take_over, ends_within):
        if resume:
            experiment = continue_experiment(load_experiment(directory.config, experiment.named_options), experiment)
            check_backend(directory.notes(), experiment)
            with contextlib.closing(Checkpointer(directory.checkpoints)) as checkpointer:
                checkpointer.go_back_to(resume_from, directory.path / "aside")
        else:
            directory.create()  # again: another process may have used it before we got the lock
        yield experiment
