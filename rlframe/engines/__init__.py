"""Engines: what starts the nodes of a program, watches them and connects them. One file for each."""

from __future__ import annotations

from rlframe.engines.base import Engine, EngineOptions

__all__ = ["Engine", "EngineOptions"]
