"""Elastic training: workers come and go while it continues. See docs/coordinator.md."""

from __future__ import annotations

import importlib
from typing import Any

# Resolved on first use: the commands that only talk to a coordinator do not wait for JAX.
_PUBLIC = {
    "Attempt": "rlframe.params.store",
    "CollectorWorker": "rlframe.coordinator.workers.collector",
    "Coordinator": "rlframe.coordinator.coordinator",
    "CoordinatorConfig": "rlframe.coordinator.config",
    "LearnerWorker": "rlframe.coordinator.workers.learner",
    "Limits": "rlframe.coordinator.config",
    "LocalOperator": "rlframe.coordinator.operators.local",
    "ParamStore": "rlframe.params.store",
    "StartTask": "rlframe.coordinator.messages",
    "TrainOne": "rlframe.coordinator.commander",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'rlframe.coordinator' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
