"""A process of a run, as `rlframe status` shows it and `Coordinator.status` has a worker."""

from __future__ import annotations

import socket
from typing import Any

from rlframe.coordinator.states import WorkerState


def node_status(name: str, incarnation: int, pid: int | None, state: WorkerState = WorkerState.BUSY) -> dict[str, Any]:
    """Of the node `actor/0`, which was restarted `incarnation` times."""
    role, _, index = name.partition("/")
    return {
        "worker_id": name,
        "role": role,
        "index": int(index or 0),
        "incarnation": incarnation,
        "state": state.value,
        "host": socket.gethostname(),
        "pid": pid,
    }
