"""Nodes of real programs are killed (SIGKILL), come back with what they had saved, and the program ends well."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
import pytest

from tests.extras import needs

needs("launchpad")

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE = 200.0  # seconds for anything that a test waits for


class Said(NamedTuple):
    """A line of the learner's."""

    pid: int
    what: str
    steps: int
    version: int
    added: int


class Program:
    """A program of tests/programs/recovery_program.py under way."""

    def __init__(self, topology: str, directory: pathlib.Path, steps: int) -> None:
        cache = {"JAX_COMPILATION_CACHE_DIR": str(directory / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.recovery_program", topology, str(directory), str(steps)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **cache},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._pids: set[int] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    @property
    def said(self) -> list[Said]:
        found = re.findall(r"learner (\d+) (begins|is|ends) at: (\d+) (\d+) (\d+)\n", self.output)
        return [Said(int(pid), what, *map(int, numbers)) for pid, what, *numbers in found]

    def saved(self, what: str) -> set[str]:
        """The complete checkpoints of the learner ("checkpoints") or of the Reverb server ("replay")."""
        paths = (self.directory / what).glob("*" if what == "checkpoints" else "*/DONE")
        return {str(path) for path in paths if path.name.isdigit() or path.name == "DONE"}

    def node(self, name: str) -> psutil.Process:
        """The process of a node, by its title."""
        children = psutil.Process(self.process.pid).children()
        self._pids |= {child.pid for child in children}
        (found,) = [child for child in children if child.cmdline()[0].startswith(f"rlframe: {name}")]
        return found

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait_for_new_checkpoint(self, what: str) -> None:
        before = self.saved(what)
        self.wait_for(lambda: self.saved(what) - before)

    def end(self) -> int:
        """Waits for its end, after which none of its processes may be there."""
        code = self.process.wait(DEADLINE)
        self._reader.join(10.0)
        assert not any(psutil.pid_exists(pid) for pid in self._pids), self.output
        return code


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(topology: str, steps: int) -> Program:
        started.append(Program(topology, tmp_path, steps))
        return started[-1]

    yield start
    for program in started:
        program.process.send_signal(signal.SIGTERM)
        program.process.wait(20.0)


def kill_learner(program: Program, life: int) -> None:
    """Kills the learner's process once it has saved what it did in this life of its own."""
    program.wait_for(lambda: [said.what for said in program.said].count("begins") == life)
    program.wait_for(lambda: program.said[-1].what == "is")
    program.wait_for_new_checkpoint("checkpoints")
    program.node("learner").kill()


def assert_learner_went_on(program: Program, lives: int, steps: int) -> None:
    assert (program.end(), "launched: None" in program.output) == (0, True), program.output
    begins = [i for i, said in enumerate(program.said) if said.what == "begins"]
    assert len(begins) == lives
    for i in begins[1:]:
        before, after = program.said[:i], program.said[i]
        assert after.version > max(said.version for said in before)
        assert 0 < after.steps < before[-1].steps + 100
    assert program.said[-1][1:3] == ("ends", steps)
    assert "[actor/0] was killed" not in program.output and "failed with" not in program.output


@pytest.mark.system
def test_a_killed_learner_goes_on_from_its_checkpoint_and_versions_rise(start: Callable[..., Program]):
    program = start("heavy_env", 2000)
    kill_learner(program, 1)
    assert_learner_went_on(program, 2, 2000)
    assert "[learner] was killed by SIGKILL: restart 1 of 2" in program.output


@pytest.mark.system
def test_a_learner_may_be_killed_again(start: Callable[..., Program]):
    program = start("heavy_env", 4000)
    for life in (1, 2):
        kill_learner(program, life)
    assert_learner_went_on(program, 3, 4000)


@pytest.mark.system
def test_a_learner_that_is_killed_too_often_ends_the_program(start: Callable[..., Program]):
    program = start("heavy_env", 100_000)
    for life in (1, 2, 3):
        kill_learner(program, life)
    assert program.end() == 1
    assert "failed: The node learner was killed by SIGKILL (and 2 times before)" in program.output


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
def test_a_program_that_is_started_again_goes_on(start: Callable[..., Program], topology: str):
    first = start(topology, 100)
    assert first.end() == 0, first.output
    again = start(topology, 160)
    assert again.end() == 0, again.output
    begins, ends = again.said[0], again.said[-1]
    assert begins[1:4] == ("begins", 100, 101)  # it ended well: not one version is skipped
    assert ends[1:4] == ("ends", 160, 161)
    assert ends.added > first.said[-1].added  # the replay has gone on, too
    assert "restart" not in again.output


@pytest.mark.system
def test_a_killed_reverb_server_goes_on_from_its_checkpoint(start: Callable[..., Program]):
    program = start("distributed", 300)
    program.wait_for(lambda: program.said and program.said[-1].added >= 200)
    count, added = len(program.said), program.said[-1].added
    for _ in range(2):  # the first may have been begun before
        program.wait_for_new_checkpoint("replay")
    program.node("replay").kill()
    assert program.end() == 0, program.output
    assert "[replay] was killed by SIGKILL: restart 1 of 2" in program.output
    assert program.said[-1][1:3] == ("ends", 300) and program.said[-1].version == 301
    assert min(said.added for said in program.said[count:]) >= added
    assert program.output.count("was killed") == 1 and "failed with" not in program.output
