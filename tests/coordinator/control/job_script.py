"""What stands for `rlframe train --topology elastic` in the tests of the queue: a process with the same files.

    python job_script.py RUN_DIR [--resume]

It serves the control of a scripted job until that is told to stop, and ends with 0; with 1 where RUN_DIR's name ends
with "0002". RUN_DIR/sessions has a line for each process.
"""

import pathlib
import sys
import threading

from rlframe.coordinator.control.address import make_token, write_control
from rlframe.coordinator.control.serving import serve_control
from rlframe.coordinator.states import JobState
from tests.coordinator.control.coordinators import ScriptedCoordinator

run_dir = pathlib.Path(sys.argv[1])
if run_dir.name.endswith("0002"):
    print("rlframe: The environment raised.", file=sys.stderr)
    sys.exit(1)
run_dir.mkdir(exist_ok="--resume" in sys.argv)
(run_dir / "config.json").write_text("{}")
with open(run_dir / "sessions", "a") as file:
    file.write(" ".join(sys.argv[2:]) + "\n")
coordinator = ScriptedCoordinator()
stopped = threading.Event()


def cancel(reason: str = "") -> None:
    coordinator.become(JobState.DRAINING, reason)
    stopped.set()


coordinator.cancel = cancel  # type: ignore[method-assign]
token = make_token(run_dir)
with serve_control(coordinator, port=0, token_file=token) as server:
    write_control(run_dir, server.url, token)
    stopped.wait(120.0)
    (run_dir / "result.json").write_text("{}")
