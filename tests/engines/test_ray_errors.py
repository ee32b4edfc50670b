"""Errors of the engine `ray` before a program starts."""

from __future__ import annotations

import socket

import pytest

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
