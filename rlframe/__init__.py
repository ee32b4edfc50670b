"""rlframe: write an agent once; run it in one process, on one machine, or across machines.

Training loop:       agents, envs, actors, inferencers, learners, replay, params (from learner to inferencers)
Runs:                cli (the command), programs (from options to a result), engines (processes of a program),
                     coordinator (elastic runs), control (status and commands over HTTP), metrics (loggers),
                     device (the topology fused)
Language models:     language, trajectories (the service between environments and trainers)
Between processes:   handles, transport, interprocess (one machine), http, shutdown (stop all nodes of a program),
                     launchpad_nodes (guard processes for nodes of plain lp.launch)
Shared by packages:  types (TimeStep, Batch), errors, retry (backoff), compilation (jit on a CPU),
                     stop_conditions (limits that end a run early)
User code and setup: user_code (files that users name), extras (optional packages, lazy imports), streams (stdout),
                     testing (checks for users' classes)

docs/project/architecture.md says where to find what.
"""

from __future__ import annotations

from rlframe.extras import lazy_names
from rlframe.launchpad_nodes import register_with_launchpad

__version__ = "0.1.0"

# Public name -> module. A module is imported on the first use of its name, which keeps `import rlframe` fast.
_PUBLIC = {
    "Actor": "rlframe.actors",
    "Agent": "rlframe.agents",
    "AsyncEnv": "rlframe.envs",
    "EnvServer": "rlframe.envs",
    "EvaluateOn": "rlframe.programs.training.callbacks",
    "Evaluator": "rlframe.actors",
    "Inferencer": "rlframe.inferencers",
    "InferencerConfig": "rlframe.inferencers",
    "Learner": "rlframe.learners",
    "LearnerConfig": "rlframe.learners",
    "ReplayBuffer": "rlframe.replay",
    "ReverbReplayBuffer": "rlframe.replay.reverb",
    "SharedMemReplayBuffer": "rlframe.replay",
    "StopAt": "rlframe.programs.training.callbacks",
    "SyncEnv": "rlframe.envs",
    "check_env": "rlframe.programs.env_check.check",
    "evaluate": "rlframe.programs.policies.evaluation",
    "export": "rlframe.programs.policies.exported",
    "launch": "rlframe.engines.launchpad",
    "load": "rlframe.programs.policies.trained",
    "train": "rlframe.programs.api",
}

__all__ = list(_PUBLIC)
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)


register_with_launchpad()
