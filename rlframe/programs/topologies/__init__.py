"""Topologies: the nodes of a program and their connections.

A topology is a function `(engine, session)` that adds nodes to an engine (`rlframe.engines`). Its options are a
dataclass in the same file (`@configured_by(HeavyEnv)`), which inherits from the classes of `config.py`.

`rlframe train --topology heavy_env --num-actors 2`, step by step:

1. `config.find_topology("heavy_env")` finds the function `heavy_env.heavy_env`. `config_class_of` returns its config
   class `HeavyEnv`. `HeavyEnv(num_actors=2)` becomes the experiment's `topology_config`.
2. `runner.run_experiment` makes the engine of the class `engine_class`, and calls `heavy_env(engine, session)`.
3. `makers.add_replay` makes the replay buffer. `engine.add("learner", Learner, makers.learner_config(session), ...)`
   adds a node, and returns a handle to it (or the object itself). Each of the two actors gets this handle and its own
   `Inferencer`.
4. `engine.add("monitor", GameMonitor, ...)` adds the node that counts steps and ends the program.

`language.py` contains the topology of language models, and `language_nodes.py` its nodes.
"""

from __future__ import annotations

from rlframe.programs.topologies.config import (
    GameConfig,
    GameProgram,
    ProgramConfig,
    Topology,
    TopologyConfig,
    configured_by,
)

__all__ = ["GameConfig", "GameProgram", "ProgramConfig", "Topology", "TopologyConfig", "configured_by"]
