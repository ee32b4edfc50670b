"""rlframe: write an agent once; run it in one process, on one machine, or across machines."""

from __future__ import annotations

from rlframe.interprocess import launchpad_import
from rlframe.lazy import lazy_names

__version__ = "0.1.0"

# Public name -> module. Imported on first use, so that `import rlframe` stays quick.
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
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)


launchpad_import.register_with_launchpad()
