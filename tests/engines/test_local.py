"""The engine `local` runs programs with real processes and sockets, and opens no port."""

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


def start(behavior: str) -> subprocess.Popen[str]:
    return processes.start("tests.engines.small_program", behavior, "local")


@pytest.mark.system  # `make test` checks the same behavior in a complete training run
@pytest.mark.parametrize("behavior", ["once", "stop"])
def test_program_ends_when_its_monitor_ends_or_when_a_node_ends_the_program(behavior: str):
    code, output, lines = finish(start(behavior))
    assert (code, output) == (0, "ran: None\n")
    assert re.search(r"^\[server\] server \d+ on cpu$", lines, re.M)
    assert re.search(r"^\[monitor\] client \d+ counts 1$", lines, re.M)
    assert ("[monitor] client stops" in lines) == (behavior == "stop")


@pytest.mark.system  # `make test` checks the same behavior in a complete training run
def test_failed_node_is_reported_with_its_traceback():
    code, output, _ = finish(start("raise"))
    assert code == 1
    assert output.startswith("failed: The node monitor failed with exit code 1. Its last lines:\nTraceback (most")
    assert output.rstrip().endswith("ValueError: the client is unhappy")


@pytest.mark.system  # `make test` checks the same behavior in a complete training run
def test_killed_server_restarts_at_its_address():
    code, output, lines = finish(start("kill server"))
    assert (code, output) == (0, "ran: None\n")
    assert "[server] was killed by SIGKILL: restart 1 of 1" in lines
    assert len(set(re.findall(r"server (\d+) ", lines))) == 2
    assert re.search(r"^\[monitor\] the count of the restarted server is 1$", lines, re.M)


@pytest.mark.system
def test_no_process_listens_on_a_port_and_ctrl_c_ends_all_processes():
    process = start("wait")
    wait_for_nodes(process)
    launcher = psutil.Process(process.pid)
    all_processes = [launcher, *launcher.children(recursive=True)]
    assert len([each for each in all_processes if "rlframe" in each.cmdline()[0]]) == 3
    assert [(each.pid, each.net_connections("inet")) for each in all_processes if each.net_connections("inet")] == []
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60.0)
    assert (process.returncode, output) == (0, "ran: 2\n")


def test_all_processes_end_after_the_launcher_is_killed():
    process = start("wait")
    pids = wait_for_nodes(process)
    sockets = [pathlib.Path(each.laddr) for pid in pids for each in psutil.Process(pid).net_connections("unix")]
    (directory,) = {path.parent for path in sockets if path.parent.name.startswith("rlframe-")}
    (remover,) = [each for each in psutil.process_iter(["cmdline"]) if str(directory) in (each.info["cmdline"] or ())]
    assert len(list(directory.iterdir())) == 3
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60.0)
    wait_until(
        lambda: not any(psutil.pid_exists(pid) for pid in (*pids, remover.pid)), f"Some of {pids} are still running."
    )
    assert not directory.exists()
