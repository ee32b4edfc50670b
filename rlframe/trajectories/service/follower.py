"""A thread that hands over what any process appends to a store that several share."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlframe.errors import RlframeError, StoreError
from rlframe.trajectories.stores import RecordsDroppedError

if TYPE_CHECKING:
    from rlframe.trajectories.service.service import Service

_WAIT, _WAIT_CLOSING = 1.0, 0.2  # seconds until it looks whether the service has ended
_RETRY = 0.5  # seconds until a store that did not answer is read again

_logger = logging.getLogger(__name__)


class Follower:
    """Reads the log from a position on, until the service is closing and waits for nothing, or the store has failed.

    The service is told on its event loop's thread, by `apply_records`, `go_on_from` and `give_up`.
    """

    def __init__(self, service: Service, after: int) -> None:
        self._service = service
        self._store = service.store
        self._after = after
        self._thread = threading.Thread(target=self._run, name="follower of the log", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._service.idle:
            try:
                if self._store.wait(self._after, _WAIT_CLOSING if self._service.closing else _WAIT):
                    self._read()
            except StoreError as error:
                self._hand_over(functools.partial(self._service.give_up, error))
                return
            except RlframeError as error:
                if not self._service.closing:
                    _logger.warning("%s", error)
                time.sleep(_RETRY)

    def _read(self) -> None:
        try:
            records = self._store.read(self._after)
        except RecordsDroppedError:  # another process took a snapshot meanwhile
            snapshot = self._store.load()
            if snapshot is None or snapshot[0] <= self._after:
                raise StoreError(f"The store lost records after position {self._after}. Restart the service.") from None
            self._hand_over(functools.partial(self._service.go_on_from, *snapshot))
            self._after = snapshot[0]
        else:
            self._hand_over(functools.partial(self._service.apply_records, records))
            self._after = records[-1][0]

    def _hand_over(self, work: Callable[[], None]) -> None:
        """Runs `work` on the event loop's thread and waits for it."""
        done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        self._service.loop.call_soon_threadsafe(run)
        while not done.wait(1.0):
            if self._service.loop.is_closed():
                return
