"""Run the command that was asked for, and print its errors in one sentence."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import rlframe
from rlframe import streams
from rlframe.errors import RlframeError, UsageError, suggest


class Command(NamedTuple):
    """A command: its function `(arguments) -> exit code` as `module:function`, and what the help says."""

    function: str
    help: str


COMMANDS = {
    "train": Command("train:run", "train an agent on an environment"),
    "sweep": Command("sweep:run", "search the options of train for values that learn best"),
    "evaluate": Command("finished_runs:evaluate", "play episodes with a trained agent, or write a video of one"),
    "plot": Command("finished_runs:plot", "draw the learning curves of runs"),
    "envs": Command("listings:envs", "list the environments that can be named"),
    "agents": Command("listings:agents", "list the agents, their options and their presets"),
    "serve": Command("serve:run", "serve trajectories, or a language model that learns, over HTTP"),
    "status": Command("status:run", "show how a run is"),
    "scale": Command("run_control:scale", "change how many collectors a run of the topology elastic has"),
    "pause": Command("run_control:pause", "pause such a run"),
    "unpause": Command("run_control:unpause", "end the pause of such a run"),
    "stop": Command("run_control:stop", "end a run in good order"),
    "bench": Command("finished_runs:bench", "measure this project and its peers, side by side in one run"),
}

INTERRUPTED = 130  # what a shell gives for a program that SIGINT ended: 128 + the signal's number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 1: a run failed, or its evaluation after training did. 2: the input was wrong. 130: Ctrl-C (143: SIGTERM,
    129: SIGHUP), with everything saved where a run had begun; 1 where it is not.
    """
    streams.prepare()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = _run(arguments)
    streams.flush()
    return code


def _run(arguments: list[str]) -> int:
    try:
        with _warnings_shown():
            return _dispatch(arguments)
    except KeyboardInterrupt:
        return _failed("interrupted.", INTERRUPTED)
    except SystemExit as stop:  # tyro's --help, or a user's code
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        return _failed(str(stop.code), 1)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and streams.silence_broken_pipe(sys.stdout):
            return 0
        if "--traceback" in arguments:
            traceback.print_exc()
        return _failed(_one_sentence(error), error.exit_code if isinstance(error, RlframeError) else 1)


def _failed(sentence: str, code: int) -> int:
    """Print why, where anybody reads it, and return the exit code."""
    with contextlib.suppress(BrokenPipeError):
        print(f"rlframe: {sentence}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Print the package's warnings to stderr, in the form of the command's errors."""
    logger, handler = logging.getLogger("rlframe"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rlframe: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"rlframe {rlframe.__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise UsageError(f"There is no command {command!r}; there are {known}.{suggest(command, COMMANDS)}")
    module, _, function = COMMANDS[command].function.partition(":")
    return getattr(importlib.import_module(f"rlframe.cli.{module}"), function)(rest)


def _help() -> str:
    lines = ["usage: rlframe COMMAND [OPTIONS]", ""]
    lines += [f"  rlframe {name:9} {each.help}" for name, each in COMMANDS.items()]
    lines += ["", "`rlframe COMMAND --help` lists its options. `rlframe --version` is the version."]
    return "\n".join(lines)


def _one_sentence(error: Exception) -> str:
    if isinstance(error, RlframeError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(where[-1].filename)}, line {where[-1].lineno})" if where else ""
    message = str(error).strip().split("\n")[0] or "no message"
    return f"{type(error).__name__}: {message}{place}. --traceback shows where it came from."
