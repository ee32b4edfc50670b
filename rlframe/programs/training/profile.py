"""The profile of a run in one process: the time of each part."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from rlframe.interprocess.files import NativePath
from rlframe.metrics.terminal import console, table

if TYPE_CHECKING:
    from rlframe.programs.training.loop import TrainingLoop


class Line(NamedTuple):
    """One part of the table."""

    name: str
    calls: int
    seconds: float
    microseconds_per_call: float
    share: float  # of the whole, 0 to 1


class Profile:
    """Times the calls between the objects of a run, and waits for each update before the next call.

    The first call of each part, which compiles, is counted on its own.

    Args:
        traces: write a trace of JAX (for TensorBoard or Perfetto) as well.
    """

    def __init__(self, traces: bool = False) -> None:
        self._traces = traces
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._compiling = 0.0
        self._total = 0.0

    @contextlib.contextmanager
    def measure(self, loop: TrainingLoop, trace_dir: pathlib.Path) -> Iterator[None]:
        """Time the calls between the parts of the run, until the context ends. A trace goes to `trace_dir`."""
        env = loop.pool
        self._clock(env, "step" if env.is_sync else "recv", "environment")
        if not env.is_sync:
            self._clock(env, "send", "environment")
        self._clock(loop.inferencer, "inference", "inference")
        self._clock(loop.replay_buffer, "add", "replay add")
        self._clock(loop.replay_buffer, "sample", "replay sample")
        self._clock(loop.learner, "step", "learner", wait=True)
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

    def lines(self) -> list[Line]:
        """Return the table, the largest part first; `rlframe` is the rest: the loop, the Actor, the logs."""
        rows = {**self._seconds, "compilation (first calls)": self._compiling}
        rows["rlframe (loop, actor, logs)"] = max(0.0, self._total - sum(rows.values()))
        calls = {**self._calls, "compilation (first calls)": len(self._calls)}
        calls["rlframe (loop, actor, logs)"] = self._calls.get("inference", 0)
        return [
            Line(name, calls[name], seconds, 1e6 * seconds / max(calls[name], 1), seconds / max(self._total, 1e-9))
            for name, seconds in sorted(rows.items(), key=lambda row: -row[1])
        ]

    def print(self) -> None:
        """Print the table for a person, on stderr."""
        rows = [
            (
                line.name,
                f"{line.calls:,}",
                f"{line.seconds:.2f}",
                f"{line.microseconds_per_call:.0f}",
                f"{line.share:.1%}",
            )
            for line in self.lines()
        ]
        columns = ("part", "calls", "seconds", "us per call", "share")
        console(sys.stderr).print(table(columns, rows, title="where the time went", right=True))

    def _clock(self, owner: Any, method: str, name: str, wait: bool = False) -> None:
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
