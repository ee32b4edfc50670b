"""Topologies: which objects a program is made of, each wiring on a screen.

A topology is a function `(engine, session)` that adds nodes to an engine (`rlframe.engines`). Its options are a
dataclass beside it (`@configured_by(HeavyEnv)`), made of the classes of `config.py`.

`rlframe train --topology heavy_env --num-actors 2`, step by step:

1. `config.find_topology("heavy_env")` finds the function `heavy_env.heavy_env`. `config_class_of` it is `HeavyEnv`, and
   `HeavyEnv(num_actors=2)` becomes the experiment's `topology_config`.
2. `runner.run_experiment` makes the engine that `engine_class` names, and calls `heavy_env(engine, session)`.
3. `makers.add_replay` makes the replay. `engine.add("learner", Learner, makers.learner_config(session), ...)` adds a
   node, and returns a handle to it (or the object itself). Two actors are added with the handle, each with an
   `Inferencer`.
4. `engine.add("monitor", GameMonitor, ...)` adds the node that counts steps and ends the program.

`language.py` has the topology of language models; its nodes are in `language_nodes.py`.
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
