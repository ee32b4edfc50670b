"""rlframe: write an agent once; run it in one process, on one machine, or across machines.

The objects of the loop:    agents, envs, actors, inferencers, learners, replay, params (from learners to inferencers)
Runs:                       cli (the command), programs (from options to a result), engines (processes of a program),
                            coordinator (only for the topology elastic), metrics (loggers)
Language models:            language, trajectories (the service between environments and trainers)
Between processes:          handles, transport, interprocess (one machine), http, shutdown (who ends what),
                            launchpad_nodes (guards of the nodes of plain lp.launch)
For every package:          types (TimeStep, Batch), errors, retry (pauses), compilation (jit on a CPU),
                            stop_conditions (limits at which a run ends early)
Your code and environment:  user_code (files that you name), extras (optional packages, imports on first use),
                            streams (stdout), testing (checks for your own classes)

docs/architecture.md says in which file each thing is.
"""

from __future__ import annotations

from rlframe.extras import lazy_names
from rlframe.launchpad_nodes import import_hook

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


import_hook.register_with_launchpad()
