"""If a node fails or the launcher dies, a program of plain `lp.launch` ends completely and names the failed node."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from rlframe.launchpad_nodes.guard import ENTRY, end_starting_nodes
from tests import plain_launchpad
from tests.extras import needs
from tests.plain_launchpad import WITHIN, Program, example

needs("launchpad")

Start = Callable[..., Program]

SMALL = """
import os, sys, time

import launchpad as lp

import rlframe.errors


class Waits:
    '''A node that refers to a class of rlframe, so it imports rlframe when it is unpickled.'''

    error = rlframe.errors.UsageError

    def __init__(self, *args):
        pass

    def run(self):
        print(f"runs in {{os.getpid()}}.")
        while not lp.wait_for_stop(0.1):
            pass
        print("stops.")


{node}

def main():
    program = lp.Program("small")
    for label, node in (("waits", lp.CourierNode(Waits)), ("fails", {added})):
        program.add_node(node, label=label)
    lp.launch(program, launch_type="local_mp", terminal="{terminal}").wait()
    print("the script continues.")


if __name__ == "__main__":
    main()
"""

RAISES = "raise ValueError('a fault')"
CLASS = """
class Fails(Waits):
    def __init__(self):
        {constructor}

    def run(self):
        {run}
"""
FUNCTION = """
def fails(error):
    {run}
"""


OWN_CLASS = """
class Own:  # does not refer to rlframe
    def __init__(self):
        {constructor}
"""
TABLES = """
def tables():
    {tables}
"""


def in_constructor(statement: str, terminal: str = "current_terminal") -> str:
    node = CLASS.format(constructor=statement, run="pass")
    return SMALL.format(node=node, added="lp.CourierNode(Fails)", terminal=terminal)


def in_run(statement: str, terminal: str = "current_terminal") -> str:
    node = CLASS.format(constructor="pass", run=statement)
    return SMALL.format(node=node, added="lp.CourierNode(Fails)", terminal=terminal)


def in_function(statement: str) -> str:
    node, added = FUNCTION.format(run=statement), "lp.PyNode(fails, Waits.error)"
    return SMALL.format(node=node, added=added, terminal="current_terminal")


def in_own_class(statement: str) -> str:
    node = OWN_CLASS.format(constructor=statement)
    return rlframe_first(SMALL.format(node=node, added="lp.CourierNode(Own)", terminal="current_terminal"))


def rlframe_first(script: str) -> str:
    """Return the script with `import rlframe` before `import launchpad`."""
    return "import rlframe\n" + script


def in_tables(statement: str) -> str:
    node = TABLES.format(tables=statement)
    return SMALL.format(node=node, added="lp.ReverbNode(tables)", terminal="current_terminal")


@pytest.fixture()
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    programs: list[Program] = []

    def start(script: str, **options: bool) -> Program:
        programs.append(Program(script, tmp_path, **options))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(in_constructor(RAISES), "ValueError: a fault", id="constructor"),
        pytest.param(in_run(RAISES), "ValueError: a fault", id="run", marks=pytest.mark.system),
        pytest.param(in_function(RAISES), "ValueError: a fault", id="function", marks=pytest.mark.system),
        pytest.param(
            in_constructor("import threading; threading.Thread(target=time.sleep, args=(99,)).start(); " + RAISES),
            "ValueError: a fault",
            id="constructor with a running thread",
            marks=pytest.mark.system,
        ),
        pytest.param(
            in_own_class(RAISES),
            "ValueError: a fault",
            id="class without rlframe, which is imported before launchpad",
            marks=pytest.mark.system,
        ),
        pytest.param(in_tables(RAISES), "ValueError: a fault", id="Reverb tables", marks=pytest.mark.system),
        pytest.param(rlframe_first(in_run("sys.exit(3)")), "SystemExit: 3", id="sys.exit", marks=pytest.mark.system),
        pytest.param(
            in_function("sys.exit(3)"), "SystemExit: 3", id="sys.exit in a function", marks=pytest.mark.system
        ),
        pytest.param(in_run("os.kill(os.getpid(), 9)"), "killed or crashed", id="SIGKILL", marks=pytest.mark.system),
        pytest.param(in_run("os.abort()"), "killed or crashed", id="abort", marks=pytest.mark.system),
        pytest.param(in_run("os._exit(3)"), "killed or crashed", id="exit", marks=pytest.mark.system),
        pytest.param(in_run("os._exit(0)"), "killed or crashed", id="exit with 0", marks=pytest.mark.system),
    ],
)
def test_failed_node_is_named_and_the_program_exits_with_an_error(start: Start, script: str, reason: str):
    program = start(script)
    assert program.ends_within(60.0) not in (0, None), program.output()
    assert re.search(rf"\[fails/0\] rlframe: the node fails/0 failed: .*{reason}", program.output()), program.output()
    assert "stops." in program.output() and "the script continues" not in program.output()


@pytest.mark.system
def test_launchpad_ends_a_program_with_output_to_files_after_a_failure(start: Start, monkeypatch, tmp_path):
    monkeypatch.setenv("LAUNCHPAD_LOGGING_DIR", str(tmp_path / "logs"))
    program = start(in_constructor(RAISES, "output_to_files"))
    assert program.ends_within(60.0) == 1
    assert "One of the workers exited with code 1" in program.output()


@pytest.mark.system
@pytest.mark.parametrize("end", ["return", "sys.exit(0)"])
def test_node_whose_run_returns_does_not_end_the_program(start: Start, end: str):
    program = start(in_run(f"print('returns.'); {end}"))
    program.wait_for_output("[fails/0] returns.")
    program.wait_for_output("[waits/0] runs in")
    program.wait_for(lambda: len(program.guards()) == 1)  # the guard of the node that returned has ended
    assert program.process.poll() is None and "failed" not in program.output()
    program.process.send_signal(signal.SIGINT)
    assert program.ends_within() == 0 and "the script continues" in program.output()


def test_node_that_waits_for_another_node_when_the_program_stops_ends_without_a_traceback(start: Start):
    statement = "from rlframe.errors import StoppedError; print('waits.'); lp.wait_for_stop(); raise StoppedError"
    program = start(in_function(statement))
    program.wait_for_output("[fails/0] waits.")
    program.wait_for_output("[waits/0] runs in")
    program.process.send_signal(signal.SIGINT)
    assert program.ends_within() == 0 and "the script continues" in program.output()
    assert "Traceback" not in program.output()


@pytest.mark.parametrize(
    "busy",
    [
        "lp.wait_for_stop()",
        pytest.param("time.sleep(99)", marks=pytest.mark.system),
        pytest.param("import ctypes; ctypes.PyDLL(None).sleep(99)", marks=pytest.mark.system),
    ],
)
def test_all_nodes_end_when_their_launcher_is_killed_even_if_one_holds_the_gil(start: Start, busy: str):
    program = start(in_run(f"print('is busy.'); {busy}"))
    program.wait_for_output("is busy.")
    program.wait_for_output("[waits/0] runs in")
    program.process.kill()
    assert program.ends_within() == -signal.SIGKILL
    assert "stops." in program.output()


@pytest.mark.system
def test_ctrl_c_during_imports_ends_nodes_before_launchpad_kills_them(start: Start, tmp_path: pathlib.Path):
    (tmp_path / "slow.py").write_text(
        "import time\nif 'process_entry.py' in open('/proc/self/cmdline').read(): time.sleep(99)\n"
    )
    script = in_constructor("pass").replace("import rlframe.errors\n", "import rlframe.errors\nimport slow\n")
    program = start(
        script.replace("error = rlframe.errors.UsageError", "error, slow = rlframe.errors.UsageError, slow")
    )
    program.wait_for(
        lambda: len(program.members()) > 8
    )  # 9 processes: the launcher, and for each of the 2 nodes two shells (or a shell and sed), a node and a guard
    os.killpg(program.process.pid, signal.SIGINT)
    begin = time.monotonic()
    assert program.ends_within() == 0, program.output()
    assert time.monotonic() - begin < 8.0 and "Killing" not in program.output(), program.output()


def start_slowly(start: Start, folder: pathlib.Path, ahead: int) -> Program:
    """Start a program with two nodes. `ahead` nodes start normally. The others wait for the file `go_on` to import."""
    (folder / "early").mkdir()
    (folder / "early/sitecustomize.py").write_text(
        "import os, time\nif 'process_entry.py' in open('/proc/self/cmdline').read():\n"
        "    print('starts.', flush=True)\n"
        "    with open('started', 'a') as file:\n"
        f"        is_ahead = file.write('.') and file.flush() is None and file.tell() <= {ahead}\n"
        "    while not is_ahead and not os.path.exists('go_on'): time.sleep(0.1)\n"
    )
    early = "def main():\n    os.environ['PYTHONPATH'] = 'early:' + os.environ['PYTHONPATH']\n"
    program = start(in_constructor("pass").replace("def main():\n", early))
    program.wait_for(lambda: program.output().count("starts.") == 2)
    return program


@pytest.mark.system
@pytest.mark.parametrize("ahead", [0, 1])
def test_nodes_end_if_their_launcher_is_killed_before_they_import_rlframe(
    start: Start, tmp_path: pathlib.Path, ahead: int
):
    program = start_slowly(start, tmp_path, ahead)
    program.wait_for(lambda: len(program.guards()) == ahead)
    program.process.kill()
    program.process.wait()
    (tmp_path / "go_on").touch()
    assert program.ends_within() == -signal.SIGKILL
    assert "ends because its launcher died" in program.output(), program.output()


@pytest.mark.system
def test_ctrl_c_ends_nodes_that_have_not_imported_rlframe_yet(start: Start, tmp_path: pathlib.Path):
    program = start_slowly(start, tmp_path, 0)
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.ends_within(8.0) == 0, program.output()
    assert "Killing" not in program.output() and "failed" not in program.output(), program.output()


def test_end_starting_nodes_kills_only_nodes_that_ignore_sigterm():
    def node(action: str) -> subprocess.Popen:
        waits = (
            f"import signal, sys; signal.signal(signal.SIGTERM, signal.{action}); print(flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-IS", "-c", waits, ENTRY]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with node("SIG_IGN") as starting, node("SIG_DFL") as started:
        assert starting.stdout.readline() and started.stdout.readline()
        end_starting_nodes(os.getpid())
        assert starting.wait(30) == -signal.SIGKILL and started.poll() is None
        started.stdin.close()
        assert started.wait(30) == 0


# A faulty program with objects of rlframe. The fault: no actor adds a step, or an Actor gets a node, not a handle.
RLFRAME_PROGRAM = """
from functools import partial

import launchpad as lp
import numpy as np
from dm_env import specs

from rlframe import Actor, Inferencer, InferencerConfig, Learner, LearnerConfig, SharedMemReplayBuffer
from rlframe.agents import DQN, DQNConfig
from rlframe.learners import DataConfig


def main():
    agent = DQN(DQNConfig(), specs.Array((4,), np.float32, "observation"), specs.DiscreteArray(2, name="action"))
    replay = SharedMemReplayBuffer(agent, num_writers=1)
    program = lp.Program("ours")
    with program.group("learner"):
        learner_cfg = LearnerConfig(data=DataConfig(timeout={timeout}))
        learner = program.add_node(lp.CourierNode(Learner, learner_cfg, agent, replay))
    {added}
    lp.launch(program, launch_type="local_mp", terminal="current_terminal").wait()


if __name__ == "__main__":
    main()
"""
BARE_NODE = """
    inferencer = lp.CourierNode(Inferencer, InferencerConfig(), agent, learner)
    for label, node in (("inferencer", inferencer), ("actor", {actor})):
        program.add_node(node, label=label)
"""


@pytest.mark.system
def test_program_ends_if_its_learner_gets_no_data_within_the_timeout(start: Start):
    program = start(RLFRAME_PROGRAM.format(timeout=1.0, added="pass"))
    assert program.ends_within(120.0) not in (0, None), program.output()
    named = r"\[learner/0\] rlframe: the node learner/0 failed: DatasetTimeoutError: No batch was available for 1 s"
    assert re.search(named, program.output()), program.output()


@pytest.mark.system
def test_output_in_a_file_names_the_failed_node(start: Start, tmp_path: pathlib.Path):
    program = start(RLFRAME_PROGRAM.format(timeout=1.0, added="pass"), redirect=True)
    assert program.ends_within(120.0) not in (0, None)
    assert "rlframe: the node learner/0 failed: DatasetTimeoutError" in (tmp_path / "output.txt").read_text()


@pytest.mark.parametrize(
    "actor",
    [
        "lp.CourierNode(Actor, print, inferencer, replay)",
        pytest.param("lp.CourierNode(Actor, print, [inferencer], replay)", marks=pytest.mark.system),
        pytest.param("lp.CourierNode(partial(Actor, print), inferencer=inferencer)", marks=pytest.mark.system),
        pytest.param("lp.CourierNode(Actor, print, {'of': (inferencer,)}, replay)", marks=pytest.mark.system),
    ],
)
def test_launcher_refuses_a_node_as_an_argument_instead_of_its_handle(start: Start, actor: str):
    program = start(rlframe_first(RLFRAME_PROGRAM.format(timeout=600.0, added=BARE_NODE.format(actor=actor))))
    assert program.ends_within(120.0) == 1, program.output()
    refused = "UsageError: A CourierNode was given to Actor: give the handle that program.add_node(node) returns."
    assert refused in program.output() and "[learner/0]" not in program.output()


EXAMPLES = ("heavy_env", "light_env", "distributed")


@pytest.mark.system
@pytest.mark.parametrize("page", EXAMPLES)
@pytest.mark.parametrize(
    ("fault", "names"),
    [
        # Each actor and evaluator steps the environment, so any of them can fail first.
        (plain_launchpad.with_raising_environment, r"(actor|evaluator)/\d failed: (EnvError: |.*broken)"),
        (plain_launchpad.with_broken_constructor, r"actor/0 failed: ValueError: a broken constructor"),
    ],
)
def test_example_with_a_fault_ends_and_names_the_node(start: Start, page: str, fault, names: str):
    program = start(fault(example(page)))
    program.wait_for_output("fault at ")
    assert program.ends_within() not in (0, None), program.output()[-5000:]
    assert re.search(rf"rlframe: the node {names}", program.output()), program.output()[-5000:]
    began = float(re.findall(r"fault at ([\d.]+)\.", program.output())[0])
    assert time.time() - began < WITHIN + 2.0


@pytest.mark.system
@pytest.mark.parametrize("page", EXAMPLES)
def test_nodes_of_an_example_end_if_its_launcher_is_killed(start: Start, page: str):
    program = start(example(page))
    program.wait_for_output("return ")  # when the evaluator prints this, all nodes are running
    program.process.kill()
    program.ends_within()


@pytest.mark.system
@pytest.mark.parametrize("page", EXAMPLES)
@pytest.mark.parametrize("seconds", [1.0, 4.0, 8.0])
def test_ctrl_c_during_the_start_ends_an_example_before_launchpad_kills_it(start: Start, page: str, seconds: float):
    program = start(example(page))
    program.wait_for(lambda: len(program.members()) > 4)
    time.sleep(seconds)
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.ends_within(12.0) == 0, program.output()[-5000:]  # a node has 8 s to close
    assert "Killing" not in program.output()
