"""The replay buffer in shared memory compared with the in-process buffer.

Another process adds to the buffer. It measures inserts, and then continues at full speed while this process samples.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.context import Context
from benchmarks.replay import FilledReplay, steps
from benchmarks.replay_peers import BATCH, CARTPOLE, ENVS, GAMMA, PONG, CallTimes, measure
from benchmarks.report import Row, Table
from rlframe.replay import SharedMemReplayBuffer
from rlframe.types import ReplaySpec, StepSpec, Transition, specs

TARGET = 0.85  # minimum fraction of the in-process buffer's speed
WORKLOADS = {"cartpole": (CARTPOLE, 1), "cartpole 3-step": (CARTPOLE, 3), "pong": (PONG, 1)}
_ROOT = Path(__file__).parents[1]


def shared(workload: Any, n_step: int, seconds: float) -> tuple[CallTimes, CallTimes]:
    """Return (times of an insert of 64 in another process, times of a concurrent sample of 256 in this process)."""
    shape, dtype, capacity = workload
    spec = StepSpec(specs.Array(shape, dtype), specs.DiscreteArray(2, dtype="int32"), {}, ())
    replay_spec = ReplaySpec("uniform", Transition(n_step, GAMMA), BATCH, capacity)
    buffer = SharedMemReplayBuffer(types.SimpleNamespace(replay_spec=replay_spec, step_spec=spec))
    command = [sys.executable, "-m", "benchmarks.shared_memory"]
    writer = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert writer.stdin is not None and writer.stdout is not None
        writer.stdin.write(pickle.dumps((buffer, workload, seconds)))
        writer.stdin.close()
        insert = CallTimes(*json.loads(writer.stdout.readline()))
        buffer.sample()
        sample = measure(buffer.sample, seconds)
        buffer.close()
        writer.wait(10.0)
        return insert, sample
    finally:
        writer.kill()
        writer.wait()
        buffer.close()


def write() -> None:
    """Fill the buffer received on stdin, print the times of an insert, and continue until the buffer is closed."""
    buffer, (shape, dtype, capacity), seconds = pickle.load(sys.stdin.buffer)
    buffer.claim_rank(ENVS)
    ids, all_steps = steps(shape, dtype, 50, end=0.02 if len(shape) == 1 else 0.0)
    t = 0

    def insert() -> None:
        nonlocal t
        buffer.add(ids, all_steps[t])
        t = (t + 1) % len(all_steps)

    for _ in range(2 * capacity // ENVS):
        insert()
    print(json.dumps(measure(insert, seconds)), flush=True)
    while not buffer.closed:
        insert()


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    seconds = 0.05 if context.quick else 0.4
    best: dict[str, list[CallTimes]] = {}
    for turn in range(context.repeats):
        log(f"shared_memory: turn {turn + 1} of {context.repeats}")
        for name, (workload, n_step) in WORKLOADS.items():
            ours = FilledReplay(workload, n_step=n_step)
            local = [measure(ours.insert, seconds), measure(ours.sample, seconds)]
            values = [*shared(workload, n_step, seconds), *local]
            best[name] = [CallTimes(*map(min, zip(*pair))) for pair in zip(values, best.get(name, values))]
    tables = []
    for name, (insert, sample, local_insert, local_sample) in best.items():
        for title, value, other in [
            (f"{name}: insert 64 from another process", insert, local_insert),
            (f"{name}: sample 256 with a writer at full speed", sample, local_sample),
        ]:
            ours = Row("shared memory", value.least, processor=value.processor)
            rows = (Row("in this process, alone", other.least, TARGET),)
            tables.append(Table(title, "microseconds", ours, rows, higher_is_better=False))
    return tables


if __name__ == "__main__":
    write()
