"""The engine local: real processes, real sockets, and no port."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess

import psutil
import pytest

from tests.engines import processes
from tests.engines.processes import finish, wait_for_nodes
from tests.waiting import wait_until


def start(what: str) -> subprocess.Popen[str]:
    return processes.start("tests.engines.small_program", what, "local")


@pytest.mark.parametrize("what", [pytest.param("once", marks=pytest.mark.system), "stop"])
def test_a_program_ends_well_with_the_node_that_decides_or_when_one_ends_it(what: str):
    code, output, lines = finish(start(what))
    assert (code, output) == (0, "ran: None\n")
    assert re.search(r"^\[server\] server \d+ on cpu$", lines, re.M)
    assert re.search(r"^\[monitor\] client \d+ counts 1$", lines, re.M)
    assert ("[monitor] client stops" in lines) == (what == "stop")


@pytest.mark.system  # in `make test` a whole run has it
def test_a_node_that_raises_is_told_with_its_traceback():
    code, output, _ = finish(start("raise"))
    assert code == 1
    assert output.startswith("failed: The node monitor failed with exit code 1. Its last lines:\nTraceback (most")
    assert output.rstrip().endswith("ValueError: the client is unhappy")


@pytest.mark.system  # in `make test` a whole run has it
def test_a_killed_server_comes_back_at_its_address():
    code, output, lines = finish(start("kill server"))
    assert (code, output) == (0, "ran: None\n")
    assert "[server] was killed by SIGKILL: restart 1 of 1" in lines
    assert len(set(re.findall(r"server (\d+) ", lines))) == 2
    assert re.search(r"^\[monitor\] after its restart the server counts 1$", lines, re.M)


def test_nobody_listens_on_a_network_and_ctrl_c_ends_all():
    process = start("wait")
    wait_for_nodes(process)
    launcher = psutil.Process(process.pid)
    everyone = [launcher, *launcher.children(recursive=True)]
    assert len([each for each in everyone if "rlframe" in each.cmdline()[0]]) == 3
    assert [(each.pid, each.net_connections("inet")) for each in everyone if each.net_connections("inet")] == []
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60.0)
    assert (process.returncode, output) == (0, "ran: 2\n")


def test_nothing_outlives_a_launcher_that_is_killed():
    process = start("wait")
    pids = wait_for_nodes(process)
    sockets = [pathlib.Path(each.laddr) for pid in pids for each in psutil.Process(pid).net_connections("unix")]
    (directory,) = {path.parent for path in sockets if path.parent.name.startswith("rlframe-")}
    (remover,) = [each for each in psutil.process_iter(["cmdline"]) if str(directory) in (each.info["cmdline"] or ())]
    assert len(list(directory.iterdir())) == 3
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60.0)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in (*pids, remover.pid)), f"Some of {pids} live on.")
    assert not directory.exists()
