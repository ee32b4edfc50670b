"""rlframe: write an agent once; run it in one process, on one machine, or across machines."""

from __future__ import annotations

import importlib
from typing import Any

from rlframe.interprocess import launchpad_import

__version__ = "0.1.0"

# Public name -> module. Resolved on first use (PEP 562), so that `import rlframe` stays quick.
_PUBLIC = {
    "Actor": "rlframe.actors",
    "Agent": "rlframe.agents",
    "AsyncEnv": "rlframe.envs",
    "EnvServer": "rlframe.envs",
    "Evaluator": "rlframe.actors",
    "Inferencer": "rlframe.inferencers",
    "InferencerConfig": "rlframe.inferencers",
    "Learner": "rlframe.learners",
    "LearnerConfig": "rlframe.learners",
    "ReplayBuffer": "rlframe.replay",
    "ReverbReplayBuffer": "rlframe.replay.reverb",
    "SharedMemReplayBuffer": "rlframe.replay",
    "SyncEnv": "rlframe.envs",
    "evaluate": "rlframe.programs.policies.evaluation",
    "export": "rlframe.programs.policies.exported",
    "launch": "rlframe.engines.launchpad",
    "load": "rlframe.programs.policies.trained",
    "train": "rlframe.programs.api",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'rlframe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


launchpad_import.register_with_launchpad()
