"""The protocol `ParamSource`: an inferencer's source of parameters. `reader.py` reads such a source."""

from __future__ import annotations

from typing import Protocol

from rlframe.params.packing import PackedParams
from rlframe.types import Tree

LONGEST_WAIT = 1.0  # maximum seconds of one `wait_for_version` call; the program cannot stop during a call


class ParamSource(Protocol):
    """A source of parameters whose versions increase: a Learner, a policy of a param store, or your own object.

    Several inferencers may call a source, from any thread. The source returns a copy of the parameters, because the
    learner continues to train them.
    """

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """Return (newest version, its tree of numpy arrays). The tree is None if `known_version` is the newest."""

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """Wait until there is a version above `known_version`, or for `timeout` seconds (1 at most).

        Return the newest version. This method is optional: if a source does not have it, inferencers poll `get_params`.
        Only inferencers of on-policy agents call it.
        """


class PackedSource(ParamSource, Protocol):
    """A source that packs each version only once, for all inferencers."""

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """Return the same result as `get_params`, but with packed parameters instead of the tree."""
