"""Processor time: what a step takes of the cores, whoever else uses them.

It differs less from run to run than wall time does, and shows work that waiting hides.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int | None = None) -> float:
    """User and system time so far of a process, of its living descendants, and of those that they waited for.

    Args:
        pid: of another process; None: this one.
    """
    if pid is not None:
        return _of(pid)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_of, _children(os.getpid())))


class Stopwatch:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._processor = processor_seconds()
        self._wall = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.perf_counter() - self._wall

    def rate(self, steps: int) -> dict[str, float]:
        """Steps per second so far, and microseconds of a processor for each."""
        per_second = steps / self.seconds
        return {"steps_per_second": per_second, "processor_us": self.processor_us(steps)}

    def processors(self) -> float:
        """How many processors were in use, on average."""
        return (processor_seconds() - self._processor) / self.seconds

    def processor_us(self, steps: int) -> float:
        """Microseconds of a processor for each of so many steps."""
        return 1e6 * (processor_seconds() - self._processor) / max(1, steps)


def _of(pid: int) -> float:
    """Seconds of a process that may end meanwhile, and of its descendants."""
    with contextlib.suppress(OSError):
        # Linux's clock of another process (clock_getcpuclockid); its /proc/PID/stat counts in ticks of 10 ms.
        own = time.clock_gettime((~pid << 3) | 2)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return own + (int(fields[13]) + int(fields[14])) / TICK + sum(map(_of, _children(pid)))
    return 0.0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, task.read_text().split())
    return found
