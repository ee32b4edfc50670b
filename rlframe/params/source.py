"""The protocol of an inferencer's source of parameters, `ParamSource`. `reader.py` reads and follows one."""

from __future__ import annotations

from typing import Protocol

from rlframe.params.packing import PackedParams
from rlframe.types import Tree

LONGEST_WAIT = 1.0  # seconds of one `wait_for_version` at most, so that a stop is not delayed longer


class ParamSource(Protocol):
    """A source of parameters whose versions increase: a Learner, a policy of a param store, or your own object.

    Several inferencers may call it, from any thread. The parameters are a copy, because the learner keeps training its
    own.
    """

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """Return (newest version, its tree of numpy arrays), or (`known_version`, None) if that is the newest."""

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """Return the newest version once it is above `known_version`, or after `timeout` seconds (1 at most).

        Optional: only inferencers of on-policy agents call it. If it is missing, they poll `get_params`.
        """


class PackedSource(ParamSource, Protocol):
    """A source that packs each version once, for all inferencers."""

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """Return the result of `get_params` with packed parameters."""
