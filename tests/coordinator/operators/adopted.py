"""`python adopted.py STATE_DIR OWNER`: a coordinator that has two collectors started, and waits to be killed."""

from __future__ import annotations

import sys
import threading

from rlframe.coordinator.operators.local import LocalOperator
from rlframe.interprocess.processes import ProcessId
from tests.coordinator.operators.driven import Driven

if __name__ == "__main__":
    pid, started = sys.argv[2].split(":")
    operator = Driven(LocalOperator(sys.argv[1], owner=ProcessId(int(pid), int(started))), sys.argv[1])
    operator.connect()
    operator.request("collector", 2)
    while sum(worker.address is not None for worker in operator.list()) < 2:
        threading.Event().wait(0.02)
    print("up", flush=True)
    threading.Event().wait(600)
