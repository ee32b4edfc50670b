"""Where inferencers get their parameters from: the protocol, and the one adapter to it."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rlframe.errors import UsageError
from rlframe.params.packing import PackedParams
from rlframe.types import Tree

LONGEST_WAIT = 1.0  # seconds that a `wait_for_version` takes at most: a stop waits for no longer than this
_LOOK = 0.02  # seconds between two questions to a source that cannot be waited for


class ParamSource(Protocol):
    """Parameters under rising versions: a Learner, a policy of a param store, or an object of your own.

    Any number of inferencers ask, from any thread, so an answer to one who is up to date is small. What is given out
    is a copy: a learner goes on training its own.
    """

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """(newest version, its tree of numpy arrays); (it, None) where that is `known_version`."""

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """The newest version, as soon as it is above `known_version`, or after `timeout` seconds (1 at most).

        Only inferencers of on-policy agents need it; where it is missing, they ask again and again.
        """


class PackedSource(ParamSource, Protocol):
    """A source that packs a version once, for however many inferencers take it as it is."""

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """As `get_params`, packed."""


def as_packed_source(source: Any) -> PackedSource:
    """The source itself, where it gives packed parameters, or an adapter that packs what its `get_params` gives.

    Raises:
        UsageError: it has no `get_params`.
    """
    if hasattr(source, "get_packed"):
        return source
    if not callable(getattr(source, "get_params", None)):
        raise UsageError(
            f"A {type(source).__name__} was given as the learner of an Inferencer: it needs get_params(known_version) "
            "-> (version, tree or None), as a Learner has."
        )
    return _Packs(source)


class FixedParams:
    """A source of one version, which somebody holds: of an evaluation, say."""

    def __init__(self, version: int = -1, packed: PackedParams | None = None) -> None:
        self.version, self.packed = version, packed

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """See `PackedSource`."""
        return self.version, None if self.version == known_version else self.packed

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """See `ParamSource`."""
        return unpacked(self.get_packed(known_version))

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """See `ParamSource`: no other will come."""
        if known_version >= self.version:
            time.sleep(min(timeout, LONGEST_WAIT))
        return self.version


class _Packs:
    """Packs the trees of a source that has only those."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.get_params = source.get_params

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        version, params = self._source.get_params(known_version)
        return version, None if params is None else PackedParams.of(params)

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        if hasattr(self._source, "wait_for_version"):
            return self._source.wait_for_version(known_version, timeout)
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT)
        while (version := self._source.get_params(known_version)[0]) <= known_version and time.monotonic() < deadline:
            time.sleep(_LOOK)
        return version


def unpacked(answer: tuple[int, PackedParams | None]) -> tuple[int, Tree | None]:
    """What `get_params` answers, of what `get_packed` does."""
    version, packed = answer
    return version, None if packed is None else packed.unpack()
