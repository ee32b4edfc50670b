"""The entry of a node's process: `python -m rlframe.engines.supervision.node_main DESCRIPTOR INDEX NAME`.

It dies with the launcher, carries its role in its title, and lets no program linger on the disk: what it runs comes
through a descriptor.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from rlframe import streams
from rlframe.engines import logs
from rlframe.engines.supervision.running import FOR_GOOD, GroupPolicy, NodeProcess
from rlframe.errors import CheckpointError, JobFailedError, NonFiniteLossError, UsageError
from rlframe.interprocess import heartbeat
from rlframe.interprocess.malloc import use_one_arena
from rlframe.interprocess.processes import die_with_parent
from rlframe.interprocess.progress import ENDING
from rlframe.user_directories import import_path

LAUNCHER_PID = "RLFRAME_LAUNCHER_PID"


@contextlib.contextmanager
def node_processes(
    run: Callable[[bytes], Any], groups: Mapping[str, Sequence[bytes]], policies: Mapping[str, GroupPolicy]
) -> Iterator[list[NodeProcess]]:
    """The processes of a program, for a `ProgramSupervisor`.

    Args:
        run: a function of a module, which runs a node in its process.
        groups: by label, the nodes of each group, as `run` takes them.
        policies: by label; a group without one has no restarts and decides nothing.
    """
    nodes = []
    with contextlib.ExitStack() as opened:
        for label, group in groups.items():
            # Memory, not a file: nothing is left behind when the launcher is killed.
            descriptor = os.memfd_create(f"rlframe {label}")
            opened.callback(os.close, descriptor)
            with open(f"/proc/self/fd/{descriptor}", "wb") as file:
                pickle.dump((run, list(group)), file)
            policy = policies.get(label, GroupPolicy())
            policy = dataclasses.replace(policy, env={**policy.env, LAUNCHER_PID: str(os.getpid())})
            for index in range(len(group)):
                name = f"{label}/{index}" if len(group) > 1 else label
                command = command_of(__name__, str(descriptor), str(index), name)
                nodes.append(NodeProcess(name, command, policy, (descriptor,)))
        yield nodes


def pickle_node(label: str, node: Any) -> bytes:
    """Pickles what a process of this group is to run. Raises UsageError where that cannot be."""
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


def main() -> None:
    """Runs one node; the process's exit code says how it ended."""
    streams.prepare()
    descriptor, index, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:]
    begin_process(name)
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    heartbeat.begin()
    logs.set_up(name)
    sys.path.append(os.getcwd())
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # opened anew: the offset is shared with the other nodes
        run, nodes = pickle.load(file)
    run_to_exit(lambda: run(nodes[index]))


def command_of(module: str, *arguments: str) -> list[str]:
    """The command line of a process that calls `main` of a module, and imports from where this one does."""
    code = f"import sys; sys.path[:] = {import_path()!r}; from {module} import main; main()"
    return [sys.executable, "-c", code, *arguments]


def run_to_exit(function: Callable[[], Any]) -> NoReturn:
    """Does what this process is for, and ends it; the exit code says how that went."""
    code = 0
    try:
        function()
    except (UsageError, NonFiniteLossError, CheckpointError):  # another try would end in the same way
        traceback.print_exc()
        code = FOR_GOOD
    except JobFailedError as error:  # the same; where it came from the worker has said
        print(error, file=sys.stderr)
        code = FOR_GOOD
    except Exception:
        traceback.print_exc()
        code = 1
    # Threads of Courier, Reverb and JAX may be in the middle of something, which does not survive the end of the
    # interpreter: so what was registered for the exit is done, and that end is left out.
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

    if name.partition("/")[0] == "learner":
        use_one_arena()
    faulthandler.enable()
    setproctitle.setproctitle(f"rlframe: {name.replace('/', ' ')}")
