"""A long run with many checkpoints: no node needs more and more memory, threads or file descriptors."""

from __future__ import annotations

import importlib.metadata
import pathlib
from typing import NamedTuple

import psutil
import pytest

from rlframe.learners import Checkpointer
from tests.programs.running_program import RunningProgram

UPDATES = 20  # between two checkpoints
NODES = {"learner", "inferencer", "actor 0", "actor 1", "monitor"}
LONGEST = 900.0  # seconds; all of it took 6 minutes beside much other work


class Use(NamedTuple):
    """What a process holds."""

    megabytes: float  # of anonymous memory
    threads: int
    files: int


# From 60 to 360 checkpoints. The learner's memory grew by 8.9 MB in 16 arenas (set MALLOC_ARENA_MAX=16 to see it)
# and grows by 0.3 MB in one. Libraries start up to two threads late. Orbax 0.12 calls TensorStore's `to_json` for each
# array of a checkpoint, and that leaks the strings of its result: the learner grew by 3.6 MB (12 KB per checkpoint).
LEAKED = 4.0 if importlib.metadata.version("orbax-checkpoint") >= "0.12" else 0.0
ALLOWED = Use(megabytes=1.5 + LEAKED, threads=4, files=3)


def use_of(process: psutil.Process) -> Use:
    lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return Use(int(status["RssAnon"].split()[0]) / 1024, int(status["Threads"]), process.num_fds())


class Soak:
    """A running program that saves every `UPDATES` updates."""

    def __init__(self, program: RunningProgram) -> None:
        self._program = program
        self._checkpoints = Checkpointer(program.run_dir / "checkpoints")
        program.wait_until(lambda: program.nodes().keys() >= NODES)
        self._processes = {**program.nodes(), "launcher": psutil.Process(program.process.pid)}

    def wait_for_checkpoints(self, count: int) -> None:
        self._program.wait_until(lambda: self._written() >= count, LONGEST)

    def least_use(self, until: int) -> dict[str, Use]:
        """The least that each node holds until `until` checkpoints are written: a save holds more for a moment."""
        seen: dict[str, list[Use]] = {name: [] for name in self._processes}

        def look() -> bool:
            for name, process in self._processes.items():
                seen[name].append(use_of(process))
            return self._written() >= until

        self._program.wait_until(look, LONGEST)
        return {name: Use(*map(min, zip(*uses))) for name, uses in seen.items()}

    def _written(self) -> int:
        steps = self._checkpoints.steps()
        return steps[-1] // UPDATES if steps else 0


@pytest.mark.system
def test_no_node_grows_over_thousands_of_updates_and_hundreds_of_checkpoints(tmp_path):
    sizes = ["--min-replay-size", "500", "--update-period", "1", "--checkpoint-every", str(UPDATES)]
    run = ["--agent", "dqn", "--env", "CartPole-v1", "--steps", "10000000", "--eval-episodes", "0", *sizes]
    with RunningProgram(tmp_path / "run", *run, "--topology", "light_env") as program:
        soak = Soak(program)
        soak.wait_for_checkpoints(60)
        early = soak.least_use(until=90)
        soak.wait_for_checkpoints(360)
        late = soak.least_use(until=390)
    grown = {name: Use(*(b - a for a, b in zip(early[name], late[name]))) for name in early}
    print(early, late, grown, sep="\n")
    assert {name: use for name, use in grown.items() if any(g > a for g, a in zip(use, ALLOWED))} == {}
