"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

LIMIT = 120.0  # seconds; only a test that fails waits for so long, however busy the machine is


def wait_until(
    condition: Callable[[], T], what: str | Callable[[], str] = "it did not come about", seconds: float = LIMIT
) -> T:
    """Returns what `condition()` gives once that is true.

    Args:
        condition: called again and again.
        what: the error says, where that takes longer than `seconds`.
        seconds: after which it is an error.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"Waited {seconds:g} s: {what() if callable(what) else what}"
        time.sleep(0.01)
    return found


def is_process_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False
