"""A run, in one process or in several, as its experiment says."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from rlframe import extras
from rlframe.envs.names import split
from rlframe.errors import UsageError
from rlframe.metrics import Logger
from rlframe.programs import program, single_process
from rlframe.programs.control import Control
from rlframe.programs.experiment import Experiment
from rlframe.programs.profile import Profile
from rlframe.programs.run_dir import Result


def train(
    described: Any,
    *,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    resume_from: int | None = None,
    take_over: bool = False,
    stop_at: int | None = None,
    callback: Callable[[int, dict[str, Any]], Any] | None = None,
    open_loggers: Callable[[pathlib.Path], Iterable[Logger]] | None = None,
    progress: Logger | None = None,
    profile: Profile | None = None,
    notes: dict[str, Any] | None = None,
    listen: int | None = None,
    control: Control | None = None,
) -> Result:
    """Trains an experiment's agent to its last step, and evaluates the final policy.

    The first Ctrl-C (or SIGTERM) finishes the step under way, saves everything and returns without
    an evaluation; a second one leaves at once.

    Args:
        described: what to run, an `Experiment` or a `LanguageExperiment`; on resume what ran before, perhaps with other
            `steps` (see `continued`).
        run_dir: where everything is written; None: a new directory under `runs/`.
        resume: go on from the latest checkpoint in `run_dir`; a run that ended before its first one starts again.
        resume_from: the checkpoint to go on from, by its name; newer ones are moved aside. None: the newest.
        take_over: end the process that writes to `run_dir` now, if there is one, and go on in its place.
        stop_at: environment steps at which this session stops and saves; schedules still end at `described.steps`.
        callback: `callback(env_steps, values)` is called with each row of the logs.
        open_loggers: `open_loggers(run_dir)` gives more places for the rows; they are closed at the end.
        progress: a logger that is also written to, without values, a few times a second.
        profile: measures where the time of a single process goes.
        notes: kept in `config.json` for a reader.
        listen: of the topology distributed, the port at which programs on other machines may `join` the run.
        control: where the run is shown, and can be told what to do, over HTTP; None: nowhere.

    Returns:
        See `Result`.

    Raises:
        UsageError: the experiment or the directory cannot be.
        RlframeError: the run failed; what was saved is kept.
    """
    check_extras(described, with_control=control is not None)
    session: dict[str, Any] = {
        "run_dir": run_dir,
        "resume": resume,
        "resume_from": resume_from,
        "take_over": take_over,
        "stop_at": stop_at,
        "callback": callback,
        "open_loggers": open_loggers,
        "progress": progress,
        "notes": notes,
        "control": control,
    }
    if not isinstance(described, Experiment):
        from rlframe.programs.language import run as language

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
    return program.train(described, **session, listen=listen)


def check_extras(described: Any, *, with_control: bool = False) -> None:
    """Raises UsageError where the run needs an extra that is not installed: before its directory is made.

    Args:
        described: what is to run.
        with_control: whether it is to be shown over HTTP.
    """
    if split(described.env)[0] == "dm_control":
        extras.require(f"--env {described.env}", "dm_control")
    engine = ["launchpad"] if described.topology != "single_process" and described.engine == "launchpad" else []
    if not isinstance(described, Experiment):
        # The warm-up writes the weights that it leads to in the published format.
        published = described.tokenizer_name != "byte" or described.agent_config.weights or described.warmup_steps
        extras.require(f"--agent {described.agent}", *engine, "trajectories", "envs", *(["lm"] if published else []))
        return
    by = f"--topology {described.topology}" + (" --replay reverb" if described.replay == "reverb" else "")
    replay = ["reverb"] if described.replay_kind == "reverb" else []
    if with_control and described.topology != "elastic":  # where it is not by itself
        extras.require("--http", "trajectories")
    control = ["trajectories"] if with_control else []
    without = "or leave its control out by --http None" if with_control else ""
    extras.require(by, *engine, *replay, *control, otherwise=without)
