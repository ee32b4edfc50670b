"""Run the given command, and print errors as one sentence."""

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
from rlframe.interprocess.memory import rare_garbage_collections


class Command(NamedTuple):
    """A command of `rlframe`."""

    function: str  # `module:function`, called as function(arguments) -> exit code
    help: str


COMMANDS = {
    "train": Command("train:run", "train an agent on an environment, or resume a run (--resume)"),
    "sweep": Command("sweep:run", "search for the best values of train's options"),
    "evaluate": Command("finished_runs:evaluate", "play episodes with a trained agent, and optionally record a video"),
    "plot": Command("finished_runs:plot", "draw the learning curves of runs"),
    "check-env": Command("checks:check_env", "check an environment, and recommend a training command"),
    "envs": Command("listings:envs", "list the names of available environments"),
    "agents": Command("listings:agents", "list the agents, their options and their presets"),
    "serve": Command("serve:run", "serve trajectories, or a language model in training, over HTTP"),
    "status": Command("status:run", "show the state and progress of a run"),
    "scale": Command("run_control:scale", "set the number of collectors of a run with the elastic topology"),
    "pause": Command("run_control:pause", "pause a run with the elastic topology"),
    "unpause": Command("run_control:unpause", "continue a paused run"),
    "stop": Command("run_control:stop", "save and end a run; rlframe train --resume continues it"),
    "doctor": Command("checks:doctor", "show what works on this machine, and what to install for the rest"),
    "bench": Command("finished_runs:bench", "compare the speed of rlframe and other libraries"),
}

INTERRUPTED = 130  # exit code after SIGINT, as in a shell: 128 + the signal's number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    - 0: success.
    - 1: a run failed, its evaluation after training failed, or it was interrupted before it saved.
    - 2: wrong input.
    - 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP): stopped by a signal. The run's progress is saved.
    """
    streams.prepare()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = _run(arguments)
    streams.flush()
    return code


def _run(arguments: list[str]) -> int:
    try:
        with rare_garbage_collections(), _warnings_shown():
            return _dispatch(arguments)
    except KeyboardInterrupt:
        return _failed("interrupted.", INTERRUPTED)
    except SystemExit as stop:  # raised by tyro's --help or by user code
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        return _failed(str(stop.code), 1)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and streams.silence_broken_pipe(sys.stdout):
            return 0
        if "--traceback" in arguments:
            traceback.print_exc()
        return _failed(one_sentence(error), error.exit_code if isinstance(error, RlframeError) else 1)


def _failed(sentence: str, code: int) -> int:
    """Print the error. Return the exit code."""
    print(f"rlframe: {sentence}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Print rlframe's warnings to stderr, in the same format as errors."""
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
    lines += ["", "`rlframe COMMAND --help` lists a command's options. `rlframe --version` prints the version."]
    return "\n".join(lines)


def one_sentence(error: BaseException) -> str:
    """Return the message of an error for users."""
    if isinstance(error, RlframeError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(where[-1].filename)}, line {where[-1].lineno})" if where else ""
    message = str(error).strip().split("\n")[0] or "no message"
    return f"{type(error).__name__}: {message}{place}. Add --traceback to print the traceback."
