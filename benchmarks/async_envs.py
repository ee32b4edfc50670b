"""What it costs to wait for the slowest environment: SyncEnv and AsyncEnv over the same workers, with uneven steps.

    rlframe bench async_envs

A step only sleeps, so it takes no core from the others: this is a simulator on another machine, or a device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from benchmarks.context import Context
from benchmarks.envs import BusyEnv, Contender, Wanted, ours, table
from benchmarks.report import Table
from rlframe.envs import AsyncEnv, SyncEnv

SIZE, WAIT_NUM = 16, 5
MILLISECONDS = 2.0


class SleepingEnv(BusyEnv):
    """Sleeps with each step, for an exponentially distributed time with a mean of so many milliseconds."""

    def step(self, action: Any) -> Any:
        time.sleep(self.np_random.exponential(self.seconds))
        return self.observation, 0.0, False, False, {}


def rows(kind: str, workers: int) -> list[Contender]:
    """Both pools over as many workers."""
    make = functools.partial(SleepingEnv, MILLISECONDS)
    options: dict[str, Any] = {"type": kind, "num_workers": workers}
    return [
        ("AsyncEnv", lambda seconds: ours(lambda: AsyncEnv(make, SIZE, WAIT_NUM, **options), seconds)),
        ("SyncEnv", lambda seconds: ours(lambda: SyncEnv(make, SIZE, **options), seconds)),
    ]


def run(context: Context, say: Callable[[str], None] = print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    tables = []
    # A worker steps its share one environment after another, which evens the steps out: the fewer, the less is lost.
    for kind, workers, least in (("thread", 16, 2.0), ("process", 16, 1.5), ("process", 4, 1.2)):
        ideal = workers * 1000.0 / MILLISECONDS
        title = f"{SIZE} environments of {MILLISECONDS:g} ms on average, {workers} workers ({kind}); ideal {ideal:,.0f}"
        tables.append(table(title, rows(kind, workers), context, say, Wanted("AsyncEnv", {"SyncEnv": least})))
    return tables
