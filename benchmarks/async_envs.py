"""The cost of waiting for the slowest environment: SyncEnv and AsyncEnv with the same workers and uneven step times.

    rlframe bench async_envs

A step only sleeps and uses no core, like a simulator on another machine or a device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from benchmarks.context import Context
from benchmarks.envs import BusyEnv, Contender, RowTarget, pool_rate, table
from benchmarks.report import Table
from rlframe.envs import AsyncEnv, SyncEnv

SIZE, WAIT_NUM = 16, 5
MILLISECONDS = 2.0


class SleepingEnv(BusyEnv):
    """An environment whose step sleeps for an exponentially distributed time. `milliseconds` is its mean."""

    def step(self, action: Any) -> Any:
        time.sleep(self.np_random.exponential(self.seconds))
        return self.observation, 0.0, False, False, {}


def rows(kind: str, workers: int) -> list[Contender]:
    """Return rows for both pools with the same number of workers."""
    make = functools.partial(SleepingEnv, MILLISECONDS)
    options: dict[str, Any] = {"type": kind, "num_workers": workers}
    return [
        ("AsyncEnv", lambda seconds: pool_rate(lambda: AsyncEnv(make, SIZE, WAIT_NUM, **options), seconds)),
        ("SyncEnv", lambda seconds: pool_rate(lambda: SyncEnv(make, SIZE, **options), seconds)),
    ]


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    tables = []
    # A worker steps its environments one after another, which averages their times. With fewer workers, less time is
    # lost.
    for kind, workers, least in (("thread", 16, 2.0), ("process", 16, 1.5), ("process", 4, 1.2)):
        ideal = workers * 1000.0 / MILLISECONDS
        title = f"{SIZE} environments of {MILLISECONDS:g} ms on average, {workers} workers ({kind}); ideal {ideal:,.0f}"
        tables.append(table(title, rows(kind, workers), context, log, RowTarget("AsyncEnv", {"SyncEnv": least})))
    return tables
