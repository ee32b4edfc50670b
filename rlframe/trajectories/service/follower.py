"""A thread that hands over what any process appends to a store that several share."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlframe.errors import RlframeError, StoreError
from rlframe.trajectories.service.state_machine import read_on

if TYPE_CHECKING:
    from rlframe.trajectories.service.service import Service

_WAIT, _WAIT_CLOSING = 1.0, 0.2  # seconds until it looks whether the service has ended
_RETRY = 0.5  # seconds until a store that did not answer is read again

_logger = logging.getLogger(__name__)


class Follower(threading.Thread):
    """Reads the log from a position on, until the service is closing and nothing is pending, or the store has failed.

    The service is told on its event loop's thread, by `go_on` and `give_up`.
    """

    def __init__(self, service: Service, after: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="follower of the log", daemon=True)
        self._service, self._after, self._loop = service, after, loop

    def run(self) -> None:
        store = self._service.store
        while not self._service.idle:
            try:
                if store.wait(self._after, _WAIT_CLOSING if self._service.closing else _WAIT):
                    snapshot, records = read_on(store, self._after)
                    self._hand_over(functools.partial(self._service.go_on, snapshot, records))
                    self._after = records[-1][0] if snapshot is None else snapshot[0]
            except StoreError as error:
                self._hand_over(functools.partial(self._service.give_up, error))
                return
            except RlframeError as error:
                if not self._service.closing:
                    _logger.warning("%s", error)
                time.sleep(_RETRY)

    def _hand_over(self, work: Callable[[], None]) -> None:
        """Run `work` on the event loop's thread and wait for it."""
        done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        while not done.wait(1.0):
            if self._loop.is_closed():
                return
