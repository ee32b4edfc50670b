"""`run_experiment`: run one session, from its start or its checkpoint to its result, in any topology.

The functions are in the order in which they are called, and a function that several of them call is last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from rlframe import extras
from rlframe.engines import Engine, EngineOptions, logs
from rlframe.engines.base import NodeStatus
from rlframe.engines.devices import describe_devices, matmul_precision
from rlframe.engines.group_rules import ending_group
from rlframe.envs.jax_envs import SUITES
from rlframe.envs.names import split
from rlframe.errors import ProgramError, UsageError
from rlframe.learners import Checkpointer
from rlframe.metrics import LenientLogger, Logger, MultiLogger, ProgressDisplay
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.make_experiment import fill_configs, with_fields
from rlframe.programs.options.saved_experiment import (
    backend_note,
    check_backend,
    import_env,
    last_values,
    load_experiment,
    resume_experiment,
)
from rlframe.programs.policies.evaluation import describe_evaluation
from rlframe.programs.policies.saved import write_initial_checkpoint
from rlframe.programs.run_dir.directory import ProgressFile, Result, RunDir, default_path
from rlframe.programs.run_dir.lock import RunLock
from rlframe.programs.run_dir.status import ControlAddress, StatusFile, describe_start, serve_run_control
from rlframe.programs.session import Session, Shared
from rlframe.programs.topologies import Topology
from rlframe.programs.topologies.config import ProgramConfig, find_topology
from rlframe.programs.topologies.makers import check_pool_options, make_agent, read_codec
from rlframe.programs.training.callbacks import Callback, Callbacks
from rlframe.programs.training.profile import Profile
from rlframe.programs.training.row_writer import forward_rows
from rlframe.programs.training.updates import check_updates
from rlframe.user_code.files import check_main_is_guarded, check_not_loading, keep_files

_log = logging.getLogger(__name__)

_drawing = threading.Lock()  # matplotlib is not thread-safe
_EXIT_SECONDS = 22.0  # maximum seconds from the end of the nodes to the end of this process


def run_experiment(
    experiment: Experiment,
    *,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    resume_from: int | None = None,
    take_over: bool = False,
    stop_at: int | None = None,
    callbacks: Iterable[Callback] = (),
    open_trackers: Callable[[pathlib.Path], Iterable[Logger]] | None = None,
    progress: ProgressDisplay | None = None,
    profile: Profile | None = None,
    notes: dict[str, Any] | None = None,
    control_address: ControlAddress | None = None,
    quiet: bool = False,
    shared: Shared | None = None,
) -> Result:
    """Train the agent of an experiment to the last step, and evaluate the final policy.

    The first Ctrl-C (or SIGTERM) finishes the current step, saves everything and returns without an evaluation. The
    second one ends the run at once.

    Args:
        experiment: The experiment. On resume, it may differ from the saved one in a few fields (`resume_experiment`).
        run_dir: Directory of all files of the run. None means a new directory under `runs/`.
        resume: Continue from the newest checkpoint in `run_dir`. If there is no checkpoint, learning starts again.
        resume_from: Continue from this checkpoint, and move newer ones aside. None means the newest one.
        take_over: End the process that still writes to `run_dir`, if any, then continue its run.
        stop_at: Step at which this session stops and saves. Schedules still end at `experiment.steps`.
        callbacks: Functions that are called as `callback(info)` for each row of the logs, in this process (see
            `CallbackInfo`). `info.stop()` ends the run early, like the last step. If a callback raises, the run saves
            everything and ends, and this function raises the exception. If the nodes are processes, a thread calls
            the callbacks during training.
        open_trackers: `open_trackers(run_dir)` returns additional loggers for the rows. They are closed at the end.
        progress: Logger that shows the progress. A single process also writes to it a few times a second, without
            values.
        profile: Measures the time of each part of a single process.
        notes: Additional information for readers of `config.json`. A resumed run keeps its first notes.
        control_address: Address of the HTTP service that shows and controls the run. None means no service.
        quiet: Print nothing, including the output of the nodes.
        shared: Connects this run with the runs of other seeds in this process. `seed_runs.py` sets it.

    Returns:
        The result. If the run had already reached its last step, this is the earlier result.

    Raises:
        UsageError: An option or the directory is invalid.
        ProgramError: A node failed more often than the limit, or did not save when the program was stopped.
        RlframeError: The run failed. Everything saved so far is kept.
    """
    directory = RunDir(run_dir if run_dir is not None else default_path(experiment))
    _check_can_run(experiment, stop_at, profile, with_control=control_address is not None)
    launcher = _Launcher(
        directory, stop_at, Callbacks(callbacks), open_trackers, progress, profile, control_address, quiet, shared
    )
    import_env(experiment)
    with keep_files():
        experiment = fill_configs(experiment)
        if resume:
            return launcher.continue_run(experiment, resume_from, take_over)
        if take_over or resume_from is not None:
            raise UsageError("take_over and resume_from continue a run: add resume.")
        return launcher.begin_run(experiment, notes or {})


def _check_can_run(experiment: Experiment, stop_at: int | None, profile: Profile | None, *, with_control: bool) -> None:
    """Raise UsageError if this process, the installed packages or the options cannot run the experiment."""
    check_not_loading()
    if not experiment.topology_config.engine_class.in_process:
        check_main_is_guarded(filter(None, experiment.named_options.values()))
    check_extras(experiment, with_control=with_control)
    check_pool_options(experiment)
    if stop_at is not None and stop_at < 1:
        raise UsageError(f"stop_at must be at least 1 environment step, got {stop_at}.")
    if profile is not None and not experiment.topology_config.can_profile:
        raise UsageError(
            f"profile needs the topology single_process, but the topology is {experiment.topology_config.name}."
        )


def check_extras(experiment: Experiment, *, with_control: bool = False) -> None:
    """Raise UsageError if the run needs an extra that is not installed. Call this before creating the run directory.

    Args:
        experiment: The experiment.
        with_control: True if the run has an HTTP service.
    """
    prefix = split(experiment.env)[0]
    if prefix in ("dm_control", *SUITES):
        extras.require(f"--env {experiment.env}", prefix)
    config = experiment.topology_config
    if with_control and config.control_group is None:  # only the option --http requested the service
        extras.require("--http", "trajectories")
    needed = [*config.engine_class.requires, *config.requires(experiment)]
    needed += ["trajectories"] if with_control else []
    without = "or turn the HTTP service off with --http None" if with_control else ""
    extras.require(config.extras_option(experiment), *needed, otherwise=without)


@dataclasses.dataclass(frozen=True)
class _Launcher:
    """A launcher that starts or continues a run, and runs one session. Its fields are arguments of `run_experiment`.

    `begin_run` creates and locks a new directory. `continue_run` locks a run's directory, and can go back to an earlier
    checkpoint. Then each of them calls `_make_session`, `_print_plan`, `_make_program` and `_run_session`.
    """

    directory: RunDir
    stop_at: int | None
    callbacks: Callbacks
    open_trackers: Callable[[pathlib.Path], Iterable[Logger]] | None
    progress: ProgressDisplay | None
    profile: Profile | None
    control_address: ControlAddress | None
    quiet: bool
    shared: Shared | None

    def begin_run(self, experiment: Experiment, notes: dict[str, Any]) -> Result:
        """Run the first session of a run, in a new directory. Remove the directory if the nodes cannot be made."""
        self.directory.create()
        with self._lock(experiment), contextlib.ExitStack() as opened:
            self.directory.check_is_new()  # another process may have written files before this process got the lock
            try:
                # Write the config first, so that a run that is killed early can be resumed.
                self.directory.write_config(experiment, {**notes, **backend_note(experiment)})
                session = self._make_session(experiment, opened)
                plan = check_updates(experiment, session.agent)
                start = write_initial_checkpoint(session) if experiment.init_from is not None else ""
                self._print_plan(session, plan, start)
                program = self._make_program(session, opened)
            except BaseException:
                self.directory.remove()
                raise
            return self._run_session(*program)

    def continue_run(self, experiment: Experiment, resume_from: int | None, take_over: bool) -> Result:
        """Run one more session, from a checkpoint. If the run is complete, return its earlier result."""
        directory = self.directory
        directory.check_kind()
        with self._lock(experiment, take_over), contextlib.ExitStack() as opened:
            saved = load_experiment(directory.config, experiment.named_options)
            experiment = resume_experiment(saved, experiment)
            check_backend(directory.notes(), experiment)
            with contextlib.closing(Checkpointer(directory.checkpoints)) as checkpointer:
                checkpointer.check_and_go_back_to(resume_from, directory.path / "aside")
                directory.go_back_to(resume_from, experiment)
                has_checkpoint = bool(checkpointer.steps())
            if resume_from is None and (earlier := self._earlier_result(saved, experiment)) is not None:
                return earlier
            if not has_checkpoint and experiment.init_from is not None:
                raise UsageError(
                    f"The run in {directory.path} ended before it had loaded {experiment.init_from}. Start it again in "
                    "another directory."
                )
            session = self._make_session(experiment, opened)
            if not has_checkpoint:
                text = "The run in %s ended before its first checkpoint. Its learner starts from the beginning."
                _log.warning(text, directory.path)
            if values := last_values(experiment):
                _log.warning(
                    "The schedules of the run ended at step %s. Since then, %s. For other values, start a new run with "
                    "--config %s --init-from %s --schedule-steps 0.",
                    f"{experiment.schedule_steps:,}",
                    " and ".join(f"{name} is {value:g}" for name, value in values.items()),
                    directory.config,
                    directory.path,
                )
            self._print_plan(session)
            program = self._make_program(session, opened)
            directory.write_config(experiment, directory.notes())
            return self._run_session(*program)

    def _lock(self, experiment: Experiment, take_over: bool = False) -> RunLock:
        return RunLock(self.directory.path, take_over, experiment.topology_config.grace_seconds + _EXIT_SECONDS)

    def _earlier_result(self, saved: Experiment, experiment: Experiment) -> Result | None:
        """Return the saved result if the run has already reached the last step of `experiment`, else None.

        A run can make a few more steps than requested, so it can be complete even if `steps` is slightly higher now.
        """
        if not self.directory.result.exists():
            return None
        result = Result.read(self.directory.result)
        options_unchanged = resume_experiment(saved, with_fields(saved, steps=experiment.steps)) == experiment
        counts_env_steps = experiment.topology_config.learns_from == "steps"
        went_beyond = counts_env_steps and result.env_steps >= experiment.steps > saved.steps
        reached_last_step = saved.steps == experiment.steps or went_beyond
        ended_well = result.stopped_by == "steps" and result.evaluation_error is None
        if not (options_unchanged and reached_last_step and ended_well):
            return None
        if self.progress is not None:
            print(
                f"Nothing is left to do: {self.directory.path} reached its {experiment.steps:,} steps. To train more, "
                "resume it with more --steps.",
                file=sys.stderr,
            )
        return result

    def _make_session(self, experiment: Experiment, opened: contextlib.ExitStack) -> Session:
        """Make the agent and the session. Until the session ends, warnings of this process also go to a log file."""
        config = experiment.topology_config
        node, is_shared = "launcher" if isinstance(config, ProgramConfig) else "train", self.shared is not None
        opened.enter_context(logs.logging_to_file(self.directory.logs, node, of_this_thread=is_shared))
        if not is_shared:  # otherwise `run_seeds` has set it for all seeds
            opened.enter_context(matmul_precision(config.matmul_precision, config.engine_class.in_process))
        codec = read_codec(experiment)
        return Session(
            experiment,
            make_agent(experiment, codec),
            self.directory.path.absolute(),
            until=min(experiment.steps, self.stop_at or experiment.steps),
            began=time.time(),
            steps_before=ProgressFile(self.directory.progress, "").counts.env_steps,
            quiet=self.quiet,
            profile=self.profile,
            codec=codec,
            shared=self.shared,
        )

    def _print_plan(self, session: Session, updates: str = "", start: str = "") -> None:
        """Print the devices, the environment, the updates and the evaluation. `start` names an initial run."""
        experiment = session.experiment
        lines = [describe_devices(experiment.topology_config.engine_class.in_process)[1]]
        lines += [f"The environment {experiment.env} is made by {each}." for each in backend_note(experiment).values()]
        lines += [start] if start else []
        if experiment.topology_config.learns_from == "steps":
            lines.append(f"{updates} {describe_evaluation(experiment)}".lstrip())
        if self.progress is not None:
            print("\n".join(lines), file=sys.stderr)

    def _make_program(
        self, session: Session, opened: contextlib.ExitStack
    ) -> tuple[Session, Engine, Topology | None, list[Logger]]:
        """Make the loggers, the nodes of the program, and the HTTP service.

        Returns:
            (session, engine, topology, loggers). If the nodes run in this process, the session contains the loggers.
            `topology` is that of a second program, which only language models have, after the warm-up, or None.
        """
        trackers = [] if self.open_trackers is None else list(self.open_trackers(self.directory.path))
        opened.callback(MultiLogger(trackers).close)
        shown = trackers if self.progress is None else [self.progress, *trackers]
        loggers: list[Logger] = [LenientLogger([each], Exception) for each in shown]
        # callbacks are last, because they can read the files that the other loggers write
        loggers += [self.callbacks] if self.callbacks else []
        engine = make_engine(session.experiment, self.directory.logs, self.quiet)
        if engine.in_process:
            session = dataclasses.replace(session, loggers=tuple(loggers), progress=self.progress)
        config = session.topology_config
        next_topology = find_topology(config.name, config.learns_from)(engine, session)
        coordinator = None if config.control_group is None else engine.handle_of(config.control_group)
        control = serve_run_control(session.path, self.control_address, coordinator, self.quiet, self.shared)
        opened.enter_context(control)
        return session, engine, next_topology, loggers

    def _run_session(
        self, session: Session, engine: Engine, next_topology: Topology | None, loggers: list[Logger]
    ) -> Result:
        """Run the program, then the second program, if any. Write the status file and the result."""
        directory, warm_up = self.directory, session.topology_config.warm_up_steps(session.experiment)
        status = StatusFile(directory, session.experiment, session.until + warm_up)
        with status.record_failure():
            directory.result.unlink(missing_ok=True)
            with forward_rows(directory.metrics, [] if engine.in_process else loggers, self.callbacks):
                signal_number = self._run_engine(engine, status)
                if next_topology is not None and signal_number is None and self.callbacks.error is None:
                    engine = make_engine(session.experiment, directory.logs, self.quiet)
                    next_topology(engine, session)
                    signal_number = self._run_engine(engine, status)
            result = self._write_result(session, signal_number)
        status.end(result)
        return result

    def _run_engine(self, engine: Engine, status: StatusFile) -> int | None:
        """Run the nodes of a program. Return the number of the signal that ended it, or None."""
        if self.callbacks:  # to end the run, a callback ends the node of `group`
            group = ending_group(engine.groups) or next(iter(engine.groups))
            saver = "learner" if "learner" in engine.groups else group
            self.callbacks.connect(engine.handle_of(group), group, engine.handle_of(saver), self.directory.path)
        try:
            return engine.run(status.watch if engine.in_process else functools.partial(self._watch, status))
        except ProgramError as error:
            raise ProgramError(f"{error}\n{self.directory.describe_checkpoint()}") from self.callbacks.error or error
        finally:
            self.callbacks.disconnect()

    def _watch(self, status: StatusFile, stops: bool, nodes: list[NodeStatus]) -> None:
        """Write the states of the nodes to the status file, and show their start in the progress display."""
        status.watch(stops, nodes)
        if self.progress is not None:
            self.progress.show(describe_start(nodes))

    def _write_result(self, session: Session, signal_number: int | None) -> Result:
        """Complete `result.json`, and draw the learning curve. If a callback raised an error, raise it again."""
        directory = self.directory
        if directory.result.exists():
            result = Result.read(directory.result)
        else:  # the program was stopped before its monitor started
            env_steps = ProgressFile(directory.progress, session.session_id).counts.env_steps
            result = Result(env_steps, 0, None, None, 0, 0.0, time.time() - session.began, 0, str(directory.path))
        by = result.stopped_by if signal_number is None else "interrupt"
        result = dataclasses.replace(
            result, signal=signal_number, stopped_by=by if self.callbacks.error is None else "error"
        )
        if result.evaluation_error is not None:
            problem = directory.describe_failed_evaluation(result.evaluation_error)
            result = dataclasses.replace(result, evaluation_error=problem)
            _log.warning(problem)
        directory.write_result(result)
        if directory.metrics.exists():  # the metrics file is missing if the run was stopped before the first row
            _draw_learning_curve(directory)
        if self.callbacks.error is not None:
            raise self.callbacks.error
        return result


def make_engine(experiment: Experiment, logs: pathlib.Path | None, quiet: bool = False) -> Engine:
    """Make the engine of an experiment.

    Args:
        experiment: The experiment.
        logs: Directory for the output of the nodes. None means that the output is not saved.
        quiet: Do not show the output of the nodes.
    """
    config = experiment.topology_config
    options = config.node_options if isinstance(config, ProgramConfig) else {}
    return config.engine_class(EngineOptions(**options, logs=logs, quiet=quiet))


def _draw_learning_curve(directory: RunDir) -> None:
    """Draw the learning curve. If this fails, log a warning and continue, because the run is already saved."""
    from rlframe.metrics import plot_learning_curve

    try:
        with _drawing:
            plot_learning_curve(directory.path, directory.learning_curve)
    except Exception as error:
        _log.warning(
            "The learning curve could not be drawn: %s To draw it later, run: rlframe plot %s", error, directory.path
        )
