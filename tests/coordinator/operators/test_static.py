"""Workers that are there already, in this process, by real Courier servers."""

from __future__ import annotations

import pytest

from rlframe.coordinator.messages import Alive
from rlframe.coordinator.operators.static import StaticOperator
from rlframe.coordinator.workers.process import WorkerServer
from tests.coordinator.operators.driven import Driven
from tests.extras import needs
from tests.ports import free_address, free_port
from tests.waiting import wait_until


class Answers:
    def __init__(self, worker_id: str, incarnation: int = 0) -> None:
        self._alive = Alive(worker_id, incarnation, "idle")

    def ping(self) -> Alive:
        return self._alive


@pytest.fixture
def serve():
    needs("launchpad")
    servers = []

    def start(worker_id: str, incarnation: int = 0, address: str | None = None) -> tuple[str, WorkerServer]:
        servers.append(WorkerServer(Answers(worker_id, incarnation), address=address))
        return servers[-1].address, servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_it_lists_those_that_answer_and_says_what_is_wrong_with_the_others(serve, tmp_path):
    learner, _ = serve("learner/0", incarnation=3)
    swapped, _ = serve("collector/0")
    operator = Driven(StaticOperator({"learner": [learner], "collector": [free_address(), swapped]}), tmp_path)
    operator.connect()
    (info,) = wait_until(operator.list)
    assert (info.key, info.address, info.host, info.pid) == (("learner/0", 3), learner, "localhost", None)
    assert "has not answered yet" in operator.problems()["collector/0"]
    wait_until(lambda: operator.problems()["collector/1"] == f"At {swapped} is collector/0, not collector/1.")
    operator.request("collector", 5)  # there are as many as there are
    assert operator.list() == [info]
    operator.disconnect()
    operator.disconnect()


def test_what_a_coordinator_wants_changes_nothing_and_a_worker_that_is_started_again_is_its_next_incarnation(
    serve, tmp_path
):
    address, first = serve("collector/0", address=f"localhost:{free_port()}")
    operator = Driven(StaticOperator({"collector": [address]}), tmp_path)
    (info,) = operator.connect()
    operator.report_failed([info.key])  # who is lost is not taken back by a coordinator: see its core
    operator.release([info.key])
    assert [(each.key, each.stays) for each in operator.list()] == [(("collector/0", 0), True)]
    first.stop()
    serve("collector/0", 1, address)
    wait_until(lambda: [each.key for each in operator.list()] == [("collector/0", 1)])
    operator.disconnect()
    assert operator.events[-1].why == ""


def test_it_must_be_given_a_worker():
    with pytest.raises(ValueError, match="needs the address of a worker"):
        StaticOperator({"collector": []})
