"""Topologies: which objects a program is made of, each wiring on a screen.

A topology is a function `(engine, session)` that adds nodes to an engine (`rlframe.engines`). Its options are a
dataclass beside it (`@configured_by(HeavyEnv)`).
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
