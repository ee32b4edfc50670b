"""A run in several processes: the counterpart of `single_process.train`, with the same result and the same files."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from rlframe.actors.actor import env_seed
from rlframe.agents import Agent
from rlframe.engines import Engine, EngineOptions, logs
from rlframe.errors import ProgramError
from rlframe.metrics import CallbackLogger, Logger, MultiLogger, plot_learning_curve
from rlframe.programs import naming
from rlframe.programs.assemble import make_agent, make_pool
from rlframe.programs.census import Census
from rlframe.programs.control import Control, serve_control_of
from rlframe.programs.door import OPEN_GROUPS
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir import Result, RunDir, open_session, rows_after
from rlframe.programs.run_status import StatusFile
from rlframe.programs.topologies import TOPOLOGIES, Run
from rlframe.programs.updates import say_updates

_log = logging.getLogger(__name__)

_LOOK_EVERY = 0.5  # seconds between two looks at the rows that the monitor has written


def train(
    described: Experiment,
    *,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    resume_from: int | None = None,
    take_over: bool = False,
    stop_at: int | None = None,
    callback: Callable[[int, dict[str, Any]], Any] | None = None,
    open_loggers: Callable[[pathlib.Path], Iterable[Logger]] | None = None,
    progress: Logger | None = None,
    notes: dict[str, Any] | None = None,
    listen: int | None = None,
    control: Control | None = None,
) -> Result:
    """See `rlframe.programs.train`.

    ProgramError says that a node failed more often than it may, or did not save when the program was stopped.
    """
    with contextlib.ExitStack() as served:
        described, directory = served.enter_context(
            open_session(described, run_dir, resume, stop_at, take_over, resume_from)
        )
        with contextlib.ExitStack() as undo:
            if not resume:
                undo.callback(directory.remove)
                directory.write_config(described, notes or {})  # first: a run that is killed early can be resumed
            run = Run(
                described,
                agent_of(described),
                directory.path.absolute(),
                until=min(described.steps, stop_at or described.steps),
                began=time.time(),
                resumed_at=int(Census(directory.progress, "").total()["env_steps"]),
                listen=listen,
            )
            if not resume:
                say_updates(described, run.agent.replay_spec, progress)
            engine = make_engine(described, directory.logs, listen)
            topology_of(described)(engine, run)
            if resume:
                directory.write_config(described, notes or {})
            coordinator = engine.handle_of("coordinator") if described.topology == "elastic" else None
            served.enter_context(serve_control_of(directory.path, control, coordinator))
            more = list(open_loggers(directory.path)) if open_loggers is not None else []
            undo.pop_all()
        loggers = [
            *([progress] if progress is not None else []),
            *more,
            *([CallbackLogger(callback)] if callback else []),
        ]
        status = StatusFile(directory, described, run.until)
        return conduct(directory, status, loggers, engine.run, lambda: _read_result(directory, run))


def conduct(
    directory: RunDir,
    status: StatusFile,
    loggers: Iterable[Logger],
    run: Callable[[Callable[[bool, list[dict[str, Any]]], None]], int | None],
    read_result: Callable[[], Result],
) -> Result:
    """A session from the start of its processes to its result and its picture.

    Args:
        directory: of the run.
        status: says how it goes.
        loggers: get the rows that the monitor writes, and are closed.
        run: runs the processes, tells how they are, and gives the number of the signal that ended them, if one did.
        read_result: what came of it.

    Raises:
        ProgramError: of `run`, with what is saved.
    """
    directory.result.unlink(missing_ok=True)
    with status.until_the_end():
        try:
            with logs.kept(directory.logs, "launcher"), _Rows(directory.metrics, MultiLogger(loggers)):
                number = run(status.watch)
        except ProgramError as error:
            raise ProgramError(f"{error}\n{directory.what_is_saved()}") from error
    result = dataclasses.replace(read_result(), signal=number, run_dir=str(directory.path))
    directory.write_result(result.to_json())
    status.end(result)
    if directory.metrics.exists():  # not where it was stopped at once
        plot_learning_curve(directory.path, directory.learning_curve)
    return result


def agent_of(described: Experiment) -> Agent:
    """The agent of an experiment; a pool of its environments is opened and closed for their specs."""
    pool = make_pool(described.synchronous, 1, described.env_kwargs, env_seed(described.seed, 0, 0))
    try:
        return make_agent(described, pool.observation_spec, pool.action_spec)
    finally:
        pool.close()


def _read_result(directory: RunDir, run: Run) -> Result:
    if directory.result.exists():
        return Result.read(directory.result)
    # The program was told to stop before its monitor had begun.
    env_steps = int(Census(directory.progress, run.session).total()["env_steps"])
    return Result(env_steps, 0, None, None, 0, 0.0, time.time() - run.began, 0, str(directory.path))


def topology_of(described: Experiment) -> Callable[[Any, Run], None]:
    """What adds the nodes of an experiment's program to an engine."""
    if described.topology == "elastic":
        from rlframe.programs.elastic import elastic

        return elastic
    return TOPOLOGIES[described.topology]


def make_engine(described: Any, logs: pathlib.Path | None, listen: int | None = None) -> Engine:
    """The engine that the experiment asks for.

    Args:
        described: the experiment.
        logs: the directory in which the nodes' lines are kept; None: nowhere.
        listen: port of the first of the nodes that other machines may call, whose ports follow each other.
    """
    ports = {} if listen is None else {group: listen + i for i, group in enumerate(OPEN_GROUPS)}
    asked = {name: getattr(described, name) for name in ("max_restarts", "hang_timeout", "grace_seconds")}
    return naming.engine_class(described.engine)(EngineOptions(**asked, ports=ports, logs=logs))


class _Rows:
    """Hands the rows that a monitor writes to a file on to loggers of this process, until the context ends."""

    def __init__(self, path: pathlib.Path, logger: Logger) -> None:
        self._path, self._logger = path, logger
        self._at = path.stat().st_size if path.exists() else 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rlframe rows", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self._try_to_read()
        self._logger.close()

    def _follow(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            self._try_to_read()

    def _try_to_read(self) -> None:
        try:
            self._read()
        except Exception as error:  # a tracker that fails does not end the run, nor hide how it ended
            _log.warning("A logger failed: %s", error)

    def _read(self) -> None:
        if not self._path.exists():
            return
        self._at = min(self._at, self._path.stat().st_size)  # a restarted monitor may take its last row back
        for row, position in rows_after(self._path, self._at):
            self._at = position
            self._logger.write(row.pop("step"), row)
