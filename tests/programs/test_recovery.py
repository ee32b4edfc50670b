"""Killed nodes of real programs restart from their checkpoints, and the program completes."""

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
DEADLINE = 200.0  # maximum seconds of each wait of a test


class Report(NamedTuple):
    """The numbers in a line that the learner prints."""

    pid: int
    event: str
    steps: int
    version: int
    added: int


class Program:
    """A process that runs tests/programs/recovery_program.py."""

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
    def reports(self) -> list[Report]:
        found = re.findall(r"learner (\d+) (begins|is|ends) at: (\d+) (\d+) (\d+)\n", self.output)
        return [Report(int(pid), event, *map(int, numbers)) for pid, event, *numbers in found]

    def saved(self, folder: str) -> set[str]:
        """Return the paths of complete checkpoints: "checkpoints" are the learner's, "replay" the Reverb server's."""
        paths = (self.directory / folder).glob("*" if folder == "checkpoints" else "*/DONE")
        return {str(path) for path in paths if path.name.isdigit() or path.name == "DONE"}

    def node(self, name: str) -> psutil.Process:
        """Find the process of a node by its title, which contains the name of the node."""
        children = psutil.Process(self.process.pid).children()
        self._pids |= {child.pid for child in children}
        (found,) = [child for child in children if child.cmdline()[0].startswith(f"rlframe: {name}")]
        return found

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait_for_new_checkpoint(self, folder: str) -> None:
        before = self.saved(folder)
        self.wait_for(lambda: self.saved(folder) - before)

    def end(self) -> int:
        """Wait until the program exits, check that no process remains, and return the exit code."""
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


def kill_learner(program: Program, start_number: int) -> None:
    """Wait until the learner has started `start_number` times, made updates and saved a checkpoint. Then kill it."""
    program.wait_for(lambda: [report.event for report in program.reports].count("begins") == start_number)
    program.wait_for(lambda: program.reports[-1].event == "is")
    program.wait_for_new_checkpoint("checkpoints")
    program.node("learner").kill()


def assert_learner_continued(program: Program, num_starts: int, steps: int) -> None:
    assert (program.end(), "launched: None" in program.output) == (0, True), program.output
    begins = [i for i, report in enumerate(program.reports) if report.event == "begins"]
    assert len(begins) == num_starts
    for i in begins[1:]:
        before, after = program.reports[:i], program.reports[i]
        assert after.version > max(report.version for report in before)
        assert 0 < after.steps < before[-1].steps + 100
    assert program.reports[-1][1:3] == ("ends", steps)
    assert "[actor/0] was killed" not in program.output and "failed with" not in program.output


@pytest.mark.system
def test_killed_learner_continues_from_its_checkpoint_with_higher_versions(start: Callable[..., Program]):
    program = start("heavy_env", 2000)
    kill_learner(program, 1)
    assert_learner_continued(program, 2, 2000)
    assert "[learner] was killed by SIGKILL: restart 1 of 2" in program.output


@pytest.mark.system
def test_learner_that_is_killed_twice_continues_from_its_checkpoints(start: Callable[..., Program]):
    program = start("heavy_env", 4000)
    for start_number in (1, 2):
        kill_learner(program, start_number)
    assert_learner_continued(program, 3, 4000)


@pytest.mark.system
def test_program_ends_if_its_learner_is_killed_after_max_restarts(start: Callable[..., Program]):
    program = start("heavy_env", 100_000)
    for start_number in (1, 2, 3):
        kill_learner(program, start_number)
    assert program.end() == 1
    assert "failed: The node learner was killed by SIGKILL (and 2 times before)" in program.output


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
def test_program_continues_after_a_complete_restart(start: Callable[..., Program], topology: str):
    first = start(topology, 100)
    assert first.end() == 0, first.output
    again = start(topology, 160)
    assert again.end() == 0, again.output
    begins, ends = again.reports[0], again.reports[-1]
    assert begins[1:4] == ("begins", 100, 101)  # after a normal end, version numbers have no gap
    assert ends[1:4] == ("ends", 160, 161)
    assert ends.added > first.reports[-1].added  # the replay buffer was restored too
    assert "restart" not in again.output


@pytest.mark.system
def test_killed_reverb_server_continues_from_its_checkpoint(start: Callable[..., Program]):
    program = start("distributed", 300)
    program.wait_for(lambda: program.reports and program.reports[-1].added >= 200)
    count, added = len(program.reports), program.reports[-1].added
    for _ in range(2):  # the first one can be incomplete, because it can have started earlier
        program.wait_for_new_checkpoint("replay")
    program.node("replay").kill()
    assert program.end() == 0, program.output
    assert "[replay] was killed by SIGKILL: restart 1 of 2" in program.output
    assert program.reports[-1][1:3] == ("ends", 300) and program.reports[-1].version == 301
    assert min(report.added for report in program.reports[count:]) >= added
    assert program.output.count("was killed") == 1 and "failed with" not in program.output
