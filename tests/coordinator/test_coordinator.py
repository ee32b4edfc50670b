"""Tests of the Coordinator with real threads and a real journal, but fake workers and a fake operator."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlframe.coordinator import Coordinator, CoordinatorConfig
from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.config import Limits
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.journal import Journal
from rlframe.coordinator.messages import Collected, Failed, Learned
from rlframe.errors import UsageError
from rlframe.stop_conditions import StopReason
from tests.coordinator.fakes import FakeCluster
from tests.small_disk import small_disk
from tests.waiting import wait_until

__all__ = ["small_disk"]

LIMITS = Limits(
    ping_every=0.2,
    suspect_after=2.0,
    lost_after=4.0,
    lost_after_starting=6.0,
    starting_deadline=30.0,
    progress_deadline=30.0,
    close_deadline=30.0,
    evaluation_deadline=30.0,
    healthy_after=0.3,
    retry_after=0.02,
    slice=0.01,
)


class Coordinators:
    """A factory of coordinators with the same directory."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.cluster = path, FakeCluster()
        self.made: list[Coordinator] = []

    def submit(self, *, collectors: int = 1, **limits: Any) -> Coordinator:
        commander = TrainOne(**(limits or {"env_steps": 10**9}))
        cfg = CoordinatorConfig(str(self.path), collectors=collectors, limits=LIMITS)
        made = Coordinator(commander, self.cluster.operator, self.cluster.replay, self.cluster.store, cfg)
        made._job.requests.count_is_manual = True  # turn off automatic scaling
        self.made.append(made)
        made.submit()
        return made

    def running(self, **kwargs: Any) -> Coordinator:
        coordinator = self.submit(**kwargs)
        wait_until(lambda: job(coordinator)["learner_steps"] > 5 and job(coordinator)["env_steps"] > 5, "training")
        return coordinator

    def kill(self, coordinator: Coordinator) -> None:
        """Simulate the death of the coordinator's process: it does nothing more, and the workers continue."""
        coordinator._journal.write = coordinator._journal.note = lambda *_: None  # type: ignore[method-assign]
        coordinator._carry_out = collections.defaultdict(lambda: lambda effect: None)
        coordinator._calls.close()
        coordinator._operator.close()
        coordinator._replay.close()
        coordinator._job.state = type(coordinator._job.state).CLOSED
        assert coordinator._thread is not None
        coordinator._thread.join(60.0)
        assert not coordinator._thread.is_alive()


@pytest.fixture
def coordinators(tmp_path: pathlib.Path) -> Iterator[Coordinators]:
    coordinators = Coordinators(tmp_path)
    yield coordinators
    coordinators.cluster.operator.is_out = False
    for worker in coordinators.cluster.operator.workers.values():
        worker.may_continue.set()
    for coordinator in coordinators.made:
        coordinator.close()


def job(coordinator: Coordinator) -> dict[str, Any]:
    return coordinator.status()["job"]


def state_of(coordinator: Coordinator, worker_id: str) -> tuple[str, int] | None:
    found = [w for w in coordinator.status()["workers"] if w["worker_id"] == worker_id]
    return (found[0]["state"], found[0]["incarnation"]) if found else None


def finish(coordinator: Coordinator) -> dict[str, Any]:
    wait_until(lambda: coordinator.wait(1.0), "the end")
    return job(coordinator)


def test_calls_have_the_documented_order(coordinators: Coordinators) -> None:
    assert finish(coordinators.submit(learner_steps=40))["state"] == "CLOSED"
    learner, collector = coordinators.cluster.calls("learner/0"), coordinators.cluster.calls("collector/0")
    assert (learner[0], learner[-1]) == ("start_task", "close_task")
    assert all(before == "data_demand" for before, method in itertools.pairwise(learner) if method == "learn")
    assert set(learner[1:-1]) == {"data_demand", "learn"}
    assert (collector[0], collector[-1], set(collector[1:-1])) == ("start_task", "close_task", {"get_data"})
    assert coordinators.cluster.calls("evaluator/0") == ["start_task", "get_data", "close_task"]
    closes = [called.worker_id for called in coordinators.cluster.trace if called.method == "close_task"]
    assert closes == ["collector/0", "learner/0", "evaluator/0"]
    assert coordinators.cluster.operator.disconnects == 1


def test_collectors_start_after_the_learner(coordinators: Coordinators) -> None:
    coordinators.cluster.operator.held = {"learner"}
    coordinator = coordinators.submit(collectors=3)
    wait_until(lambda: state_of(coordinator, "collector/2") == ("IDLE", 0), "collectors")
    assert not coordinators.cluster.trace and job(coordinator)["state"] == "WAITING"
    coordinators.cluster.operator.held = set()
    wait_until(lambda: len(coordinators.cluster.replay.writers) > 3, "collecting")
    assert coordinators.cluster.trace[0][:2] == ("learner/0", "start_task")


def test_each_learned_batch_gives_one_update(coordinators: Coordinators) -> None:
    coordinator = coordinators.submit(learner_steps=50)
    finish(coordinator)
    coordinator.close()
    learned = [called.reply for called in coordinators.cluster.trace if isinstance(called.reply, Learned)]
    batches = [int(update.keys[0, 0]) for reply in learned for update in reply.updates]
    assert [key for keys, _ in coordinators.cluster.replay.updates for key in keys] == batches
    assert len(set(batches)) == len(batches) >= 50 and not coordinators.cluster.replay.out
    accounts = coordinator.status()["accounts"]
    assert accounts["learned"] == len(batches) == job(coordinator)["learner_steps"]
    assert accounts["learns"] == len(learned) and accounts["granted"] == len(batches)


def test_closing_result_of_a_collector_is_counted(coordinators: Coordinators) -> None:
    coordinator = coordinators.running(collectors=2)
    coordinator.scale("collector", 1)
    wait_until(lambda: job(coordinator)["env_steps"] >= 1000, "the closing result")
    coordinator.cancel()
    assert finish(coordinator)["env_steps"] >= 2000


def test_late_collector_is_used(coordinators: Coordinators) -> None:
    coordinators.cluster.operator.held = {"collector"}
    coordinator = coordinators.submit()
    wait_until(lambda: job(coordinator)["state"] == "RUNNING", "the learner")
    assert job(coordinator)["env_steps"] == 0 and job(coordinator)["waits_for"] in ("data", None)
    coordinators.cluster.operator.held = set()
    wait_until(lambda: job(coordinator)["learner_steps"] > 5, "training")


@pytest.mark.parametrize(
    ("how", "role"),
    [
        ("kill", "learner/0"),
        pytest.param("stop", "collector/0", marks=pytest.mark.system),
        pytest.param("kill", "collector/0", marks=pytest.mark.system),
        pytest.param("stop", "learner/0", marks=pytest.mark.system),
    ],
)
def test_dead_or_hanging_worker_is_replaced(coordinators: Coordinators, role: str, how: str) -> None:
    coordinator = coordinators.running()
    worker = coordinators.cluster.worker(role)
    if how == "kill":
        worker.is_dead = True
    else:
        worker.may_continue.clear()
    wait_until(lambda: state_of(coordinator, role) == ("BUSY", 1), "a replacement")
    steps, learned = job(coordinator)["env_steps"], job(coordinator)["learner_steps"]
    worker.may_continue.set()
    wait_until(
        lambda: job(coordinator)["env_steps"] > steps and job(coordinator)["learner_steps"] > learned, "training"
    )
    assert job(coordinator)["restarts"] == 1 and coordinators.cluster.operator.made.count((role, 1)) == 1


@pytest.mark.parametrize("role", ["collector/0", "learner/0"])
def test_task_that_raises_is_retried(coordinators: Coordinators, role: str) -> None:
    coordinator = coordinators.running()
    method = "get_data" if role == "collector/0" else "data_demand"
    coordinators.cluster.worker(role).scripts[method] = lambda: Failed("ValueError", "boom")
    wait_until(lambda: job(coordinator)["retries"] == 1, "a retry")
    steps, learned = job(coordinator)["env_steps"], job(coordinator)["learner_steps"]
    wait_until(
        lambda: job(coordinator)["env_steps"] > steps and job(coordinator)["learner_steps"] > learned, "training"
    )
    assert any("ValueError: boom" in note["text"] for note in coordinator.events())
    assert (job(coordinator)["state"], job(coordinator)["restarts"]) == ("RUNNING", 0)


@pytest.mark.system
def test_busy_and_idle_workers_can_be_removed(coordinators: Coordinators) -> None:
    coordinator = coordinators.running(collectors=2)
    coordinator.scale("collector", 1)
    wait_until(lambda: "collector/1" not in coordinators.cluster.operator.workers, "the end of the busy worker")
    assert coordinators.cluster.calls("collector/1")[-1] == "close_task"
    coordinators.cluster.operator.held = {"learner"}
    coordinators.cluster.worker("learner/0").is_dead = True
    coordinator.pause()
    wait_until(lambda: job(coordinator)["state"] == "PAUSED", "the pause")
    coordinator.scale("collector", 2)
    wait_until(lambda: state_of(coordinator, "collector/1") == ("IDLE", 1), "an idle worker")
    coordinator.scale("collector", 1)
    wait_until(lambda: "collector/1" not in coordinators.cluster.operator.workers, "the end of the idle worker")
    assert state_of(coordinator, "collector/1") is None


def test_failure_reported_twice_gives_one_replacement(coordinators: Coordinators) -> None:
    coordinator = coordinators.running()
    for _ in range(2):
        coordinator._operator.put(ev.Replace(("collector/0", 0)))
    wait_until(lambda: state_of(coordinator, "collector/0") == ("BUSY", 1), "a replacement")
    coordinator._operator.put(ev.Replace(("collector/0", 0)))
    steps = job(coordinator)["env_steps"]
    wait_until(lambda: job(coordinator)["env_steps"] > steps + 5, "training")
    assert coordinators.cluster.operator.made.count(("collector/0", 1)) == 1
    assert ("collector/0", 2) not in coordinators.cluster.operator.made and job(coordinator)["restarts"] == 1


def test_training_continues_during_an_operator_outage_and_requests_are_met_after_it(coordinators: Coordinators) -> None:
    coordinator = coordinators.running()
    coordinators.cluster.operator.is_out = True
    wait_until(lambda: not coordinator.status()["operator"]["connected"], "the outage")
    coordinator.scale("collector", 3)
    steps = job(coordinator)["learner_steps"]
    wait_until(lambda: job(coordinator)["learner_steps"] > steps + 10, "training")
    assert state_of(coordinator, "collector/2") is None
    coordinators.cluster.operator.is_out = False
    wait_until(lambda: state_of(coordinator, "collector/2") == ("BUSY", 0), "the collector requested during the outage")
    operator = coordinator.status()["operator"]
    assert operator == {"kind": "FakeOperator", "connected": True, "problem": "", "problems": {}}


def test_later_requests_do_not_undo_a_stop(coordinators: Coordinators) -> None:
    coordinator = coordinators.running()
    coordinator.cancel("enough")
    wait_until(lambda: job(coordinator)["state"] in ("DRAINING", "CLOSED"), "the ending")
    coordinator._events.put(ev.PauseRequested(False))
    coordinator._events.put(ev.ScaleRequested("collector", 4))
    coordinator._events.put(ev.EndRequested(StopReason("interrupt", "another reason")))
    assert (finish(coordinator)["state"], job(coordinator)["reason"]) == ("CLOSED", "enough")
    with pytest.raises(UsageError, match=r"over: CLOSED \(enough\)"):
        coordinator.unpause()
    with pytest.raises(UsageError, match="is over"):
        coordinators.submit()


@pytest.mark.system
@pytest.mark.parametrize("is_out", [False, True])
def test_close_takes_bounded_time_and_leaves_no_thread(coordinators: Coordinators, is_out: bool) -> None:
    before = set(threading.enumerate())
    coordinator = coordinators.running()
    coordinators.cluster.worker("collector/0").may_continue.clear()  # this worker does not close its task
    coordinators.cluster.operator.is_out = is_out
    began = time.monotonic()
    coordinator.close()
    coordinator.close()
    assert time.monotonic() - began < 60.0
    coordinators.cluster.trace.clear()
    for worker in coordinators.cluster.operator.workers.values():
        worker.may_continue.set()
    if not is_out:
        assert job(coordinator)["state"] == "CLOSED" and not coordinators.cluster.operator.workers
    wait_until(
        lambda: not [t for t in set(threading.enumerate()) - before if not t.name.startswith("node ")],
        "the end of the threads",
    )


def test_evaluation_uses_the_saved_version_and_adds_nothing_to_the_buffer(coordinators: Coordinators) -> None:
    coordinator = coordinators.running()
    coordinator.evaluate_now()
    wait_until(lambda: job(coordinator)["evaluated_version"] is not None, "an evaluation")
    started = next(c for c in coordinators.cluster.trace if c[:2] == ("evaluator/0", "start_task"))
    assert started.header is not None
    assert (
        job(coordinator)["evaluated_version"]
        == coordinators.cluster.worker("evaluator/0").start.options["params_version"]
    )
    assert job(coordinator)["evaluated_version"] == coordinators.cluster.saved  # the learner had saved this version
    assert set(coordinators.cluster.replay.writers) == {"collector/0"}
    wait_until(lambda: not coordinators.cluster.store.pins, "the end of the pin")


def test_counters_do_not_fall_when_the_coordinator_restarts(coordinators: Coordinators) -> None:
    first = coordinators.running(collectors=2)
    first.evaluate_now()
    wait_until(lambda: job(first)["eval_return"] == 7.0, "an evaluation")
    before, accounts = job(first), first.status()["accounts"]
    numbers = [note["number"] for note in first.events()]
    coordinators.kill(first)
    second = coordinators.submit()
    after = job(second)
    assert all(after[name] >= before[name] for name in ("env_steps", "learner_steps", "params_version"))
    assert after["coordinator_restarts"] == 1 and after["evaluated_version"] == before["evaluated_version"]
    wait_until(lambda: job(second)["learner_steps"] > before["learner_steps"] + 10, "training")
    assert all(second.status()["accounts"][name] >= value for name, value in accounts.items())
    # The workers continued during the restart.
    assert {worker.incarnation for worker in coordinators.cluster.operator.workers.values()} == {0}
    assert second.status()["wanted"]["collector"] == 2
    assert second.events(numbers[-1])[0]["number"] == numbers[-1] + 1


def test_stale_and_repeated_replies_change_nothing(coordinators: Coordinators) -> None:
    coordinator = coordinators.running()
    coordinator.pause()
    wait_until(lambda: job(coordinator)["state"] == "PAUSED", "the pause")
    machine = coordinator._job
    wait_until(lambda: all(worker.call is None for worker in machine.roster), "the last replies")
    wait_until(lambda: machine.accounts.to_json() == coordinator._journaled_accounts, "the journal")
    learned = [called for called in list(coordinators.cluster.trace) if isinstance(called.reply, Learned)]
    collected = [called for called in list(coordinators.cluster.trace) if isinstance(called.reply, Collected)]
    before = {name: value for name, value in coordinator.status()["accounts"].items() if name != "stale"}
    steps, version = job(coordinator)["env_steps"], job(coordinator)["params_version"]
    assert learned and collected
    for called in (learned[0], learned[-1], collected[0]):
        header = called.header
        assert header is not None
        coordinator._events.put(ev.Replied((called.worker_id, header.incarnation), called.method, header, called.reply))
    foreign = dataclasses.replace(learned[-1].header, incarnation=7)
    update = Learned(10**6, 10**6, (), 0)
    coordinator._events.put(ev.Replied(("learner/0", 7), "learn", foreign, update))
    wait_until(lambda: coordinator.status()["accounts"]["stale"] >= 4, "the count of stale replies")
    after = {name: value for name, value in coordinator.status()["accounts"].items() if name != "stale"}
    assert after == before and job(coordinator)["params_version"] == version
    assert job(coordinator)["env_steps"] == steps
    assert np.all(np.diff(coordinators.cluster.store.versions) > 0)


@pytest.mark.system
def test_job_survives_a_full_disk_and_the_journal_is_completed_later(coordinators: Coordinators, small_disk) -> None:
    coordinators.path = small_disk.path
    coordinator = coordinators.running(learner_steps=400)
    small_disk.fill()
    learned = job(coordinator)["learner_steps"]
    wait_until(lambda: job(coordinator)["learner_steps"] > learned + 20, "learning")
    small_disk.free()
    assert finish(coordinator)["state"] == "CLOSED"
    coordinator.close()
    state = Journal(small_disk.path / "journal.jsonl").state
    assert state is not None and (state["state"], state["result_is_written"]) == ("CLOSED", True)
