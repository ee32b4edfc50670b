"""What a Learner publishes: its newest parameters for acting, and their version, for however many ask."""

from __future__ import annotations

import threading

import jax

from rlframe.interprocess.memory import SUPPORTED, Name
from rlframe.learners.shared_params import ParamsPublisher
from rlframe.packing import Packing
from rlframe.types import Tree


class Publication:
    """The newest version. Any thread may ask, and waits for no update.

    Args:
        packing: of the parameters for acting.
        version: the first.
        packed: its arrays, as `packing` has them; no update may donate them.
    """

    def __init__(self, packing: Packing, version: int, packed: list[jax.Array]) -> None:
        self._packing = packing
        self._newest = (version, packed)
        self._changed, self._lock = threading.Condition(), threading.Lock()
        self._numpy: tuple[int, Tree] = (-1, None)
        self._shared: ParamsPublisher | None = None  # once another process of this machine has asked for it

    @property
    def version(self) -> int:
        """The version that `get_params` gives now."""
        return self._newest[0]

    def publish(self, version: int, packed: list[jax.Array]) -> None:
        """Puts a newer version in the place of the last."""
        with self._changed:
            self._newest = (version, packed)
            if self._shared is not None:
                self._shared.announce()
            self._changed.notify_all()

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """See `Learner.get_params`."""
        version, packed = self._newest
        if version == known_version:
            return version, None
        with self._lock:
            if self._numpy[0] != version:  # fetched once per version, however many ask
                self._numpy = (version, self._packing.unpack_numpy(packed))
            return self._numpy

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """See `Learner.wait_for_version`."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > known_version, min(timeout, 1.0))
            return self.version

    def shared_params(self) -> Name | None:
        """See `Learner.shared_params`."""
        with self._lock:
            if self._shared is None and SUPPORTED:
                self._shared = ParamsPublisher(self._packing, lambda: self._newest)
                self._shared.announce()
        return self._shared.name if self._shared is not None else None

    def close(self) -> None:
        """Ends the thread that writes to shared memory. May be called again."""
        if self._shared is not None:
            self._shared.close()
