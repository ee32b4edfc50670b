"""The profile of a run in one process: a table with the time of each part."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from rlframe.interprocess.files import NativePath
from rlframe.metrics.terminal import console, table


class ProfileRow(NamedTuple):
    """A row of the profile's table: the calls and the time of one part of the run."""

    name: str
    calls: int
    seconds: float
    microseconds_per_call: float
    share: float  # share of the total time, 0 to 1


class Profile:
    """A profile of a run: the time of calls of the environments, the inferencer, the replay buffer and the learner.

    While the profile measures, each learner step waits until its update is complete. The first call of the inferencer
    and of the learner compiles a function, so its time is a separate row of the table.

    Args:
        traces: Also write a JAX trace, for TensorBoard or Perfetto.
    """

    def __init__(self, traces: bool = False) -> None:
        self._traces = traces
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._compiling = 0.0
        self._total = 0.0

    @contextlib.contextmanager
    def measure(self, driver: Any, trace_dir: pathlib.Path) -> Iterator[None]:
        """Measure the time of an `InlineDriver`'s calls until the context ends. `trace_dir` is for a JAX trace."""
        env = driver.pool
        self._time_calls(env, "step" if env.is_sync else "recv", "environment")
        if not env.is_sync:
            self._time_calls(env, "send", "environment")
        self._time_calls(driver.inferencer, "inference", "inference")
        self._time_calls(driver.replay_buffer, "add", "replay add")
        self._time_calls(driver.replay_buffer, "sample", "replay sample")
        self._time_calls(driver.learner, "step", "learner", wait=True)
        began, native = time.perf_counter(), None
        if self._traces:
            trace_dir.mkdir(parents=True, exist_ok=True)
            native = NativePath(os.fspath(trace_dir))
            jax.profiler.start_trace(native.path)
        try:
            yield
        finally:
            if native is not None:
                jax.profiler.stop_trace()
                native.close()
            self._total = time.perf_counter() - began

    def rows(self) -> list[ProfileRow]:
        """Return the rows of the table, largest time first. The row `rlframe` has the time of all other parts."""
        seconds_of = {**self._seconds, "compilation (first calls)": self._compiling}
        seconds_of["rlframe (loop, actor, logs)"] = max(0.0, self._total - sum(seconds_of.values()))
        calls = {**self._calls, "compilation (first calls)": len(self._calls)}
        calls["rlframe (loop, actor, logs)"] = self._calls.get("inference", 0)
        return [
            ProfileRow(
                name, calls[name], seconds, 1e6 * seconds / max(calls[name], 1), seconds / max(self._total, 1e-9)
            )
            for name, seconds in sorted(seconds_of.items(), key=lambda row: -row[1])
        ]

    def print(self) -> None:
        """Print the table to stderr."""
        rows = [
            (
                row.name,
                f"{row.calls:,}",
                f"{row.seconds:.2f}",
                f"{row.microseconds_per_call:.0f}",
                f"{row.share:.1%}",
            )
            for row in self.rows()
        ]
        columns = ("part", "calls", "seconds", "us per call", "share")
        console(sys.stderr).print(table(columns, rows, title="time of each part", right=True))

    def _time_calls(self, owner: Any, method: str, name: str, wait: bool = False) -> None:
        function: Callable[..., Any] = getattr(owner, method)
        self._seconds.setdefault(name, 0.0)
        self._calls.setdefault(name, 0)
        first = True

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if wait:
                jax.block_until_ready(result)
            seconds = time.perf_counter() - start
            if first and name in ("inference", "learner"):
                self._compiling += seconds
                first = False
            else:
                self._seconds[name] += seconds
                self._calls[name] += 1
            return result

        setattr(owner, method, timed)
