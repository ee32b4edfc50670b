"""The newest answer to a question that may take long, without waiting long for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from rlframe.errors import RlframeError


class Snapshot:
    """Each call asks in a thread, unless one still does, and gives the newest answer that is there within `wait`.

    Args:
        ask: gives a dict. While it raises a `RlframeError` (a server is gone, say), its last answer stands.
        wait: seconds.
    """

    def __init__(self, ask: Callable[[], dict[str, Any]], wait: float = 0.5) -> None:
        self._ask, self._wait = ask, wait
        self._lock = threading.Lock()
        self._thread = threading.Thread()
        self._answer: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        with self._lock:
            if not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="rlframe snapshot", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(self._wait)
        return self._answer

    def _run(self) -> None:
        with contextlib.suppress(RlframeError):
            self._answer = self._ask()
