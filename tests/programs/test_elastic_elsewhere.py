"""Elastic runs whose workers other machines have: processes that are told where they are, and Pods."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.extras import needs
from tests.ports import free_port
from tests.programs.elastic import ElasticProgram, last_status
from tests.waiting import wait_until

needs("launchpad", "reverb", "trajectories")

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

IMPALA = ("--agent", "impala", "--env", "CartPole-v1", "--eval-episodes", "2", "--seed", "1", "--log-every", "500")
UPDATES = ("--steps", "100000000", "--until-learner-steps", "150", "--max-actors", "1")


@contextlib.contextmanager
def worker(run_dir: pathlib.Path, role: str, incarnation: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A worker, started as a person does on a machine that has the run's directory."""
    which = [str(run_dir / "coordinator"), role, "0", str(incarnation), "--address", f"localhost:{port}"]
    with open(run_dir.parent / f"{role}-{incarnation}.log", "wb") as log:
        command = [sys.executable, "-m", "rlframe.coordinator.workers.process", *which]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30.0)


def test_workers_that_others_start_learn_to_the_end_and_one_that_is_killed_is_replaced(tmp_path: pathlib.Path) -> None:
    run_dir, ports = tmp_path / "run", {role: free_port() for role in ("learner", "collector", "evaluator")}
    addresses = tmp_path / "workers.json"
    addresses.write_text(json.dumps({role: [f"localhost:{port}"] for role, port in ports.items()}))
    elsewhere = ("--operator", "static", "--workers", str(addresses), "--replay-at", f"localhost:{free_port()}")
    with contextlib.ExitStack() as workers, ElasticProgram(run_dir, *IMPALA, *UPDATES, *elsewhere) as program:
        program.wait_until((run_dir / "coordinator" / "workers.pkl").exists)
        started = {role: workers.enter_context(worker(run_dir, role, 0, port)) for role, port in ports.items()}
        program.wait_for(lambda status: status["job"]["learner_steps"] >= 20)
        started["collector"].kill()
        workers.enter_context(worker(run_dir, "collector", 1, ports["collector"]))
        code, result = program.finish()
        assert all(started[role].poll() is None for role in ("learner", "evaluator"))  # they are not ours to end
    assert code == 0, program.errors()
    assert result is not None and result["learner_steps"] >= 150
    status = last_status(run_dir)
    assert (status["job"]["state"], status["job"]["restarts"]) == ("CLOSED", 1)
    assert status["operator"]["kind"] == "StaticOperator"


def test_pods_learn_to_the_end_and_are_deleted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("kubernetes")
    import yaml

    from tests.coordinator.operators.cluster import Cluster
    from tests.coordinator.operators.kubelet import Kubelet
    from tests.coordinator.operators.test_kubernetes import templates

    cluster = Cluster()
    cluster.runs_pods = False
    for name in ("templates", "logs"):
        (tmp_path / name).mkdir()
    for role, template in templates().items():
        (tmp_path / "templates" / f"{role}.yaml").write_text(yaml.safe_dump(template))
    config = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": cluster.url}}],
        "users": [{"name": "test", "user": {"token": "none"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("POD_NAMESPACE", "rl")
    elsewhere = ("--operator", "kubernetes", "--workers", str(tmp_path / "templates"))
    elsewhere += ("--replay-at", f"localhost:{free_port()}")
    try:
        with (
            Kubelet(cluster, tmp_path / "logs") as kubelet,
            ElasticProgram(tmp_path / "run", *IMPALA, *UPDATES, *elsewhere) as program,
        ):
            program.wait_for(lambda status: status["job"]["learner_steps"] >= 20)
            (collector,) = [name for name in kubelet.processes if "collector" in name]
            kubelet.processes[collector].send_signal(signal.SIGKILL)
            code, result = program.finish()
            assert code == 0, program.errors()
            assert result is not None and result["learner_steps"] >= 150
            ended = [name.rpartition("-")[0].partition("-")[0] for name in kubelet.processes]
            assert set(ended) == {"run"} and collector[:-1] + "1" in kubelet.processes  # its next incarnation
            wait_until(lambda: not cluster.pods)
    finally:
        cluster.close()
    assert last_status(tmp_path / "run")["job"]["restarts"] == 1
