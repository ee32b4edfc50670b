"""The end of a Launchpad program, as its nodes hear of it and bring it about."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator


def program_stop() -> threading.Event | None:
    """The event that is set when Launchpad's program is to end, where this thread runs a node of one."""
    manager = sys.modules.get("launchpad.launch.worker_manager")
    try:
        return manager.stop_event() if manager is not None else None
    except RuntimeError:  # not a node's thread
        return None


def stop_program() -> None:
    """Ends Launchpad's program, where this thread runs a node of one."""
    if program_stop() is not None:
        sys.modules["launchpad"].stop()


@contextlib.contextmanager
def stopped_by_program(stop: Callable[[], None]) -> Iterator[None]:
    """Has `stop()` called (by another thread) when the program that this node belongs to ends."""
    event = program_stop()
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
