"""Workers as actors of a real Ray on this machine, which takes tens of seconds to start."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from rlframe import handles
from rlframe.coordinator.operators.ray import RayOperator
from tests.coordinator.operators import workers
from tests.coordinator.operators.driven import Driven
from tests.extras import needs

pytestmark = pytest.mark.system

needs("ray")
import ray


@pytest.fixture
def cluster():
    path = os.pathsep.join([str(pathlib.Path(__file__).parents[3]), *sys.path])
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}},
    )
    yield
    ray.shutdown()


def serving(operator, *keys):
    deadline = time.monotonic() + 100.0
    while True:
        infos = operator.list()
        if [info.key for info in infos] == list(keys) and all(info.address for info in infos):
            return infos
        assert time.monotonic() < deadline, f"{infos}, {operator.problems()}"
        threading.Event().wait(0.1)


def test_actors_are_workers_that_are_replaced_adopted_and_ended(cluster, tmp_path):
    def make() -> Driven:
        options = {"collector": {"num_cpus": 0}}
        return Driven(RayOperator("test", {"collector": workers.quiet}, options), tmp_path)

    operator = make()
    assert operator.connect() == []
    operator.request("collector", 2)
    first, second = serving(operator, ("collector/0", 0), ("collector/1", 0))
    assert handles.Remote([first.address], "collector").ping().progress == first.pid
    os.kill(first.pid, signal.SIGKILL)
    serving(operator, ("collector/0", 1), ("collector/1", 0))
    os.kill(second.pid, signal.SIGSTOP)
    operator.report_failed([second.key])
    operator.report_failed([second.key])
    before = serving(operator, ("collector/0", 1), ("collector/1", 1))
    operator.disconnect(end_workers=False)

    successor = make()
    successor.connect()
    assert serving(successor, ("collector/0", 1), ("collector/1", 1)) == before
    successor.release([before[0].key])
    assert [info.key for info in successor.list()] == [before[1].key]
    successor.disconnect()
    assert ray.util.list_named_actors(all_namespaces=True) == []
