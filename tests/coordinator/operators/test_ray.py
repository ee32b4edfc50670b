"""Tests of the Ray operator with a real Ray cluster on this machine. It takes tens of seconds to start."""

from __future__ import annotations

import functools
import io
import os
import pathlib
import pickle
import signal
import threading
import time

import psutil
import pytest

from rlframe import handles
from rlframe.coordinator.operators.supervised import RayOperator
from rlframe.engines.group_rules import GroupRules
from rlframe.engines.served_engine import pickle_worker
from rlframe.engines.supervision.nodes import pickle_node
from rlframe.errors import UsageError
from rlframe.transport.ray import RayTransport
from tests.coordinator.operators import workers
from tests.coordinator.operators.operator_driver import OperatorDriver
from tests.extras import needs
from tests.ray_home import ray_home
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

needs("ray")


@pytest.fixture(scope="module")
def cluster():
    from rlframe.engines.ray_nodes.cluster import RayCluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", ray_home())
        patch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[3]))
        made = RayCluster(None)
        yield made
        made.close()


@pytest.fixture
def operator(cluster):
    """Yield an operator whose workers Ray starts, and its output."""
    makes = {
        "collector": workers.make_idle_worker,
        "learner": workers.fail_permanently,
        "evaluator": workers.make_unclosable_worker,
    }

    def node(role: str, index: int, incarnation: int):
        name, address = f"{role}/{index}", f"{role}/{index}/{incarnation}"
        pickled = pickle_worker(RayTransport(), address, pickle_node(role, makes[role]), name, index, incarnation)
        rules = GroupRules(env={"WHERE": role})
        return cluster.place(name, address, pickled, rules, 0.0, 0.0, True, lambda: None)

    output = io.StringIO()
    made = RayOperator({role: functools.partial(node, role) for role in makes}, output=output)
    yield made, output
    made.close()


def serving(operator, *keys):
    deadline = time.monotonic() + 200.0
    while True:
        infos = operator.list_workers()
        if [info.key for info in infos] == list(keys) and all(info.address for info in infos):
            return infos
        assert time.monotonic() < deadline, f"{infos}, {operator.problems()}"
        threading.Event().wait(0.1)


def called(info):
    return handles.Remote([info.address], info.worker_id, transport=RayTransport())


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_workers_are_replaced_adopted_and_ended(operator):
    owned, output = operator
    handle = pickle.dumps(owned)  # the process of a coordinator would receive this handle
    operator = OperatorDriver(pickle.loads(handle))
    assert operator.connect() == []
    operator.scale("collector", 2)
    first, second = serving(operator, ("collector/0", 0), ("collector/1", 0))
    assert called(first).pid() == first.pid
    assert called(second).resources()["WHERE"] == "collector"
    child = psutil.Process(first.pid).children()[0]
    os.kill(first.pid, signal.SIGKILL)
    serving(operator, ("collector/0", 1), ("collector/1", 0))
    wait_until(lambda: is_gone(child.pid))  # the worker's child ends too
    assert "[collector/0] (incarnation 0) was killed by SIGKILL." in output.getvalue()
    os.kill(second.pid, signal.SIGSTOP)
    operator.replace_workers([second.key])
    operator.replace_workers([second.key])
    before = serving(operator, ("collector/0", 1), ("collector/1", 1))
    operator.disconnect(end_workers=False)

    successor = OperatorDriver(pickle.loads(handle))
    successor.connect()
    assert serving(successor, ("collector/0", 1), ("collector/1", 1)) == before
    successor.scale("collector", 1)
    successor.release([before[0].key])
    assert [info.key for info in successor.list_workers()] == [before[1].key]
    wait_until(lambda: is_gone(before[0].pid))
    assert "[collector/0] closed" in output.getvalue().splitlines()
    successor.scale("evaluator", 1)
    *_, stubborn = serving(successor, before[1].key, ("evaluator/0", 0))
    successor.disconnect()
    assert is_gone(before[1].pid) and is_gone(stubborn.pid)  # a worker that does not close is killed
    assert owned.list_workers() == []


def test_failed_start_is_reported_and_unknown_role_is_refused(operator):
    owned, output = operator
    operator = OperatorDriver(pickle.loads(pickle.dumps(owned)))
    operator.connect()
    operator.scale("learner", 1)
    wait_until(
        lambda: "No environment is called 'learner/0'." in operator.problems().get("learner/0", ""),
        lambda: f"{operator.problems()}, {output.getvalue()}",
        seconds=200.0,
    )
    assert "failed with exit code 4. It would fail again." in operator.problems()["learner/0"]
    operator.disconnect()
    with pytest.raises(UsageError, match="no workers of the role 'cook', only collector, learner, evaluator"):
        owned.scale("cook", 1)  # type: ignore[arg-type]
