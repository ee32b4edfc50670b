"""`python adopted.py STATE_DIR OWNER`: a coordinator that has two collectors started, and waits to be killed."""

from __future__ import annotations

import sys
import threading

from rlframe.coordinator.operators.local import LocalOperator
from rlframe.interprocess.processes import ProcessId

if __name__ == "__main__":
    pid, started = sys.argv[2].split(":")
    operator = LocalOperator(sys.argv[1], owner=ProcessId(int(pid), int(started)))
    operator.connect()
    operator.request("collector", 2)
    while sum(worker.address is not None for worker in operator.list()) < 2:
        threading.Event().wait(0.02)
    print("up", flush=True)
    threading.Event().wait(600)
