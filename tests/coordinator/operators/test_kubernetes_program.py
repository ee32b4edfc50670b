"""The program of deploy/kubernetes: a job to its end, with an API server on loopback and Pods that are processes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.extras import needs
from tests.ports import free_port
from tests.waiting import wait_until

needs("launchpad", "reverb", "kubernetes", "trajectories")

from rlframe.coordinator.control.client import ControlClient
from rlframe.errors import PeerError, UnavailableError
from tests.coordinator.operators.cluster import Cluster
from tests.coordinator.operators.kubelet import ROOT, Kubelet
from tests.coordinator.operators.test_kubernetes import templates, the

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
DEADLINE = 400.0
TOKEN = "a-secret-of-the-test"


class Coordinator:
    """The process of the coordinator's Pod, started as the manifest says, on other paths and ports."""

    def __init__(self, tmp_path: pathlib.Path, cluster: Cluster) -> None:
        (tmp_path / "workers").mkdir()
        for role, template in templates().items():
            (tmp_path / "workers" / f"{role}.yaml").write_text(yaml.safe_dump(template))
        (tmp_path / "token").write_text(TOKEN)
        context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
        clusters = [{"name": "test", "cluster": {"server": cluster.url}}]
        users = [{"name": "test", "user": {"token": "none"}}]
        config = {"current-context": "test", "contexts": [context], "clusters": clusters, "users": users}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config}))
        container = the("StatefulSet", "rlframe-coordinator")["spec"]["template"]["spec"]["containers"][0]
        _, program = container["command"]
        self._port, replay = free_port(), free_port()
        self._command = [sys.executable, str(ROOT / "deploy" / "kubernetes" / pathlib.Path(program).name)]
        self._command += ["--directory", str(tmp_path / "volume"), "--templates", str(tmp_path / "workers")]
        self._command += ["--token-file", str(tmp_path / "token"), "--replay", f"localhost:{replay}"]
        self._command += ["--host", "127.0.0.1", "--control-port", str(self._port)]
        self._command += ["--learner-steps", "60", "--collectors", "1", "--max-collectors", "1"]
        self._env = {"POD_NAME": "rlframe-coordinator-0", "POD_NAMESPACE": "rl", "JAX_PLATFORMS": "cpu"}
        self._env |= {"KUBECONFIG": str(tmp_path / "kubeconfig"), "PYTHONPATH": str(ROOT)}
        self.log = tmp_path / "coordinator.log"

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self._command, env={**os.environ, **self._env}, stdout=log, stderr=log)

    def job(self) -> dict[str, Any]:
        """The job's status; empty while nobody answers."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            with ControlClient(f"http://127.0.0.1:{self._port}", TOKEN) as client:
                return client.status()["job"]
        except (PeerError, UnavailableError):
            return {}


def test_a_job_is_learned_by_pods_to_its_end_though_the_coordinators_is_replaced(tmp_path):
    cluster = Cluster()
    cluster.runs_pods = False
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "rlframe-coordinator", "uid": "uid-of-set"}
    own = {"name": "rlframe-coordinator-0", "ownerReferences": [{**owner, "controller": True}]}
    cluster.add({"metadata": own, "spec": {"containers": [{"name": "coordinator"}]}})
    (tmp_path / "logs").mkdir()
    coordinator = Coordinator(tmp_path, cluster)

    def what() -> str:
        logs = "".join(path.read_text()[-3000:] for path in sorted((tmp_path / "logs").iterdir()))
        return f"{coordinator.job()}\n{coordinator.log.read_text()[-3000:]}\n{logs}"

    with Kubelet(cluster, tmp_path / "logs") as kubelet:
        coordinator.start()
        try:
            wait_until(lambda: coordinator.job().get("learner_steps", 0) >= 5, what, DEADLINE)
            coordinator.process.send_signal(signal.SIGTERM)  # its Pod is to move
            assert coordinator.process.wait(60.0) == 0
            coordinator.start()
            wait_until(lambda: coordinator.job().get("state") == "CLOSED", what, DEADLINE)
            job = coordinator.job()
            assert job["learner_steps"] >= 60 and job["coordinator_restarts"] == 1 and job["restarts"] == 0, what()
            assert job["eval_return"] >= 8.0
            roles = {"train-learner-0-0", "train-collector-0-0", "train-evaluator-0-0"}
            assert set(cluster.created) == roles == set(kubelet.processes)  # the first of each, to the end
            wait_until(lambda: set(cluster.pods) == {"rlframe-coordinator-0"}, what, DEADLINE)  # deleted, and ended
            coordinator.process.send_signal(signal.SIGTERM)
            assert coordinator.process.wait(60.0) == 0
            coordinator.start()  # the Pod of a job that is over says so, and makes no workers
            wait_until(lambda: coordinator.job().get("state") == "CLOSED", what, DEADLINE)
            coordinator.process.send_signal(signal.SIGTERM)
            assert coordinator.process.wait(60.0) == 0
            assert len(cluster.created) == 3
        finally:
            coordinator.process.kill()
            cluster.close()
    assert [path.name for path in (tmp_path / "volume" / "checkpoints").iterdir()]
