"""The command line of an environment: `python my_env.py serve|process|evaluate`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rlframe.errors import RlframeError, UsageError, suggest
from rlframe.language.environments import process
from rlframe.language.environments.config import BaseEnvConfig
from rlframe.language.environments.flags import Flags, Options, help_text

if TYPE_CHECKING:
    from rlframe.language.environments.env import BaseEnv

COMMANDS = {
    "serve": "collect for the trainer of a trajectory service",
    "process": "write groups to a JSONL and an HTML file; needs a model server only",
    "evaluate": "evaluate once; needs a model server only",
}

logger = logging.getLogger("rlframe.language.environments")


def main(env_cls: type[BaseEnv], arguments: Sequence[str] | None = None) -> None:
    """Runs a command, and ends the process: 0 done, 1 it failed, 2 the input was wrong, 130 Ctrl-C, 143 SIGTERM."""
    sys.exit(run(env_cls, sys.argv[1:] if arguments is None else arguments))


def run(env_cls: type[BaseEnv], arguments: Sequence[str]) -> int:
    """As `main`, and returns the exit code."""
    _log()
    try:
        if not arguments or {"-h", "--help"} & set(arguments):
            print(_usage(env_cls))
            return 0 if arguments else 2
        command = arguments[0]
        if command not in COMMANDS:
            raise UsageError(f"There is no command {command!r}: serve, process, evaluate.{suggest(command, COMMANDS)}")
        options = parse(env_cls, command, arguments[1:])
        return asyncio.run(_until_signal(lambda: _command(env_cls, command, options)))
    except RlframeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the signals were taken
        return 128 + signal.SIGINT


def parse(env_cls: type[BaseEnv], command: str, arguments: Sequence[str]) -> Options:
    """The options of a command.

    Raises:
        UsageError: an option is unknown, or its value does not fit.
    """
    env, servers = env_cls.config_init()
    flags: Flags[Any] = Flags(_defaults(env_cls, command, env), servers)
    return flags.options(arguments)


def make(env_cls: type[BaseEnv], options: Options) -> BaseEnv:
    """The environment that options describe."""
    env = env_cls(options.env, options.servers, options.manager.slurm, options.manager.testing)
    env.server.max_n_completions = options.manager.max_n_completions
    return env


def _defaults(env_cls: type[BaseEnv], command: str, env: BaseEnvConfig) -> BaseEnvConfig:
    """The class's, with what suits the command better."""
    update: dict[str, Any] = {}
    if env.wandb_name is None and env_cls.name is not None:
        update["wandb_name"] = env_cls.name
    if command != "serve":
        update["use_wandb"] = False
    if command == "process":
        update |= {"ensure_scores_are_not_same": False, "include_messages": True}
        if env.data_path_to_save_groups is None:
            update["data_path_to_save_groups"] = f"data/{env_cls.name or 'groups'}.jsonl"
    return env.model_copy(update=update)


async def _command(env_cls: type[BaseEnv], command: str, options: Options) -> None:
    env = make(env_cls, options)
    if command == "serve":
        await env.env_manager()
    elif command == "process":
        await env.process_manager()
    else:
        await process.evaluate(env)


async def _until_signal(start: Any) -> int:
    """Runs to the end, or until Ctrl-C or SIGTERM; then what was opened is closed all the same."""
    work: Coroutine[Any, Any, None] = start()
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) > 1:  # asked twice: at once
            os._exit(128 + number)
        logger.info("Ends on %s.", signal.Signals(number).name)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # not on Windows
            loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    return 0


def _usage(env_cls: type[BaseEnv]) -> str:
    env, servers = env_cls.config_init()
    commands = "\n".join(f"  {name:<9} {what}" for name, what in COMMANDS.items())
    flags: Flags[Any] = Flags(_defaults(env_cls, "serve", env), servers)
    return f"{env_cls.__name__}: {', '.join(COMMANDS)}\n\n{commands}\n\noptions:\n{help_text(flags)}"


def _log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for chatty in ("httpx", "httpx2", "httpcore", "openai"):  # a line for each request
        logging.getLogger(chatty).setLevel(logging.WARNING)
