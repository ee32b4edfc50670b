"""The source of an inferencer's parameters: the protocol `ParamSource`. `reader.py` reads one, and follows it."""

from __future__ import annotations

from typing import Protocol

from rlframe.params.packing import PackedParams
from rlframe.types import Tree

LONGEST_WAIT = 1.0  # seconds that one `wait_for_version` takes at most, so that a stop is not delayed for longer


class ParamSource(Protocol):
    """Parameters under rising versions: a Learner, a policy of a param store, or an object of your own.

    Any number of inferencers call it, from any thread. The parameters are a copy: a learner goes on training its own.
    """

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """Return (newest version, its tree of numpy arrays), or (`known_version`, None) if that is the newest."""

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """Return the newest version, as soon as it is above `known_version`, or after `timeout` seconds (1 at most).

        Optional: only inferencers of on-policy agents use it, and poll `get_params` without it.
        """


class PackedSource(ParamSource, Protocol):
    """A source that packs each version once, for all inferencers."""

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """As `get_params`, packed."""
