"""A run in which a language model learns: the counterpart of `rlframe.programs.program`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from rlframe.errors import UsageError
from rlframe.language.model.tokenizers import load_tokenizer
from rlframe.metrics import CallbackLogger, Logger
from rlframe.programs.assemble import make_agent
from rlframe.programs.control import Control, serve_control_of
from rlframe.programs.language.description import LanguageExperiment
from rlframe.programs.language.environment import env_class, env_config
from rlframe.programs.language.session import HOST, LanguageRun
from rlframe.programs.language.topology import light_env
from rlframe.programs.language.warmup import WarmUp
from rlframe.programs.program import conduct, make_engine
from rlframe.programs.run_dir import Result, RunDir, open_session
from rlframe.programs.run_status import StatusFile


def train(
    described: LanguageExperiment,
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
    control: Control | None = None,
) -> Result:
    """See `rlframe.programs.train`; `stop_at` and the rows' steps are learner steps here.

    The supervised steps come first, in a program of their own; what they lead to is kept in the run directory.
    """
    with open_session(described, run_dir, resume, stop_at, take_over, resume_from) as (described, directory):
        with contextlib.ExitStack() as undo:
            if not resume:
                undo.callback(directory.remove)
                directory.write_config(described, notes or {})  # first: a run that is killed early can be resumed
            until = min(described.steps, stop_at or described.steps)
            run = _open(described, directory, until)
            if resume:
                directory.write_config(described, notes or {})
            more = list(open_loggers(directory.path)) if open_loggers is not None else []
            undo.pop_all()
        loggers = [
            *([progress] if progress is not None else []),
            *more,
            *([CallbackLogger(callback)] if callback else []),
        ]
        status = StatusFile(directory, described, until + described.warmup_steps)
        with serve_control_of(directory.path, control):
            return conduct(
                directory,
                status,
                loggers,
                lambda watch: _run(run, directory, watch),
                lambda: _read_result(directory, run),
            )


def _open(described: LanguageExperiment, directory: RunDir, until: int) -> LanguageRun:
    """Everything that can be wrong is found here, before a process is started."""
    ports = _free_ports([described.service_port, described.policy_port])
    agent: Any = make_agent(described, None, None)
    run = LanguageRun(described, agent, directory.path.absolute(), until, time.time(), *ports)
    env_config(env_class(described.env), run)
    tokens = load_tokenizer(described.tokenizer_name).vocab_size
    if tokens > agent.model_config.vocab_size:
        raise UsageError(
            f"The tokenizer {described.tokenizer_name} has {tokens} tokens, the model only "
            f"{agent.model_config.vocab_size}."
        )
    return run


def _run(run: LanguageRun, directory: RunDir, watch: Any) -> int | None:
    described = run.described
    if described.warmup_steps:
        if not directory.warmup.exists():
            engine = make_engine(described, directory.logs)
            engine.add("learner", WarmUp, run)  # a program of one node, with the learner's cores and accelerators
            number = engine.run(watch)
            if number is not None or not directory.warmup.exists():
                return number
        config = dataclasses.replace(described.agent_config, weights=str(directory.warmup.absolute()))
        run = dataclasses.replace(
            run, agent=make_agent(dataclasses.replace(described, agent_config=config), None, None)
        )
    engine = make_engine(described, directory.logs)
    light_env(engine, run)
    return engine.run(watch)


def _read_result(directory: RunDir, run: LanguageRun) -> Result:
    if directory.result.exists():
        return Result.read(directory.result)
    # It was told to stop before its monitor had begun, or in its warm-up.
    return Result(0, 0, None, None, 0, 0.0, time.time() - run.began, 0, str(directory.path))


def _free_ports(wanted: list[int]) -> list[int]:
    """The ports that were asked for, or free ones in place of 0.

    Raises:
        UsageError: one is in use.
    """
    with contextlib.ExitStack() as opened:
        found = []
        for port in wanted:
            listener = opened.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError as error:
                raise UsageError(f"Port {port} of {HOST} cannot be listened at: {error.strerror}.") from error
            found.append(listener.getsockname()[1])
        return found
