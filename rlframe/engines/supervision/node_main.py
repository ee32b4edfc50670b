"""From the launcher to the process of a node, and the entry of that process: `main`.

- In the launcher: `pickle_node` pickles a node, `node_process` describes its process: the command, which calls `main`
  with the arguments NAME DESCRIPTOR, and the bytes to read from the descriptor. No program stays on the disk.
- In the process: `main` sets it up (it dies with the launcher, and has its role in its title), reads the node and runs
  it. `run_to_exit` turns an exception into an exit code for the supervisor.
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rlframe import streams
from rlframe.engines import logs
from rlframe.engines.group_rules import GroupRules, traits_of
from rlframe.engines.supervision.running import EXIT_PERMANENT, NodeProcess
from rlframe.errors import CheckpointError, JobFailedError, NonFiniteLossError, UsageError
from rlframe.interprocess import heartbeat
from rlframe.interprocess.malloc import use_one_arena
from rlframe.interprocess.phases import ENDING
from rlframe.interprocess.processes import die_with_parent
from rlframe.user_code.directories import import_path

LAUNCHER_PID = "RLFRAME_LAUNCHER_PID"


# --- in the launcher


def node_process(
    name: str, run: Callable[[bytes], Any], pickled: bytes, rules: GroupRules, address: str | None = None
) -> NodeProcess:
    """Return the process of a node, to be started by a supervisor of this process. It has this process's `sys.path`.

    Args:
        name: of the node: `actor/1`.
        run: a function of a module, which runs a node in its process.
        pickled: the node, as `run` takes it.
        rules: of its group.
        address: see `NodeProcess`.
    """
    rules = dataclasses.replace(rules, env={**rules.env, LAUNCHER_PID: str(os.getpid())})
    code = f"import sys; sys.path[:] = {import_path()!r}; from {__name__} import main; main()"
    return NodeProcess(name, [sys.executable, "-c", code, name], rules, pickle.dumps((run, pickled)), address)


def program_processes(
    run: Callable[[bytes], Any], groups: Mapping[str, Sequence[bytes]], rules: Mapping[str, GroupRules]
) -> list[NodeProcess]:
    """Return the processes of a program, for a `ProgramSupervisor`.

    Args:
        run: see `node_process`.
        groups: by label, the pickled nodes of each group.
        rules: by label; a group without one has no restarts and does not end the program.
    """
    return [
        node_process(f"{label}/{index}" if len(group) > 1 else label, run, pickled, rules.get(label, GroupRules()))
        for label, group in groups.items()
        for index, pickled in enumerate(group)
    ]


def pickle_node(label: str, node: Any) -> bytes:
    """Pickle a node of this group. Raises UsageError if it cannot be pickled."""
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(node)
    except UsageError:  # an argument that is refused
        raise
    except Exception as error:
        raise UsageError(
            f"The nodes of the group {label!r} cannot be sent to their processes: {type(error).__name__}: {error}. "
            "Their arguments must be picklable."
        ) from error
    return pickled


# --- in the process of the node


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
