"""A param store in this process: parameters stay on the device that they are on."""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import Any

import numpy as np

from rlframe.params.packing import PackedParams
from rlframe.params.store import Attempt, ParamStore


class LocalParamStore(ParamStore):
    """Policies in this process, for its threads. Device arrays that are put must not be donated afterwards.

    Args:
        kept: versions of each policy.
    """

    def __init__(self, kept: int = 4) -> None:
        super().__init__(kept)
        self._changed = threading.Condition()
        self._changes = 0
        self._versions: dict[str, dict[int, tuple[PackedParams, bytes]]] = collections.defaultdict(dict)
        self._pins: dict[str, set[int]] = collections.defaultdict(set)
        self._attempts: dict[str, Attempt] = {}
        self._closed = False

    def opened(self, policy_id: str) -> Attempt | None:
        return self._attempts.get(policy_id)

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _check_policy(self, policy_id: str) -> None:
        pass

    def _writing(self, policy_id: str) -> contextlib.AbstractContextManager[Any]:
        return self._changed

    def _set_opened(self, policy_id: str, attempt: Attempt) -> None:
        self._attempts[policy_id] = attempt

    def _whole(self, policy_id: str) -> list[int]:
        return sorted(self._versions[policy_id].copy())

    def _pinned(self, policy_id: str) -> list[int]:
        return sorted(self._pins[policy_id].copy())

    def _set_pinned(self, policy_id: str, version: int, pinned: bool) -> None:
        (self._pins[policy_id].add if pinned else self._pins[policy_id].discard)(version)

    def _write(self, policy_id: str, version: int, prepared: tuple[PackedParams, bytes]) -> None:
        packed, hparams = prepared
        arrays = [array.copy() if isinstance(array, np.ndarray) else array for array in packed.arrays]
        for array in arrays:
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        self._versions[policy_id][version] = PackedParams(packed.packing, arrays), hparams

    def _read(self, policy_id: str, version: int) -> tuple[PackedParams, bytes] | None:
        return self._versions[policy_id].get(version)

    def _drop_old(self, policy_id: str) -> None:
        for version in set(self._versions[policy_id]).difference(self.versions(policy_id)):
            del self._versions[policy_id][version]

    def _change(self) -> int:
        return self._changes

    def _wait(self, seen: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, seconds)

    def _wake(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()
