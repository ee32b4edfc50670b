"""A run, in one process or in several, as its experiment says."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from rlframe.errors import UsageError
from rlframe.metrics import Logger
from rlframe.programs import program, single_process
from rlframe.programs.experiment import Experiment
from rlframe.programs.profile import Profile
from rlframe.programs.run_dir import Result


def train(
    described: Any,
    *,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    callback: Callable[[int, dict[str, Any]], Any] | None = None,
    open_loggers: Callable[[pathlib.Path], Iterable[Logger]] | None = None,
    progress: Logger | None = None,
    profile: Profile | None = None,
    notes: dict[str, Any] | None = None,
    listen: int | None = None,
    control: Any = None,
) -> Result:
    """Trains an experiment's agent to its last step, and evaluates the final policy.

    The first Ctrl-C (or SIGTERM) finishes the step under way, saves everything and returns without
    an evaluation; a second one leaves at once.

    Args:
        described: what to run, an `Experiment` or a `LanguageExperiment`; on resume what ran before, perhaps with other
            `steps` (see `continued`).
        run_dir: where everything is written; None: a new directory under `runs/`.
        resume: go on from the latest checkpoint in `run_dir`; a run that ended before its first one starts again.
        stop_at: environment steps at which this session stops and saves; schedules still end at `described.steps`.
        callback: `callback(env_steps, values)` is called with each row of the logs.
        open_loggers: `open_loggers(run_dir)` gives more places for the rows; they are closed at the end.
        progress: a logger that is also written to, without values, a few times a second.
        profile: measures where the time of a single process goes.
        notes: kept in `config.json` for a reader.
        listen: of the topology distributed, the port at which programs on other machines may `join` the run.
        control: of the topology elastic, where it can be told what to do: a `rlframe.programs.elastic.Control`.

    Returns:
        See `Result`.

    Raises:
        UsageError: the experiment or the directory cannot be.
        RlframeError: the run failed; what was saved is kept.
    """
    session: dict[str, Any] = {
        "run_dir": run_dir,
        "resume": resume,
        "stop_at": stop_at,
        "callback": callback,
        "open_loggers": open_loggers,
        "progress": progress,
        "notes": notes,
    }
    if not isinstance(described, Experiment):
        from rlframe.programs import language

        if listen is not None or profile is not None:
            raise UsageError("A run in which a language model learns takes neither listen nor a profile.")
        return language.train(described, **session)
    if listen is not None and (described.topology, described.engine) != ("distributed", "launchpad"):
        raise UsageError(
            "Other machines can join (listen) a run of the topology distributed and the engine launchpad, "
            f"got {described.topology} and {described.engine}."
        )
    if described.topology == "single_process":
        return single_process.train(described, **session, profile=profile)
    if profile is not None:
        raise UsageError(f"A profile is of a single process; the topology is {described.topology}.")
    return program.train(described, **session, listen=listen, control=control)
