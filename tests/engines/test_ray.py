"""The engine `ray` runs programs on a cluster of three Ray nodes. All Ray nodes are on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from tests.engines import processes
from tests.engines.processes import ROOT, finish, wait_for_nodes
from tests.extras import needs
from tests.programs.elastic_program import ElasticProgram, last_status
from tests.ray_home import ray_home
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

needs("ray")
from ray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # create pytest's temporary directory before TMPDIR changes
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        patch.setenv("HOME", ray_home())
        patch.setenv("TMPDIR", directory)
        patch.setenv("PYTHONPATH", str(ROOT))  # Ray nodes import rlframe from this directory
        patch.setenv("RAY_gcs_server_port_wait_time_s", "120")  # a busy machine can need 2 minutes
        patch.setattr(tempfile, "tempdir", None)
        there = {"num_cpus": 2, "include_dashboard": False}
        started = Cluster(initialize_head=True, head_node_args={**there, "temp_dir": f"{directory}/ray"})
        for _ in range(2):
            started.add_node(num_cpus=2)
        yield started
        started.shutdown()


@pytest.fixture
def start(cluster):
    def started(behavior: str, own: bool = False) -> subprocess.Popen[str]:
        address = [] if own else [cluster.address]
        return processes.start("tests.engines.small_program", behavior, "ray", *address)

    yield started
    assert_no_sockets_remain()


def assert_no_sockets_remain() -> None:
    place = pathlib.Path(tempfile.gettempdir())
    wait_until(lambda: not list(place.glob("rlframe-*")), f"{list(place.glob('rlframe-*'))} still exist.")


def test_nodes_on_different_ray_nodes_call_each_other(start):
    code, output, lines = finish(start("gather"))
    assert (code, output) == (0, "ran: None\n")
    assert re.search(r"^\[server\] server \d+ on cpu$", lines, re.M)
    reports = re.findall(r"^\[actor/\d\] from (\w+): 3.0, not so$", lines, re.M)
    assert len(reports) == 4 and "elsewhere" in reports


def test_each_parameter_version_is_fetched_from_its_node_once(start):
    code, output, lines = finish(start("publish"))
    assert (code, output) == (0, "ran: None\n")
    assert len(re.findall("has the last version", lines)) >= 2
    assert 1 < len(re.findall("gives version", lines)) <= 10  # without sharing, 36 calls would be necessary


def test_node_can_end_the_program(start):
    code, output, lines = finish(start("stop"))
    assert (code, output) == (0, "ran: None\n")
    assert "[monitor] client stops" in lines


def test_failed_node_is_reported_with_its_traceback(start):
    code, output, _ = finish(start("raise"))
    assert code == 1
    assert output.startswith("failed: The node monitor failed with exit code 1. Its last lines:\nTraceback (most")
    assert output.rstrip().endswith("ValueError: the client is unhappy")


def test_killed_server_restarts_with_the_same_name(start):
    code, output, lines = finish(start("kill server"))
    assert (code, output) == (0, "ran: None\n")
    assert "[server] was killed by SIGKILL: restart 1 of 1" in lines
    assert len(set(re.findall(r"server (\d+) ", lines))) == 2
    assert re.search(r"^\[monitor\] the count of the restarted server is 1$", lines, re.M)


def test_ctrl_c_ends_all_nodes(start):
    process = start("wait")
    pids = wait_for_nodes(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120.0)
    assert (process.returncode, output) == (0, "ran: 2\n")
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_all_processes_end_after_the_launcher_is_killed(start):
    process = start("wait")
    pids = wait_for_nodes(process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120.0)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"Some of {pids} are still running.")


PRINT_CLUSTER_STATE = """
import json, sys, ray
from ray._private.state import actors
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps({
    "nodes": sorted(node["NodeID"] for node in ray.nodes() if node["Alive"]),
    "resources": {key: value for key, value in ray.cluster_resources().items() if key in ("CPU", "GPU")},
    "free": {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")},
    "actors": [actor["Name"] for actor in actors().values() if actor["State"] != "DEAD"],
    "groups": [one["state"] for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"],
}))
"""


def cluster_state(address: str) -> dict:
    printed = subprocess.run(
        [sys.executable, "-c", PRINT_CLUSTER_STATE, address], check=True, capture_output=True, text=True
    )
    return json.loads(printed.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_existing_ray_cluster_is_unchanged_after_a_program(start, cluster, how):
    before = cluster_state(cluster.address)
    assert len(before["nodes"]) == 3 and before["free"] == before["resources"] and not before["actors"]
    process = start("once" if how == "ends" else "wait")
    if how == "ends":
        assert finish(process)[:2] == (0, "ran: None\n")
    else:
        wait_for_nodes(process)
        assert cluster_state(cluster.address)["actors"]
        process.kill()
        process.communicate(timeout=120.0)
    wait_until(lambda: cluster_state(cluster.address) == before, "The cluster's state has changed.", seconds=60.0)


def test_launcher_that_started_ray_also_ends_ray(start):
    assert finish(start("once", own=True))[:2] == (0, "ran: None\n")
    process = start("wait", own=True)
    wait_for_nodes(process)
    rays = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120.0)
    wait_until(lambda: not any(each.is_running() for each in rays), f"Some of {rays} are still running.")


OWN_AGENT = """
from rlframe.agents.ppo import PPO


class OwnPPO(PPO):
    '''Loaded from a file, so other processes cannot import it.'''
"""


@pytest.fixture
def train(cluster, tmp_path):
    def started(*options: str) -> subprocess.Popen[str]:
        (tmp_path / "own.py").write_text(OWN_AGENT)
        arguments = ["train", "--agent", f"{tmp_path}/own.py:OwnPPO", "--env", "CartPole-v1", "--num-envs", "6"]
        arguments += ["--num-actors", "3", "--engine", "ray", "--ray-address", cluster.address, "--json"]
        return processes.start("rlframe", *arguments, "--run-dir", str(tmp_path / "run"), *options, cwd=tmp_path)

    yield started
    assert_no_sockets_remain()


def ended(process: subprocess.Popen[str]) -> tuple[dict, str]:
    output, lines = process.communicate(timeout=600.0)
    print(lines)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1]), lines


def test_user_agent_learns_with_shared_memory(train):
    result, _ = ended(train("--topology", "heavy_env", "--steps", "30000"))
    assert result["env_steps"] >= 30000 and result["return_mean"] > 100.0


def test_run_continues_when_one_of_several_ray_nodes_is_killed(train, cluster, tmp_path):
    process = train("--topology", "distributed", "--steps", "30000", "--hang-timeout", "10", "--eval-episodes", "2")
    rows = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: (rows.exists() and rows.read_text()) or process.poll() is not None, seconds=300.0)
    node = cluster.worker_nodes.pop()
    cluster.worker_nodes.add(node)
    cluster.remove_node(node, allow_graceful=False)
    try:
        result, lines = ended(process)
    finally:
        cluster.add_node(num_cpus=2)
    assert result["env_steps"] >= 30000
    assert re.search(r"restart 1 of 3", lines)


def test_elastic_workers_without_shared_memory_use_several_ray_nodes(train, tmp_path):
    process = train("--topology", "elastic", "--replay", "service", "--steps", "30000", "--eval-episodes", "2")

    def raylets() -> set[int]:
        titles = ((each, each.info["cmdline"]) for each in psutil.process_iter(["cmdline"]))
        collectors = [each for each, title in titles if title and title[0].startswith("rlframe: collector")]
        # The parent process of a collector is a Ray actor. The parent process of this actor is its Ray node's raylet.
        return {host.ppid() for each in collectors if (host := each.parent()) is not None}

    wait_until(lambda: len(raylets()) > 1 or process.poll() is not None, seconds=300.0)
    result, _ = ended(process)
    assert result["env_steps"] >= 30000


@pytest.mark.timeout(900)
def test_elastic_continues_version_numbers_after_the_learner_or_the_param_store_is_killed(cluster, tmp_path):
    options = ["--agent", "ppo", "--env", "CartPole-v1", "--steps", "100000000", "--eval-episodes", "2"]
    options += ["--max-actors", "2", "--replay", "service", "--engine=ray", "--ray-address", cluster.address]
    with ElasticProgram(tmp_path / "run", *options) as program:
        program.wait_for_collectors(2)
        program.wait_for(lambda status: status["job"]["params_version"] > 5)

        learner = program.worker("learner/0")
        program.call(lambda client: client.evaluate_now())
        program.worker("evaluator/0")  # wait until an evaluator runs; it evaluates one fixed version
        os.kill(learner["pid"], signal.SIGKILL)
        status = program.wait_for(lambda status: status["job"]["evaluated_version"] is not None)
        newest = status["job"]["params_version"]
        assert 5 < status["job"]["evaluated_version"] <= newest
        assert program.worker("learner/0", above=learner["incarnation"])["pid"] != learner["pid"]
        program.wait_for(lambda status: status["job"]["params_version"] > newest + 5)

        (store,) = processes_titled("rlframe: params")
        store.kill()
        wait_until(lambda: [each for each in processes_titled("rlframe: params") if each != store], seconds=120.0)
        before = program.wait_for(lambda status: status["job"]["state"] == "RUNNING")["job"]
        program.wait_for(lambda status: status["job"]["params_version"] > before["params_version"] + 5)
        program.wait_for(lambda status: status["job"]["env_steps"] > before["env_steps"])

        program.call(lambda client: client.cancel("seen enough"))
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result is not None and result["params_version"] > newest
    assert last_status(program.run_dir)["job"]["restarts"] == 1  # only the learner has restarted
    program.check_counters(last_status(program.run_dir))
    assert not (program.run_dir / "params").exists()
    assert_no_sockets_remain()


def processes_titled(title: str) -> list[psutil.Process]:
    """Return the processes of the Ray cluster whose title starts with `title`."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [each] if each.cmdline()[:1] and each.cmdline()[0].startswith(title) else []
    return found
