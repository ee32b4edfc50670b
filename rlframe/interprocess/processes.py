"""Which process is meant, and whether it is still there."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A process, told apart from a later one with the same number by when it started (clock ticks since boot)."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> ProcessId:
        """The process that has this number now."""
        return ProcessId(pid, _started(pid))

    @property
    def is_alive(self) -> bool:
        """Whether it runs (or is stopped, or sleeps): not where it ended, be it waited for or not."""
        return self.pid > 0 and self.started >= 0 and _started(self.pid) == self.started


def this_process() -> ProcessId:
    """This one."""
    return _known(os.getpid())


def process_of(pid: int) -> ProcessId:
    """The process that has this number now; `started` is -1 where none has, or what is left of one."""
    return ProcessId(pid, _started(pid))


@functools.lru_cache(maxsize=1)
def _known(pid: int) -> ProcessId:
    return ProcessId(pid, _started(pid))


def _started(pid: int) -> int:
    """When the process started; -1 where there is none, or what is left of one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the program's name, in parentheses; it may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
