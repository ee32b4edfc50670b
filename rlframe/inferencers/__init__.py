"""Inferencers hold a copy of the parameters and answer timesteps with actions."""

from rlframe.inferencers.inferencer import Inferencer, InferencerConfig

__all__ = ["Inferencer", "InferencerConfig"]
