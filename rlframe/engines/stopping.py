"""Handlers for Ctrl-C, SIGTERM and SIGHUP, so that a run finishes its current step, saves and exits."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a run. Omit SIGHUP if this process ignores it, for example under `nohup`."""
    stops = (signal.SIGINT, signal.SIGTERM)
    return stops if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*stops, signal.SIGHUP)


def detach_from_closed_terminal() -> None:
    """Redirect stdout and stderr to the null device if the terminal is closed. Then a write raises no error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            descriptor = stream.fileno()
            os.write(descriptor, b"")
        except ValueError:  # the stream is closed, or has no file descriptor
            continue
        except OSError:
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, descriptor)
            os.close(null_device)


@contextlib.contextmanager
def signal_handlers(numbers: Iterable[int], handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle(number)` for signals during a `with`.

    Do nothing outside the main thread, because Python allows signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def called(number: int, _: FrameType | None) -> None:
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
    """A context in which the first stop signal sets `number`, and a second signal raises KeyboardInterrupt.

    Inside `with stop.interruptible():`, the first signal also raises KeyboardInterrupt. Use this for work that a signal
    may break off. Outside the main thread, signals arrive only through `receive`, because Python allows no signal
    handlers there.

    Args:
        quiet: do not print a message when a signal arrives.

    Attributes:
        number: the number of the first signal; None before the first signal.
        is_repeated: whether a second signal has arrived. Check this too: a user's callback may have caught the
            KeyboardInterrupt.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self.number: int | None = None
        self.is_repeated = False
        self._raises = False
        self._end: Callable[[], None] | None = None
        self._handling = contextlib.ExitStack()

    def __enter__(self) -> StopSignal:
        self._handling.enter_context(signal_handlers(stop_signals(), self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.close()

    @contextlib.contextmanager
    def interruptible(self, end: Callable[[], None] | None = None) -> Iterator[None]:
        """Raise KeyboardInterrupt at the first signal during a `with`. In another thread, call `end` instead."""
        self._raises, self._end = True, end
        try:
            yield
        finally:
            self._raises, self._end = False, None

    def receive(self, number: int) -> None:
        """Pass a signal of the main thread to the thread that uses this object."""
        self.is_repeated = self.number is not None
        self.number = self.number or number
        if (end := self._end) is not None:
            end()

    def _handle(self, number: int) -> None:
        self.is_repeated = self.number is not None
        self.number = self.number or number
        if self.is_repeated or self._raises:
            raise KeyboardInterrupt
        if self._quiet:
            return
        text = f"rlframe: {signal.Signals(number).name}: saving after the current step; repeat to exit immediately\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # not `print`, because the signal may have interrupted a `print`
