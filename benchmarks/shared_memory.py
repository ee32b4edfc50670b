"""The replay buffer in shared memory, beside the one in this process.

Another process adds to it; it is the one that measures inserts, and goes on at full speed while this one samples.
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
from benchmarks.replay import Ours, steps
from benchmarks.replay_peers import BATCH, CARTPOLE, ENVS, GAMMA, PONG, Taken, measure
from benchmarks.report import Row, Table
from rlframe.replay import SharedMemReplayBuffer
from rlframe.types import ReplaySpec, StepSpec, Transition, specs

WANTED = 0.85  # of the in-process buffer's speed
WORKLOADS = {"cartpole": (CARTPOLE, 1), "cartpole 3-step": (CARTPOLE, 3), "pong": (PONG, 1)}
_ROOT = Path(__file__).parents[1]


def shared(workload: Any, n_step: int, seconds: float) -> tuple[Taken, Taken]:
    """(what is taken by an insert of 64 in another process, of a sample of 256 here while that one goes on)."""
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
        insert = Taken(*json.loads(writer.stdout.readline()))
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
    """The other process: fills the buffer that it reads from stdin, says what an insert takes, goes on to the end."""
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


def run(context: Context, say: Callable[[str], None] = print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    seconds = 0.05 if context.quick else 0.4
    best: dict[str, list[Taken]] = {}
    for turn in range(context.repeats):
        say(f"shared_memory: turn {turn + 1} of {context.repeats}")
        for name, (workload, n_step) in WORKLOADS.items():
            ours = Ours(workload, n_step=n_step)
            local = [measure(ours.insert, seconds), measure(ours.sample, seconds)]
            values = [*shared(workload, n_step, seconds), *local]
            best[name] = [Taken(*map(min, zip(*pair))) for pair in zip(values, best.get(name, values))]
    tables = []
    for name, (insert, sample, local_insert, local_sample) in best.items():
        for what, value, other in [
            (f"{name}: insert 64 from another process", insert, local_insert),
            (f"{name}: sample 256 with a writer at full speed", sample, local_sample),
        ]:
            ours = Row("shared memory", value.least, processor=value.processor)
            rows = (Row("in this process, alone", other.least, WANTED),)
            tables.append(Table(what, "microseconds", ours, rows, higher_is_better=False))
    return tables


if __name__ == "__main__":
    write()
