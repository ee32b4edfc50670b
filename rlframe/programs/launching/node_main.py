"""The entry of a node's process: `python -m rlframe.programs.launching.node_main DESCRIPTOR INDEX NAME`.

Does what Launchpad's own entry does, and dies with the launcher, carries its role in its title, and lets
no program linger on the disk: the pickled functions come through a descriptor.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback

from rlframe.errors import CheckpointError, JobFailedError, NonFiniteLossError, UsageError
from rlframe.programs.launching.supervisor import FOR_GOOD

LAUNCHER_PID = "RLFRAME_LAUNCHER_PID"

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs one node; the process's exit code says how it ended."""
    descriptor, index, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:]
    faulthandler.enable()
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    set_title(name)
    sys.path.append(os.getcwd())

    import cloudpickle
    from absl import flags
    from launchpad.launch import worker_manager

    flags.FLAGS(sys.argv[:1])
    flags.FLAGS["lp_termination_notice_secs"].value = -1  # no countdown of its own: the supervisor has one
    worker_manager.WorkerManager(register_in_thread=True)  # SIGTERM becomes `lp.stop_event()`
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # opened anew: the offset is shared with the other nodes
        functions = cloudpickle.load(file)
    code = 0
    try:
        functions[index]()
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
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, even from SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            threading.Event().wait(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def set_title(name: str) -> None:
    """`rlframe: actor 1` for the node `actor/1`."""
    import setproctitle

    setproctitle.setproctitle(f"rlframe: {name.replace('/', ' ')}")


if __name__ == "__main__":
    main()
