"""A long run with many checkpoints does not leak memory, threads or file descriptors."""

from __future__ import annotations

import importlib.metadata
import pathlib
from typing import NamedTuple

import psutil
import pytest

from rlframe.learners import Checkpointer
from tests.programs.running_program import RunningProgram

UPDATES = 20  # updates between two checkpoints
NODES = {"learner", "inferencer", "actor 0", "actor 1", "monitor"}
TIMEOUT = 900.0  # maximum seconds of the test, which needed 6 minutes on a busy machine


class ResourceUse(NamedTuple):
    """Memory, threads and file descriptors that a process uses."""

    megabytes: float  # anonymous memory, in MB
    threads: int
    files: int


# Maximum growth between checkpoints 150 and 450. The learner's memory grew by 8.9 MB with MALLOC_ARENA_MAX=16, and by
# 0.5 MB with one malloc arena. Libraries can start two threads late. Orbax 0.12 calls TensorStore's `to_json` for each
# array of a checkpoint. This call leaks its result, so the learner's memory grew by 3.6 MB (12 KB per checkpoint).
LEAKED = 4.0 if importlib.metadata.version("orbax-checkpoint") >= "0.12" else 0.0
ALLOWED = ResourceUse(megabytes=1.5 + LEAKED, threads=4, files=3)


def measure(process: psutil.Process) -> ResourceUse:
    lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return ResourceUse(int(status["RssAnon"].split()[0]) / 1024, int(status["Threads"]), process.num_fds())


class LongRun:
    """A running program that saves a checkpoint every `UPDATES` updates."""

    def __init__(self, program: RunningProgram) -> None:
        self._program = program
        self._checkpoints = Checkpointer(program.run_dir / "checkpoints")
        program.wait_until(lambda: program.nodes().keys() >= NODES)
        self._processes = {**program.nodes(), "launcher": psutil.Process(program.process.pid)}

    def wait_for_checkpoints(self, count: int) -> None:
        self._program.wait_until(lambda: self._written() >= count, TIMEOUT)

    def min_use(self, until: int) -> dict[str, ResourceUse]:
        """Measure until `until` checkpoints were written. Return each node's minimum, because a save needs memory."""
        seen: dict[str, list[ResourceUse]] = {name: [] for name in self._processes}

        def measure_all() -> bool:
            for name, process in self._processes.items():
                seen[name].append(measure(process))
            return self._written() >= until

        self._program.wait_until(measure_all, TIMEOUT)
        return {name: ResourceUse(*map(min, zip(*uses))) for name, uses in seen.items()}

    def _written(self) -> int:
        steps = self._checkpoints.steps()
        return steps[-1] // UPDATES if steps else 0


@pytest.mark.system
def test_memory_threads_and_files_do_not_grow_in_a_long_run(tmp_path):
    sizes = ["--min-replay-size", "500", "--update-period", "1", "--checkpoint-every", str(UPDATES)]
    run = ["--agent", "dqn", "--env", "CartPole-v1", "--steps", "10000000", "--eval-episodes", "0", *sizes]
    with RunningProgram(tmp_path / "run", *run, "--topology", "light_env") as program:
        long_run = LongRun(program)
        long_run.wait_for_checkpoints(150)  # the learner's memory grows by 2 MB in the first 3,000 updates
        early = long_run.min_use(until=180)
        long_run.wait_for_checkpoints(450)
        late = long_run.min_use(until=480)
    grown = {name: ResourceUse(*(b - a for a, b in zip(early[name], late[name]))) for name in early}
    print(early, late, grown, sep="\n")
    assert {name: use for name, use in grown.items() if any(g > a for g, a in zip(use, ALLOWED))} == {}
