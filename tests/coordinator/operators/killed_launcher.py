"""A launcher that the test kills: it starts an operator with two workers, and prints their process ids.

python killed_launcher.py
"""

from __future__ import annotations

import io
import threading

from rlframe.coordinator.operators.supervised import LocalOperator
from tests.coordinator.operators import workers

if __name__ == "__main__":
    operator = LocalOperator(
        {"learner": workers.make_idle_worker, "collector": workers.make_idle_worker}, output=io.StringIO()
    )
    operator.scale("learner", 1)
    operator.scale("collector", 1)
    while sum(worker.address is not None for worker in operator.list_workers()) < 2:
        threading.Event().wait(0.02)
    print(*[worker.pid for worker in operator.list_workers()], operator._sockets.path, flush=True)
    threading.Event().wait(600)
