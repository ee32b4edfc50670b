"""Elastic training: workers come and go while it continues. See docs/coordinator.md."""

from __future__ import annotations

from rlframe.lazy import lazy_names

# Imported on first use: the commands that only talk to a coordinator do not wait for JAX.
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
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
