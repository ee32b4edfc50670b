"""Engines start the nodes of a program, watch them and connect them; one file each."""

from __future__ import annotations

from rlframe.engines.base import Engine, EngineOptions

__all__ = ["Engine", "EngineOptions"]
