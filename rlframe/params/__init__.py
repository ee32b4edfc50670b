"""Parameters under rising versions: where they come from (`ParamSource`), and how they reach the inferencers.

A version is packed once by its learner and unpacked where it acts. In between it travels unchanged.
"""

from rlframe.params.packing import PackedParams
from rlframe.params.source import ParamSource
from rlframe.params.store import Attempt, ParamStore

__all__ = ["Attempt", "PackedParams", "ParamSource", "ParamStore"]
