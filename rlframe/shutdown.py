"""The end of a program, in its nodes.

`stop_program` ends the program of this node. Then `stop_with_program(stop)` calls `stop` in each of its nodes, whose
objects free what they hold (`Closeable`).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True)
class _Program:
    """The program that this process is a node of, where that is none of Launchpad's."""

    stop: threading.Event
    end: Callable[[], None]


_program: _Program | None = None


def register_program(stop: threading.Event, end: Callable[[], None]) -> None:
    """Say that this process is a node of a program.

    Args:
        stop: is set when the program is to end.
        end: ends the program.
    """
    global _program
    _program = _Program(stop, end)


def program_stop_event() -> threading.Event | None:
    """Return the event that is set when the program of this node is to end; None: there is no program."""
    if _program is not None:
        return _program.stop
    manager = sys.modules.get("launchpad.launch.worker_manager")
    try:
        return manager.stop_event() if manager is not None else None
    except RuntimeError:  # not a node's thread
        return None


def is_program_stopping() -> bool:
    """Return whether the program here is to end: known a moment before `stop_with_program` calls `stop`."""
    event = program_stop_event()
    return event is not None and event.is_set()


def stop_program() -> None:
    """End the program, where there is one."""
    if _program is not None:
        _program.end()
    elif program_stop_event() is not None:
        sys.modules["launchpad"].stop()


@contextlib.contextmanager
def stop_with_program(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop()`, in another thread, when the program of this node ends."""
    event = program_stop_event()
    if event is None:
        yield
        return
    left = threading.Event()

    def watch() -> None:
        while not left.is_set():
            if event.wait(0.1):
                stop()
                return

    watcher = threading.Thread(target=watch, name="rlframe program stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        watcher.join()


class Closeable(abc.ABC):
    """A context manager whose end is `close()`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
