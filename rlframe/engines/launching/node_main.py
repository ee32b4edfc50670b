"""The entry of a node's process: `python -m rlframe.engines.launching.node_main DESCRIPTOR INDEX NAME`.

Does what Launchpad's own entry does, and dies with the launcher, carries its role in its title, and lets
no program linger on the disk: the pickled functions come through a descriptor.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from rlframe.engines import logs
from rlframe.engines.launching.supervisor import FOR_GOOD
from rlframe.errors import CheckpointError, JobFailedError, NonFiniteLossError, UsageError
from rlframe.interprocess import heartbeat, progress
from rlframe.interprocess.processes import die_with_parent

LAUNCHER_PID = "RLFRAME_LAUNCHER_PID"


def main() -> None:
    """Runs one node; the process's exit code says how it ended."""
    descriptor, index, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:]
    faulthandler.enable()
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    heartbeat.begin()
    set_title(name)
    logs.set_up(name)
    sys.path.append(os.getcwd())
    with progress.STARTING:
        function = _load(descriptor, index)
    run_to_exit(function)


def command_of(module: str, *arguments: str) -> list[str]:
    """The command line of a process that calls `main` of a module, and imports from where this one does."""
    code = (
        f"import sys; sys.path[:] = {[entry or os.getcwd() for entry in sys.path]!r}; from {module} import main; main()"
    )
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
    with progress.ENDING:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _load(descriptor: int, index: int) -> Callable[[], Any]:
    """What the node runs, and Launchpad made ready for it."""
    import cloudpickle
    from absl import flags
    from launchpad.launch import worker_manager

    flags.FLAGS(sys.argv[:1])
    flags.FLAGS["lp_termination_notice_secs"].value = -1  # no countdown of its own: the supervisor has one
    worker_manager.WorkerManager(register_in_thread=True)  # SIGTERM becomes `lp.stop_event()`
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # opened anew: the offset is shared with the other nodes
        return cloudpickle.load(file)[index]


def set_title(name: str) -> None:
    """`rlframe: actor 1` for the node `actor/1`."""
    import setproctitle

    setproctitle.setproctitle(f"rlframe: {name.replace('/', ' ')}")


if __name__ == "__main__":
    main()
