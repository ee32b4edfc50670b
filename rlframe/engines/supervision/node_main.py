"""What runs in the process of a node: `main`, with the arguments NAME DESCRIPTOR (see `StartableProcess.of`).

1. `main` sets the process up: it dies with the launcher, has a heartbeat, and logs under the name of the node.
2. It reads a function and a pickled node from the descriptor, and calls the function with the node: under the engines
   `local` and `ray` this is `run_served_node`.
3. `run_to_exit` turns an exception into an exit code for the supervisor.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from rlframe import streams
from rlframe.engines import logs
from rlframe.engines.group_rules import traits_of
from rlframe.engines.supervision.nodes import EXIT_PERMANENT, LAUNCHER_PID
from rlframe.engines.supervision.program_supervisor import STOP_SIGNAL
from rlframe.errors import CheckpointError, JobFailedError, NonFiniteLossError, UsageError
from rlframe.interprocess import heartbeat
from rlframe.interprocess.malloc import use_one_arena
from rlframe.interprocess.phases import ENDING, STARTING
from rlframe.interprocess.processes import die_with_parent
from rlframe.shutdown import register_program


def main() -> None:
    """Run one node. The exit code of the process says how it ended."""
    streams.prepare()
    name, descriptor = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:]
    begin_process(name)
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    heartbeat.begin()
    logs.set_up(name)
    sys.path.append(os.getcwd())
    with open(descriptor, "rb") as file:
        run, pickled = pickle.load(file)
    run_to_exit(lambda: run(pickled))


def begin_process(name: str) -> None:
    """Set up the process of a node or worker. Call it before anything starts a thread or imports JAX.

    Args:
        name: the process title for `actor/1` is `rlframe: actor 1`.
    """
    import setproctitle

    if traits_of(name.partition("/")[0]).uses_one_arena:
        use_one_arena()
    faulthandler.enable()
    setproctitle.setproctitle(f"rlframe: {name.replace('/', ' ')}")


def run_served_node(pickled: bytes, end: Callable[[], None] | None = None) -> None:
    """Make the object of a node in its process, serve it and run it.

    An object without `run` is served until SIGTERM, and closed then if it has `close`.

    Args:
        pickled: a `ServedNode` (`rlframe.engines.served_engine`).
        end: ends the program; None: a signal to the launcher does, which started this process.
    """
    stop = threading.Event()
    register_program(stop, end or functools.partial(os.kill, int(os.environ[LAUNCHER_PID]), STOP_SIGNAL))
    set_at_sigterm(stop)
    with STARTING:
        import cloudpickle

        node = cloudpickle.loads(pickled)
        made = node.constructor(*node.args, **node.kwargs)
    server = node.transport.serve(public_methods(made), node.address)
    try:
        if hasattr(made, "run"):
            made.run()
        else:
            while not stop.wait(1.0):  # not without end: a signal that comes just before would not wake it
                pass
    finally:
        server.stop()
        if not hasattr(made, "run") and hasattr(made, "close"):
            made.close()


def public_methods(target: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods that others may call: those of the class whose names begin without an underscore."""
    names = (name for name in dir(type(target)) if not name.startswith("_"))
    return {name: getattr(target, name) for name in names if callable(getattr(type(target), name, None))}


def set_at_sigterm(stop: threading.Event) -> None:
    """Set the event at SIGTERM."""

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        # Not from here: the thread that the handler interrupts may hold the event's lock.
        threading.Thread(target=stop.set, daemon=True).start()

    signal.signal(signal.SIGTERM, handle)


def run_to_exit(function: Callable[[], Any]) -> NoReturn:
    """Call the function, and end this process with an exit code for the outcome."""
    code = 0
    try:
        function()
    except (UsageError, NonFiniteLossError, CheckpointError):  # another try would end in the same way
        traceback.print_exc()
        code = EXIT_PERMANENT
    except JobFailedError as error:  # the same; where it came from the worker has said
        print(error, file=sys.stderr)
        code = EXIT_PERMANENT
    except Exception:
        traceback.print_exc()
        code = 1
    # Threads of Courier, Reverb and JAX may be in the middle of something, which does not survive the end of the
    # interpreter: so exit handlers run, and the interpreter's own end is skipped.
    with ENDING:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
