"""Replay buffers compared with a bare numpy ring as the lower limit, and with other libraries.

    python -m benchmarks.replay [--peers-python PATH] [--rounds N]

`--peers-python` is an interpreter that has Stable-Baselines3, cpprb or flashbax. All are measured in one run in
alternating turns, because the speed of a shared machine changes every minute. The minimum time counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.context import Context
from benchmarks.replay_peers import BATCH, CARTPOLE, ENVS, GAMMA, PEERS, PONG, data, measure
from benchmarks.report import Row, Table
from rlframe.replay import ReplayBuffer
from rlframe.types import AgentOutput, ReplaySpec, Step, StepSpec, TimeStep, Transition, global_env_ids, specs

# Maximum microseconds of a row, and its minimum speed as a multiple of the numpy ring's.
LIMITS = {"cartpole insert 64": 10.0, "cartpole sample 256, 1-step": 25.0, "cartpole sample 256, 3-step": 80.0}
FLOORS = {"pong insert 64": 1 / 1.2, "pong sample 256, 1-step": 1 / 1.2}
FLOOR, FRAMES = "a ring of numpy arrays", "rlframe, single frames"


class NumpyRing:
    """A ring of raw arrays without items, episodes or checks: the lower limit for code in numpy."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, capacity: int):
        fields = data(shape, dtype)
        self._batch = [fields[key] for key in ("obs", "act", "rew", "done")]
        # 50 different observations, so that they do not stay in the cache, as with a real environment.
        self._observations = [self._batch[0].copy() for _ in range(50)]
        self._size = capacity // ENVS * ENVS
        self._arrays = [np.zeros((self._size, *a.shape[1:]), a.dtype) for a in self._batch]
        for a in self._arrays:
            a[:] = 1  # touch the memory, as in a full buffer
        self._at, self._rng = 0, np.random.default_rng(0)
        self._out = [np.empty((BATCH, *a.shape[1:]), a.dtype) for a in [*self._arrays, self._arrays[0]]]

    def insert(self) -> None:
        """Write 64 steps."""
        at = self._at
        self._batch[0] = self._observations[at // ENVS % 50]
        for array, values in zip(self._arrays, self._batch):
            array[at : at + ENVS] = values
        self._at = (at + ENVS) % self._size

    def sample(self) -> list[np.ndarray]:
        """Copy 256 one-step transitions into preallocated arrays."""
        index = self._rng.integers(0, self._size - ENVS, BATCH)
        for array, out in zip(self._arrays, self._out):
            array.take(index, axis=0, out=out, mode="clip")
        self._arrays[0].take(index + ENVS, axis=0, out=self._out[-1], mode="clip")
        return self._out


def steps(shape: tuple[int, ...], dtype: Any, count: int, end: float) -> tuple[np.ndarray, list[Step]]:
    """Return a cycle of `count` steps of 64 environments. Each stack of frames continues the previous stack."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (count + shape[0], ENVS, *shape[1:])).astype(dtype)
    out, step_type = [], np.zeros(ENVS, np.uint8)

    def observe(t: int) -> np.ndarray:
        if dtype == np.uint8:
            return np.ascontiguousarray(np.stack([frames[(t + j) % count] for j in range(shape[0])], axis=1))
        return rng.standard_normal((ENVS, *shape)).astype(dtype)

    observation = observe(0)
    for t in range(count):
        following = np.where(step_type == 2, 0, np.where(rng.random(ENVS) < end, 2, 1)).astype(np.uint8)
        following = np.zeros(ENVS, np.uint8) if t == count - 1 else following
        reward, discount = rng.standard_normal(ENVS).astype(np.float32), np.ones(ENVS, np.float32)
        after = TimeStep(following, reward, discount, observe(t + 1))
        output = AgentOutput(rng.integers(0, 2, ENVS).astype(np.int32))
        out.append(Step(TimeStep(step_type, reward, discount, observation), output, (), t, after))
        step_type, observation = following, after.observation
    return global_env_ids(0, np.arange(ENVS)), out


class FilledReplay:
    """A full `ReplayBuffer` with the operations to measure."""

    def __init__(
        self, workload: Any, kind: str = "uniform", n_step: int = 1, single_frame: bool = False, count: int = 50
    ):
        shape, dtype, capacity = workload
        spec = StepSpec(specs.Array(shape, dtype), specs.DiscreteArray(2, dtype=np.int32), {}, ())
        agent = types.SimpleNamespace(
            replay_spec=ReplaySpec(kind, Transition(n_step, GAMMA), BATCH, capacity), step_spec=spec
        )
        self.buffer = ReplayBuffer(agent, single_frame=single_frame)
        self.buffer.claim_rank(ENVS)
        self._ids, self._steps = steps(shape, dtype, count, end=0.02 if dtype != np.uint8 else 0.0)
        self._t = 0
        for _ in range(2 * capacity // ENVS):
            self.insert()
        self._priorities = np.random.default_rng(0).random(BATCH)

    def insert(self) -> None:
        """Add 64 steps."""
        self.buffer.add(self._ids, self._steps[self._t])
        self._t = (self._t + 1) % len(self._steps)

    def sample(self) -> Any:
        """Sample 256 items."""
        return self.buffer.sample()

    def cycle(self) -> None:
        """Sample 256 items and update their priorities."""
        self.buffer.update_priorities(self.buffer.sample().keys, self._priorities)


def contenders() -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the calls to measure, by row and contender."""
    floor, pong_floor = NumpyRing(*CARTPOLE), NumpyRing(*PONG)
    one, three, prioritized = (
        FilledReplay(CARTPOLE),
        FilledReplay(CARTPOLE, n_step=3),
        FilledReplay(CARTPOLE, "prioritized"),
    )
    whole, frames = FilledReplay(PONG), FilledReplay(PONG, single_frame=True)
    return {
        "cartpole insert 64": {FLOOR: floor.insert, "rlframe": one.insert},
        "cartpole insert 64, 3-step": {"rlframe": three.insert},
        "cartpole sample 256, 1-step": {FLOOR: floor.sample, "rlframe": one.sample},
        "cartpole sample 256, 3-step": {"rlframe": three.sample},
        "cartpole insert 64, prioritized": {"rlframe": prioritized.insert},
        "cartpole sample + update 256, prioritized": {"rlframe": prioritized.cycle},
        "pong insert 64": {
            FLOOR: pong_floor.insert,
            "rlframe": whole.insert,
            FRAMES: frames.insert,
        },
        "pong sample 256, 1-step": {
            FLOOR: pong_floor.sample,
            "rlframe": whole.sample,
            FRAMES: frames.sample,
        },
    }


def peers(python: Path | str, log: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Measure the peers that `python` has, and log the missing ones."""
    command = [str(python), str(Path(__file__).with_name("replay_peers.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    for line in done.stderr.splitlines():
        if "is left out" in line:
            log(line)
    if done.returncode:
        log(f"The peers could not be measured: {done.stderr.strip().splitlines()[-1]}")
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    rows, seconds = contenders(), 0.05 if context.quick else 0.4
    best: dict[str, dict[str, float]] = {row: {} for row in rows}
    spent: dict[str, dict[str, float]] = {row: {} for row in rows}
    for turn in range(context.repeats):
        log(f"replay: turn {turn + 1} of {context.repeats}")
        for row, calls in rows.items():
            for name, call in calls.items():
                if name == FLOOR and context.only_ours:
                    continue
                taken = measure(call, seconds)
                best[row][name] = min(taken.least, best[row].get(name, taken.least))
                spent[row][name] = min(taken.processor, spent[row].get(name, taken.processor))
        if context.peers_python is not None:
            for row, values in peers(context.peers_python, log).items():
                for name, value in values.items():
                    best[row][name] = min(value, best[row].get(name, value))
    return [_table(row, values, spent[row]) for row, values in best.items()]


def _table(row: str, values: dict[str, float], spent: dict[str, float]) -> Table:
    others = []
    if FLOOR in values:
        others.append(Row(FLOOR, values[FLOOR], FLOORS.get(row)))
    if FRAMES in values:
        others.append(Row(FRAMES, values[FRAMES], None, "a quarter of the memory", spent[FRAMES]))
    others += [Row(name, values.get(name), 1.0, "" if name in values else "not measured") for name in PEERS]
    ours = Row("rlframe", values["rlframe"], LIMITS.get(row), processor=spent["rlframe"])
    return Table(row, "microseconds", ours, tuple(others), higher_is_better=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", type=Path, help=f"a Python with {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    arguments = parser.parse_args()
    print(*run(Context(peers_python=arguments.peers_python, repeats=arguments.rounds)), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
