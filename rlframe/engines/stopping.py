"""Ctrl-C, SIGTERM and SIGHUP: finish the step under way, save, leave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a run. SIGHUP is one of them, unless it is ignored, as under `nohup`."""
    stops = (signal.SIGINT, signal.SIGTERM)
    return stops if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*stops, signal.SIGHUP)


def detach_from_closed_terminal() -> None:
    """Redirect stdout and stderr to the null device if the terminal is gone: writing to it would raise."""
    for stream in (sys.stdout, sys.stderr):
        try:
            descriptor = stream.fileno()
            os.write(descriptor, b"")
        except ValueError:  # it is none of a file, or closed
            continue
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextlib.contextmanager
def signal_handlers(numbers: Iterable[int], handle: Callable[[int], None]) -> Iterator[None]:
    """Handle signals by `handle(number)` during a `with`. Python allows that in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def called(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            detach_from_closed_terminal()
        handle(number)

    before = {number: signal.signal(number, called) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignal:
    """Within the context, the first signal sets `number`, a second one raises KeyboardInterrupt at once.

    `is_repeated` says whether there was a second one, which a callback may have caught.

    Within `with stop.interruptible():` the first one raises as well: for work whose result is of no use when it is cut
    off. Does nothing outside the main thread, where Python allows no handlers.

    Args:
        quiet: do not print that a signal came.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self.number: int | None = None
        self.is_repeated = False
        self._raises = False
        self._handling = contextlib.ExitStack()

    def __enter__(self) -> StopSignal:
        self._handling.enter_context(signal_handlers(stop_signals(), self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.close()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within a `with`, raise KeyboardInterrupt at the first signal, too."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _handle(self, number: int) -> None:
        self.is_repeated = self.number is not None
        self.number = self.number or number
        if self.is_repeated or self._raises:
            raise KeyboardInterrupt
        if self._quiet:
            return
        text = f"rlframe: {signal.Signals(number).name}: saving after the step under way; once more leaves at once\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # not `print`, in whose middle the signal may have come
