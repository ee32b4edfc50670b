"""Shutdown of a program from inside its nodes.

`stop_program` stops the program of the current node. In each node, `stop_with_program(stop)` then calls `stop()`, and
the node's objects release their resources (`Closeable`).
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
    """The program to which this process belongs. Programs that Launchpad runs have no such object."""

    stop: threading.Event
    end: Callable[[], None]


_program: _Program | None = None


def register_program(stop: threading.Event, end: Callable[[], None]) -> None:
    """Register this process as a node of a program.

    Args:
        stop: event that is set when the program should stop.
        end: function that stops the program.
    """
    global _program
    _program = _Program(stop, end)


def program_stop_event() -> threading.Event | None:
    """Return the event that is set when this node's program should stop; None if there is no program."""
    if _program is not None:
        return _program.stop
    manager = sys.modules.get("launchpad.launch.worker_manager")
    try:
        return manager.stop_event() if manager is not None else None
    except RuntimeError:  # This thread is not part of a Launchpad node.
        return None


def is_program_stopping() -> bool:
    """Return True if this node's program is stopping. Shortly after that, `stop_with_program` calls `stop`."""
    event = program_stop_event()
    return event is not None and event.is_set()


def stop_program() -> None:
    """Stop this node's program, if there is one."""
    if _program is not None:
        _program.end()
    elif program_stop_event() is not None:
        sys.modules["launchpad"].stop()


@contextlib.contextmanager
def stop_with_program(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop()` from a background thread if this node's program stops during the `with` block."""
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
    """A context manager that calls `close()` on exit."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the object's resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
