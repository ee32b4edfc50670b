"""Ctrl-C and SIGTERM: finish the step under way, save, leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Within the context, the first signal sets `number`, a second one raises KeyboardInterrupt at once.

    Between `interruptible(True)` and `interruptible(False)` the first one raises as well: for work
    whose result is of no use when it is cut off. Does nothing outside the main thread, where Python
    allows no handlers.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._raises = False

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def interruptible(self, raises: bool) -> None:
        """Whether the first signal raises KeyboardInterrupt from here on."""
        self._raises = raises

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        repeated = self.number is not None
        self.number = self.number or number
        if repeated or self._raises:
            raise KeyboardInterrupt
