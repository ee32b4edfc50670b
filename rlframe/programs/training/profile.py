"""The profile of a run in one process: a table with the time of each part."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from rlframe.interprocess.files import NativePath
from rlframe.metrics.terminal import console, table
from rlframe.types import ReplaySpec

# Names of the parts in the table.
ENVIRONMENT, INFERENCE, ADD, SAMPLE, LEARNER = "environment", "inference", "replay add", "replay sample", "learner"
COMPILATION, LOOP = "compilation (first calls)", "rlframe (loop, actor, logs)"


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

    Attributes:
        spec: Spec of the replay of the run. None before the measurement.
    """

    spec: ReplaySpec | None = None

    def __init__(self, traces: bool = False) -> None:
        self._traces = traces
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._compiling = 0.0
        self._total = 0.0

    @contextlib.contextmanager
    def measure(self, driver: Any, trace_dir: pathlib.Path) -> Iterator[None]:
        """Measure the time of an `InlineDriver`'s calls until the context ends. `trace_dir` is for a JAX trace."""
        env, self.spec = driver.pool, driver.spec
        self._time_calls(env, "step" if env.is_sync else "recv", ENVIRONMENT)
        if not env.is_sync:
            self._time_calls(env, "send", ENVIRONMENT)
        self._time_calls(driver.inferencer, "inference", INFERENCE)
        self._time_calls(driver.replay_buffer, "add", ADD)
        self._time_calls(driver.replay_buffer, "sample", SAMPLE)
        self._time_calls(driver.learner, "step", LEARNER, wait=True)
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
        seconds_of = {**self._seconds, COMPILATION: self._compiling}
        seconds_of[LOOP] = max(0.0, self._total - sum(seconds_of.values()))
        calls = {**self._calls, COMPILATION: len(self._calls)}
        calls[LOOP] = self._calls.get(INFERENCE, 0)
        return [
            ProfileRow(
                name, calls[name], seconds, 1e6 * seconds / max(calls[name], 1), seconds / max(self._total, 1e-9)
            )
            for name, seconds in sorted(seconds_of.items(), key=lambda row: -row[1])
        ]

    def print(self, advice: Iterable[str] = ()) -> None:
        """Print the table and lines of advice to stderr."""
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
        for line in advice:
            print(line, file=sys.stderr)

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
            if first and name in (INFERENCE, LEARNER):
                self._compiling += seconds
                first = False
            else:
                self._seconds[name] += seconds
                self._calls[name] += 1
            return result

        setattr(owner, method, timed)
