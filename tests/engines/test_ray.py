"""The engine ray, on a cluster of three Ray nodes of this machine."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from tests.extras import needs
from tests.waiting import wait_until

pytestmark = pytest.mark.system

needs("ray")
from ray.cluster_utils import Cluster

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        patch.setenv("HOME", str(home))
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", None)
        there = {"num_cpus": 2, "include_dashboard": False}
        started = Cluster(initialize_head=True, head_node_args={**there, "temp_dir": f"{directory}/ray"})
        for _ in range(2):
            started.add_node(num_cpus=2)
        yield started
        started.shutdown()


@pytest.fixture
def start(cluster):
    def started(what: str, own: bool = False) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.engines.small_program", what, "ray", *([] if own else [cluster.address])],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield started
    assert_nothing_is_left()


def assert_nothing_is_left() -> None:
    place = pathlib.Path(tempfile.gettempdir())
    wait_until(lambda: not list(place.glob("rlframe-*")), f"{list(place.glob('rlframe-*'))} are left.")


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, lines = process.communicate(timeout=240.0)
    print(lines)
    pids = {int(pid) for pid in re.findall(r"(?:server|client) (\d+) ", lines)}
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)
    return process.returncode, output, lines


def wait_for_nodes(process: subprocess.Popen[str], count: int = 3) -> set[int]:
    """The numbers of all nodes, which have said who they are."""
    pids: set[int] = set()
    assert process.stderr is not None
    while len(pids) < count:
        line = process.stderr.readline()
        assert line, process.communicate()
        pids |= {int(pid) for pid in re.findall(r"(?:server|client) (\d+) ", line)}
    return pids


def test_nodes_call_each_other_from_one_ray_node_to_another(start):
    code, output, lines = finish(start("gather"))
    assert (code, output) == (0, "ran: None\n")
    assert re.search(r"^\[server\] server \d+ on cpu$", lines, re.M)
    reports = re.findall(r"^\[actor/\d\] from (\w+): 3.0, not so$", lines, re.M)
    assert len(reports) == 4 and "elsewhere" in reports


def test_a_node_can_end_the_program(start):
    code, output, lines = finish(start("stop"))
    assert (code, output) == (0, "ran: None\n")
    assert "[monitor] client stops" in lines


def test_a_node_that_raises_is_told_with_its_traceback(start):
    code, output, _ = finish(start("raise"))
    assert code == 1
    assert output.startswith("failed: The node guest failed with exit code 1. Its last lines:\nTraceback (most")
    assert output.rstrip().endswith("ValueError: the client is unhappy")


def test_a_killed_server_comes_back_under_its_name(start):
    code, output, lines = finish(start("kill server"))
    assert (code, output) == (0, "ran: None\n")
    assert "[server] was killed by SIGKILL: restart 1 of 1" in lines
    assert len(set(re.findall(r"server (\d+) ", lines))) == 2
    assert re.search(r"^\[monitor\] after its restart the server counts 1$", lines, re.M)


def test_ctrl_c_ends_all_nodes(start):
    process = start("wait")
    pids = wait_for_nodes(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120.0)
    assert (process.returncode, output) == (0, "ran: 2\n")
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_nothing_outlives_a_launcher_that_is_killed(start):
    process = start("wait")
    pids = wait_for_nodes(process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120.0)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"Some of {pids} live on.")


def test_a_ray_of_its_own_ends_with_its_launcher_killed_or_not(start):
    assert finish(start("once", own=True))[:2] == (0, "ran: None\n")
    process = start("wait", own=True)
    wait_for_nodes(process)
    rays = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120.0)
    wait_until(lambda: not any(each.is_running() for each in rays), f"Some of {rays} live on.")
