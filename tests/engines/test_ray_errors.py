"""Errors and rules of the engine `ray` before a program starts."""

from __future__ import annotations

import os
import socket

import pytest

from rlframe.engines.base import EngineOptions
from rlframe.engines.ray import RayEngine
from rlframe.errors import UsageError
from tests.extras import needs

needs("ray")
from rlframe.engines.ray_nodes import cluster, host


def test_address_at_which_nothing_listens_is_refused_within_seconds(monkeypatch):
    monkeypatch.setattr(cluster, "_REACHABLE_WITHIN", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        cluster._wait_until_reachable(f"127.0.0.1:{port}")
    message = rf"Nothing listens at --ray-address 127\.0\.0\.1:{port} .*`ray start --head --port={port}`"
    with pytest.raises(UsageError, match=message):
        cluster.RayCluster(f"127.0.0.1:{port}")


def test_machine_without_the_run_directory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(host.SHARED_DIRECTORY, str(tmp_path / "missing"))
    with pytest.raises(
        UsageError, match=r"does not have the run directory .*missing\. With --engine ray, every machine"
    ):
        host.run_ray_node(b"")


@pytest.mark.parametrize("num_machines", [1, 3])
def test_learner_uses_all_cores_of_its_machine_if_the_cluster_has_several(monkeypatch, num_machines):
    placed = {}

    class FakeCluster:
        def __init__(self, address, directory):
            self.num_machines = num_machines

        def cpus(self, nodes, shares_memory):
            return 1.0

        def gpus(self, nodes):
            return 0.0

        def place(self, name, address, pickled, rules, *_):
            placed[name] = rules.env.get("NPROC")

        def close(self):
            pass

    monkeypatch.setattr(cluster, "RayCluster", FakeCluster)
    engine = RayEngine(EngineOptions())
    for group in ("actor", "learner", "monitor"):
        engine.add(group, print)
    list(engine._program_nodes(print))
    cores = str(max(1, len(os.sched_getaffinity(0)) - 1))
    assert placed == {"actor": "1", "learner": cores if num_machines == 1 else None, "monitor": "1"}
