"""Functions that wait for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

LIMIT = 120.0  # maximum seconds of a wait, long enough for a busy machine; only a failing test reaches it


def wait_until(
    condition: Callable[[], T],
    message: str | Callable[[], str] = "condition is false",
    seconds: float = LIMIT,
) -> T:
    """Wait until `condition()` returns a true value. Return the value.

    Args:
        condition: called repeatedly.
        message: error message, or a function that returns it.
        seconds: maximum seconds to wait.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"Waited {seconds:g} s: {message() if callable(message) else message}"
        time.sleep(0.01)
    return found


def is_process_alive(process: psutil.Process) -> bool:
    """Return True if a process is running. A zombie process counts as ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # The process has ended between the two calls.
        return False
