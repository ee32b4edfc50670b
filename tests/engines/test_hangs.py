"""The supervisor kills processes that hang, but not processes that only seem to hang. The processes are real."""

from __future__ import annotations

import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from rlframe.engines.group_rules import GroupRules
from rlframe.engines.logs import NodeLogs
from rlframe.engines.supervision.nodes import StartableProcess
from rlframe.engines.supervision.supervisor import Backoff, ProgramSupervisor
from rlframe.errors import ProgramError
from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).parents[2]
BEATS = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from rlframe.interprocess import heartbeat
from rlframe.interprocess.heartbeat import Phase
heartbeat.begin()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
"""
SERVES = BEATS + "print('up', os.getpid(), flush=True)\nwhile True: time.sleep(0.1)"


def node(name: str, code: str, **options: Any) -> StartableProcess:
    return StartableProcess(name, [sys.executable, "-S", "-c", textwrap.dedent(code)], GroupRules(**options))


class Program:
    """Runs nodes under a supervisor inside a `with` block. Checks at the end that no node's process remains."""

    def __init__(self, *nodes: StartableProcess, hang_timeout: float, healthy: float = 900.0) -> None:
        self._output = io.StringIO()
        self.supervisor = ProgramSupervisor(
            nodes, NodeLogs(None, self._output), hang_timeout=hang_timeout, backoff=Backoff(0.01, healthy=healthy)
        )
        self.failure: ProgramError | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except ProgramError as error:
            self.failure = error

    def __enter__(self) -> Program:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.supervisor.stop()
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        assert not [pid for pid in self.pids() if psutil.pid_exists(pid)]

    @property
    def output(self) -> str:
        return self._output.getvalue()

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"up (\d+)", self.output)]

    def wait_for(self, condition: Callable[[], Any]) -> None:
        wait_until(condition, lambda: self.output)

    def wait_for_end(self) -> None:
        self._thread.join(60.0)
        assert not self._thread.is_alive(), self.output


@pytest.mark.system
def test_suspended_node_is_killed_and_uses_up_a_restart():
    with Program(node("actor/1", SERVES, max_restarts=1), hang_timeout=3.0) as program:
        for starts in (1, 2):
            program.wait_for(lambda starts=starts: len(program.pids()) == starts)
            os.kill(program.pids()[-1], signal.SIGSTOP)
        program.wait_for_end()
        assert re.search(r"\[actor/1\] hung: no heartbeat for \d+ s, and was killed: restart 1 of 1 in", program.output)
        assert program.failure is not None
        assert re.match(
            r"The node actor/1 hung: no heartbeat for \d+ s, and was killed \(and 1 time before\)",
            str(program.failure),
        )


def test_node_is_killed_if_a_c_call_holds_the_gil():
    held = SERVES.replace("while True", "import ctypes; ctypes.PyDLL(None).sleep(60)\nwhile True")
    with Program(node("actor", held), hang_timeout=1.0) as program:
        program.wait_for_end()
    assert "The node actor hung: no heartbeat for " in str(program.failure)


def test_node_without_progress_is_killed_and_its_traceback_is_reported():
    hangs = "print('up', os.getpid(), flush=True)\ndef spin():\n  while True: time.sleep(0.1)\n"
    hangs = BEATS + hangs + "with Phase('stepping', 2.0): spin()"
    with Program(node("actor", hangs), hang_timeout=30.0) as program:
        program.wait_for_end()
    message = str(program.failure)
    assert re.match(r"The node actor hung: in phase stepping for \d+ s, allowed 2 s, and was killed\.", message)
    assert "Traceback" in message and "in spin" in message


@pytest.mark.system
def test_program_fails_if_a_node_hangs_after_each_restart():
    hangs = BEATS + "with Phase('computing', 3.5): time.sleep(600)"
    with Program(node("learner", hangs, max_restarts=1), hang_timeout=30.0, healthy=3.0) as program:
        program.wait_for_end()
    assert re.match(r"The node learner hung: in phase computing for .* \(and 1 time before\)", str(program.failure))


@pytest.mark.system
def test_phase_may_take_longer_than_the_hang_timeout():
    slow = BEATS + "for name in ('compiling', 'stepping'):\n  with Phase(name, 60.0): time.sleep(4.0)\nprint('done')"
    with Program(node("learner", slow), hang_timeout=3.0) as program:
        program.wait_for_end()
    assert program.failure is None and program.output == "[learner] done\n"


@pytest.mark.system
def test_node_that_waits_for_another_node_is_not_killed():
    waits = BEATS + "from rlframe.interprocess.heartbeat import waiting_for\nwith Phase('stepping', 2.0):\n"
    waits += "  with waiting_for('the learner'): time.sleep(3.0)\nprint('done')"
    with Program(node("actor", waits), hang_timeout=3.0) as program:
        program.wait_for_end()
    assert program.failure is None


@pytest.mark.system
def test_suspended_node_is_not_killed_if_the_hang_timeout_is_zero():
    with Program(node("actor", SERVES), hang_timeout=0.0) as program:
        program.wait_for(program.pids)
        os.kill(program.pids()[0], signal.SIGSTOP)
        time.sleep(3.0)  # the supervisor polls several times in these seconds
        assert "hung" not in program.output and len(program.pids()) == 1


LAUNCHER = """
import sys
from rlframe.engines.supervision.nodes import StartableProcess
from rlframe.engines.supervision.supervisor import ProgramSupervisor
nodes = [StartableProcess(name, [sys.executable, "-S", "-c", sys.argv[1]]) for name in ("a", "b")]
print(ProgramSupervisor(nodes, hang_timeout=float(sys.argv[2])).run())
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("suspended", "hang_timeout"), [pytest.param("all", 6.0, marks=pytest.mark.system), ("launcher", 3.0)]
)
def test_launcher_kills_no_nodes_when_it_resumes_after_a_suspension(suspended: str, hang_timeout: float):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, SERVES, str(hang_timeout)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    pids = [int(process.stderr.readline().split()[-1]) for _ in range(2)]
    # When the launcher resumes, it checks the heartbeats before the nodes can send new heartbeats.
    suspended_pids = pids if suspended == "all" else []
    for pid in suspended_pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * hang_timeout)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    for pid in suspended_pids:
        os.kill(pid, signal.SIGCONT)
    time.sleep(3.0)
    assert all(psutil.Process(pid).is_running() for pid in pids)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60.0)
    assert (process.returncode, output) == (0, "2\n")
    assert "hung" not in errors
