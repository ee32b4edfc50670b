"""Tests of guards: the launcher is the process that pickled the node, and PID 1 never gets a signal."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import subprocess
from types import SimpleNamespace

import pytest

from rlframe.interprocess.processes import ProcessId, this_process
from rlframe.launchpad_nodes import guard as launchpad_guard
from rlframe.launchpad_nodes import node as launchpad_node
from rlframe.launchpad_nodes.guard import Guard, Node, kill_tree, remove_data, send
from tests.extras import needs
from tests.plain_launchpad import Program

# Short replacements for Launchpad's launcher and node. They skip Launchpad's imports, which take seconds.
LAUNCHER = """
import os, subprocess, sys, tempfile

from rlframe.interprocess.processes import this_process

nodes = []
for index in "01":
    file = tempfile.mkdtemp() + "/job.pkl"
    open(file, "w").close()
    entry = [sys.executable, "launchpad/nodes/python/process_entry.py", "--data_file", file]
    launcher = (*this_process(), os.getsid(0))
    nodes.append(subprocess.Popen([*{wrapper}, *entry, index, *map(str, launcher)]))
for node in nodes:
    node.wait()
"""
NODE = """
import os, sys, time

print(f"node {sys.argv[3]} imports.", flush=True)
while not os.path.exists(f"goes_on_{sys.argv[3]}"):
    time.sleep(0.05)

from rlframe.launchpad_nodes.node import restore
from rlframe.interprocess.processes import ProcessId

pid, started, session = map(int, sys.argv[4:])
restore(ProcessId(pid, started), session, list)
print(f"node {sys.argv[3]} runs.", flush=True)
time.sleep(99)
"""


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("ahead", [[], [0]])
def test_nodes_end_if_their_launcher_is_killed_during_their_imports(
    tmp_path: pathlib.Path, is_wrapped: bool, ahead: list
):
    needs("launchpad")
    launchpad = importlib.util.find_spec("launchpad").submodule_search_locations[0]
    wrapper = [f"{launchpad}/launch/run_locally/decorate_output", "31", "title"] if is_wrapped else []
    (tmp_path / "launchpad/nodes/python").mkdir(parents=True)
    (tmp_path / "launchpad/nodes/python/process_entry.py").write_text(NODE)
    program = Program(LAUNCHER.format(wrapper=wrapper), tmp_path)
    try:
        program.wait_for(lambda: program.output().count("imports.") == 2)
        for index in ahead:
            (tmp_path / f"goes_on_{index}").touch()
            program.wait_for_output(f"node {index} runs.")
        program.process.kill()
        program.process.wait()
        for index in {0, 1}.difference(ahead):
            (tmp_path / f"goes_on_{index}").touch()
        assert program.ends_within() == -signal.SIGKILL
        assert "ends because its launcher died" in program.output(), program.output()
    finally:
        program.close()


@pytest.mark.parametrize("in_terminal", [False, True])
def test_guard_watches_the_launcher_or_the_parent_if_the_node_has_a_terminal(monkeypatch, tmp_path, in_terminal: bool):
    with subprocess.Popen(["true"]) as launcher:
        killed = ProcessId(launcher.pid, 1)
    started: list[list[str]] = []
    with open(os.devnull) as stdin:
        monkeypatch.setattr(
            launchpad_node.subprocess,
            "Popen",
            lambda command, **kwargs: started.append(command) or SimpleNamespace(stdin=stdin),
        )
        monkeypatch.setattr(launchpad_node, "is_wrapper", lambda command: True)
        os.close(launchpad_node._start_guard(killed, os.getsid(0) + in_terminal))
    parent = ProcessId.of(os.getppid())
    # If the node has its own terminal, the guard watches the node's parent. "False": the guard sends it no signal.
    watched = [*parent, False] if in_terminal else [*killed, True]
    assert started[0][-7:-2] == [str(each) for each in (*this_process(), *watched)]


def test_pid_1_gets_no_signal(monkeypatch):
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    first = ProcessId.of(1)
    assert first.is_alive
    send(first, signal.SIGTERM)
    kill_tree(first)
    assert sent == []
    send(this_process(), signal.SIGTERM)
    assert sent == [os.getpid()]


def test_guard_stops_the_other_nodes_itself_if_the_launcher_is_pid_1(monkeypatch, capfd):
    kill = os.kill

    def kill_others(pid: int, number: int) -> None:
        assert pid != 1
        kill(pid, number)

    for wait in ("_POLL_INTERVAL", "_CONFIRM_TIMEOUT"):
        monkeypatch.setattr(launchpad_guard, wait, 0.01)
    monkeypatch.setattr(os, "kill", kill_others)
    with subprocess.Popen(["sleep", "99"]) as other, open(os.devnull) as reports:
        nodes = [Node(ProcessId.of(other.pid), "")]
        monkeypatch.setattr(
            launchpad_guard, "nodes_of", lambda launcher: [node for node in nodes if node.process.is_alive]
        )
        Guard(Node(ProcessId(other.pid, 1), ""), ProcessId.of(1), "actor/0", True, reports.fileno()).run()
        assert other.wait(30) == -signal.SIGTERM
    assert "actor/0 failed" in capfd.readouterr().out


@pytest.mark.parametrize(("name", "left"), [("job.pkl", []), ("other.pkl", ["other.pkl"])])
def test_remove_data_removes_only_the_files_that_launchpad_wrote(tmp_path: pathlib.Path, name: str, left: list[str]):
    for folder in ("alone", "shared"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    (tmp_path / "shared/mine").touch()
    remove_data(Node(this_process(), str(tmp_path / folder / name)) for folder in ("alone", "shared"))
    assert (tmp_path / "alone").exists() == bool(left)
    assert sorted(os.listdir(tmp_path / "shared")) == ["mine", *left]
