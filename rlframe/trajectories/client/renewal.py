"""A thread that has leases go on for as long as whoever holds them lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

_PATIENCE = 2.0  # seconds


class Renewal:
    """Calls a method now and then, until `close`, or until the method's object is gone.

    Args:
        renew: a bound method, which raises nothing.
        period: seconds between two calls.
    """

    def __init__(self, renew: Callable[[], None], period: float) -> None:
        self._renew = weakref.WeakMethod(renew)
        self._period = period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe lease renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. A call to a service that does not answer ends later. Twice does nothing more."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            renew = self._renew()
            if renew is None:
                return
            renew()
            del renew  # else the object lives until the next call
