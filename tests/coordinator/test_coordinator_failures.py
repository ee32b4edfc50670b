"""Tests of a Coordinator that is killed, is ending, or raises an exception."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from rlframe.coordinator import Coordinator, CoordinatorConfig
from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import NotReady
from rlframe.errors import CheckpointError, UsageError
from rlframe.metrics.rows import ActorCounts
from tests.coordinator.fakes import FakeCluster
from tests.waiting import wait_until


class Results:
    """A recorder that keeps the results."""

    def __init__(self) -> None:
        self.finished: list[dict[str, Any]] = []

    def begin(self, counts: ActorCounts) -> None:
        self.env_steps = counts.env_steps

    def write(self, env_steps: int, row: dict[str, Any], counts: ActorCounts) -> None:
        pass

    def finish(self, summary: dict[str, Any]) -> None:
        self.finished.append(summary)


class KilledAtTheEnd(Coordinator):
    """A coordinator that stops before it writes the result, as if it had been killed."""

    def _write_result(self, over: ev.Over) -> None:
        self._replay.close()


def make(
    cls: type[Coordinator], path: pathlib.Path, cluster: FakeCluster, results: Results, **until: Any
) -> Coordinator:
    cfg = CoordinatorConfig(str(path))
    return cls(TrainOne(**until), cluster.operator, cluster.replay, cluster.store, cfg, results)


def test_next_coordinator_writes_the_result_of_a_killed_coordinator(
    tmp_path: pathlib.Path,
) -> None:
    cluster, results = FakeCluster(), Results()
    make(KilledAtTheEnd, tmp_path, cluster, results, learner_steps=20).run()
    assert not results.finished and not (tmp_path / "status.json").exists()

    make(Coordinator, tmp_path, cluster, results, learner_steps=20).run()
    (result,) = results.finished
    assert result["evaluation"]["return_mean"] == 7.0 and result["learner_steps"] >= 20
    assert results.env_steps == result["env_steps"] > 0 and not result["failed"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["job"]["state"], status["replay"]["added"]) == ("CLOSED", cluster.replay.added)

    make(Coordinator, tmp_path, cluster, results, learner_steps=20).run()
    assert len(results.finished) == 1


def test_job_that_is_ending_refuses_requests(tmp_path: pathlib.Path) -> None:
    cluster = FakeCluster()
    coordinator = make(Coordinator, tmp_path, cluster, Results(), env_steps=10**9)
    coordinator.submit()
    wait_until(lambda: cluster.steps > 5, "training")
    cluster.worker("learner/0").scripts["close_task"] = lambda: NotReady()
    coordinator.cancel("enough")
    wait_until(lambda: coordinator.status()["job"]["state"] == "DRAINING", "the ending")
    for ask in (coordinator.pause, coordinator.evaluate_now, coordinator.checkpoint, coordinator.restore):
        with pytest.raises(UsageError, match="is ending and cannot be changed any more. enough"):
            ask()
    with pytest.raises(UsageError, match="is ending"):
        coordinator.scale("collector", 2)
    coordinator.cancel("once more")  # a repeated cancel is allowed
    cluster.worker("learner/0").scripts.clear()
    wait_until(lambda: coordinator.wait(1.0), "the end")
    coordinator.close()


def test_wait_raises_the_failure_of_the_coordinator(tmp_path: pathlib.Path) -> None:
    class FullDisk(Results):
        def begin(self, env_steps: int) -> None:
            raise CheckpointError("there is no room")

    coordinator = make(Coordinator, tmp_path, FakeCluster(), FullDisk(), learner_steps=20)
    coordinator.submit()
    with pytest.raises(CheckpointError, match="there is no room"):
        wait_until(lambda: coordinator.wait(1.0), "the failure")
    coordinator.close()
