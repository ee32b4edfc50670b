"""`launch` runs real Launchpad programs with processes and Courier calls, and ends them correctly."""

from __future__ import annotations

import functools
import pathlib
import re
import signal

import psutil
import pytest

from tests.engines import processes
from tests.engines.processes import finish, wait_for_nodes
from tests.extras import needs
from tests.waiting import wait_until

needs("launchpad")

start = functools.partial(processes.start, "tests.engines.launched")


@pytest.mark.system
def test_program_ends_when_its_client_ends():
    code, output, lines = finish(start("once"))
    assert (code, output) == (0, "launched: None\n")
    assert "[server] server" in lines and "on here" in lines
    assert re.search(r"^\[client\] client \d+ counts 1$", lines, re.M)
    assert "[server] server stops" in lines


@pytest.mark.system
def test_first_output_line_warns_about_ports_open_on_all_interfaces():
    process = start("wait")
    assert process.stderr is not None
    first = process.stderr.readline()
    match = re.fullmatch(r"\[launcher\] server \(port (\d+)\), and .* can run code as you\. .* SECURITY\.md\.\n", first)
    assert match, first
    line = next(line for line in process.stderr if "server" in line)  # the server listens before it prints this line
    pid = int(re.findall(r"server (\d+) ", line)[0])
    listening = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [(each.laddr.ip, each.laddr.port) for each in listening] == [("::", int(match[1]))]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60.0)


@pytest.mark.system
def test_failed_node_is_reported_with_its_traceback():
    code, output, _ = finish(start("raise"))
    assert code == 1
    assert output.startswith("failed: The node client failed with exit code 1. Its last lines:\nTraceback (most")
    assert output.rstrip().endswith("ValueError: the client is unhappy")


@pytest.mark.system
def test_lp_stop_ends_the_program_without_an_error():
    code, output, lines = finish(start("stop"))
    assert (code, output) == (0, "launched: None\n")
    assert "[server] server stops" in lines


@pytest.mark.system
def test_killed_server_restarts_at_its_address():
    code, output, lines = finish(start("kill server"))
    assert (code, output) == (0, "launched: None\n")
    assert "[server] was killed by SIGKILL: restart 1 of 1" in lines
    assert len(set(re.findall(r"server (\d+) ", lines))) == 2
    # Courier can repeat a call, so the count of the new server can be higher than 1.
    assert re.search(r"^\[client\] the count of the restarted server is [1-9]$", lines, re.M)


@pytest.mark.system
def test_all_processes_end_after_the_launcher_is_killed(tmp_path: pathlib.Path):
    process = start("wait", TMPDIR=str(tmp_path))
    pids = wait_for_nodes(process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60.0)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"Some of {pids} are still running.")
    assert list(tmp_path.iterdir()) == []
