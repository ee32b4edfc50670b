"""The main program of a node's process: `main`, with the arguments NAME DESCRIPTOR (see `StartableProcess.of`).

1. `main` sets the process up: the process dies with the launcher, has a heartbeat, and logs with the node's name.
2. `main` reads a function and a pickled node from the file descriptor, and calls the function with the node. Under the
   engines `local` and `ray`, the function is `run_served_node`.
3. `run_to_exit` converts an exception to an exit code for the supervisor.
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
from typing import Any, NoReturn

from rlframe import streams
from rlframe.engines import logs
from rlframe.engines.group_rules import traits_of
from rlframe.engines.supervision.nodes import EXIT_PERMANENT, LAUNCHER_PID, end_program_of
from rlframe.errors import PERMANENT_ERRORS, JobFailedError
from rlframe.interprocess import heartbeat
from rlframe.interprocess.heartbeat import ENDING, STARTING
from rlframe.interprocess.memory import rare_garbage_collections, use_one_arena
from rlframe.interprocess.processes import die_with_parent
from rlframe.shutdown import register_program


def main() -> None:
    """Run one node, and exit with a code for the outcome: see `run_to_exit`."""
    streams.prepare()
    name, descriptor = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:]
    begin_process(name)
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    with STARTING:
        heartbeat.begin()
        logs.set_up(name)
        sys.path.append(os.getcwd())
        with open(descriptor, "rb") as file:
            run, pickled = pickle.load(file)
    with rare_garbage_collections():
        run_to_exit(lambda: run(pickled))


def begin_process(name: str) -> None:
    """Set up the process of a node or worker. Call this function before any code starts a thread or imports JAX.

    Args:
        name: name of the node. For `actor/1`, the process title is `rlframe: actor 1`.
    """
    import setproctitle

    if traits_of(name.partition("/")[0]).uses_one_arena:
        use_one_arena()
    faulthandler.enable()
    setproctitle.setproctitle(f"rlframe: {name.replace('/', ' ')}")


def run_served_node(pickled: bytes, end: Callable[[], None] | None = None) -> None:
    """Construct the object of a node in its process, serve it and run it.

    If the object has no `run`, serve it until SIGTERM, and then call its `close` if it has this method.

    Args:
        pickled: a pickled `ServedNode` (`rlframe.engines.served_engine`).
        end: function that ends the program. None means that the node ends the program by a signal to the launcher.
    """
    stop = threading.Event()
    register_program(stop, end or functools.partial(end_program_of, int(os.environ[LAUNCHER_PID])))
    with STARTING:  # until the object exists, SIGTERM kills this process: it has nothing to save
        import cloudpickle

        node = cloudpickle.loads(pickled)
        made = node.constructor(*node.args, **node.kwargs)
    # Set the event in a new thread, because the interrupted thread may hold the event's lock.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=stop.set, daemon=True).start())
    server = node.transport.serve(public_methods(made), node.address)
    try:
        if hasattr(made, "run"):
            made.run()
        else:
            while not stop.wait(1.0):  # poll, because a signal just before an endless wait would not interrupt it
                pass
    finally:
        server.stop()
        if not hasattr(made, "run") and hasattr(made, "close"):
            made.close()


def public_methods(target: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods that other nodes may call: all methods whose names do not begin with an underscore."""
    names = (name for name in dir(type(target)) if not name.startswith("_"))
    return {name: getattr(target, name) for name in names if callable(getattr(type(target), name, None))}


def run_to_exit(function: Callable[[], Any]) -> NoReturn:
    """Call the function and exit with 0 for success, EXIT_PERMANENT if a restart would fail, 1 for other errors."""
    code = 0
    try:
        function()
    except PERMANENT_ERRORS:
        traceback.print_exc()
        code = EXIT_PERMANENT
    except JobFailedError as error:  # a restart would fail too; the traceback has already been printed
        print(error, file=sys.stderr)
        code = EXIT_PERMANENT
    except Exception:
        traceback.print_exc()
        code = 1
    # Run the exit handlers, but skip the shutdown of the interpreter, in which running threads of Courier, Reverb and
    # JAX could crash.
    with ENDING:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
