"""A coordinator that the test kills: it requests two collectors from the operator, and waits.

python killed_coordinator.py HANDLE
"""

from __future__ import annotations

import pathlib
import pickle
import sys
import threading

from tests.coordinator.operators.operator_driver import OperatorDriver

if __name__ == "__main__":
    operator = OperatorDriver(pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()))
    operator.connect()
    operator.scale("collector", 2)
    while sum(worker.address is not None for worker in operator.list_workers()) < 2:
        threading.Event().wait(0.02)
    print("up", flush=True)
    threading.Event().wait(600)
