"""Processor time: the time that a step uses the cores, regardless of other processes.

It varies less between runs than wall time, and shows work that is hidden by waiting.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int | None = None) -> float:
    """Return the user and system time so far of a process tree.

    The tree consists of the process, its living descendants, and the ended children that they waited for.

    Args:
        pid: process id. None means this process.
    """
    if pid is not None:
        return _tree_seconds(pid)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_tree_seconds, _children(os.getpid())))


class Stopwatch:
    """Measures wall time and processor time since its creation."""

    def __init__(self) -> None:
        self._processor = processor_seconds()
        self._wall = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of wall time so far."""
        return time.perf_counter() - self._wall

    def rate(self, steps: int) -> dict[str, float]:
        """Return steps per second so far, and microseconds of processor time per step."""
        per_second = steps / self.seconds
        return {"steps_per_second": per_second, "processor_us": self.processor_us(steps)}

    def processors(self) -> float:
        """Return the mean number of processors in use."""
        return (processor_seconds() - self._processor) / self.seconds

    def processor_us(self, steps: int) -> float:
        """Return the microseconds of processor time per step."""
        return 1e6 * (processor_seconds() - self._processor) / max(1, steps)


def _tree_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, or 0 if the process has ended."""
    with contextlib.suppress(OSError):
        # Clock of another process on Linux (clock_getcpuclockid). /proc/PID/stat only counts in ticks of 10 ms.
        own = time.clock_gettime((~pid << 3) | 2)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return own + (int(fields[13]) + int(fields[14])) / TICK + sum(map(_tree_seconds, _children(pid)))
    return 0.0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, task.read_text().split())
    return found
