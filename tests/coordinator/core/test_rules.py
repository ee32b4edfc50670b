"""Tests of individual rules of the state machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core import tasks, worker_tracking
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.machine import advance
from rlframe.coordinator.core.records import Accounts, Tasks
from rlframe.coordinator.messages import (
    Alive,
    Evaluated,
    Failed,
    Learn,
    Learned,
    NotReady,
    StartTask,
    Update,
    WorkerInfo,
)
from rlframe.coordinator.states import JobState, TaskState, WorkerState
from rlframe.metrics.rows import ActorCounts, add_point
from rlframe.stop_conditions import StopReason
from tests.coordinator.core.simulation import LIMITS, Simulation, SimWorker
from tests.coordinator.core.test_machine import at_work, learner, running, state


def calls(sim: Simulation, worker_id: str, since: int = 0) -> list[str]:
    return [s.method for s in sim.sent[since:] if s.key[0] == worker_id and s.header is not None]


# --- the next call


def test_collector_that_connects_during_a_pause_starts_after_it() -> None:
    sim = running(1)
    sim.deliver(ev.PauseRequested(True))
    sim.deliver(ev.ScaleRequested("collector", 2))
    sim.run(20.0)
    assert state(sim, "collector/1") is WorkerState.IDLE and not calls(sim, "collector/1")
    sim.deliver(ev.PauseRequested(False))
    assert sim.run(10.0, lambda: at_work(sim) == 2)


def test_released_learner_closes_after_its_pending_draw() -> None:
    sim = running(1)
    (task,) = sim.job.tasks.open("learn")
    assert sim.run(20.0, lambda: task.drawing is not None)
    sent = len(sim.sent)
    sim.deliver(ev.ScaleRequested("learner", 0))
    sim.run(10.0)
    assert set(calls(sim, "learner/0", sent)[:2]) <= {"learn", "close_task"}
    assert "learn" not in calls(sim, "learner/0", sent)[calls(sim, "learner/0", sent).index("close_task") :]
    assert task.state is TaskState.SUCCEEDED and not sim.buffer.out


def test_batches_drawn_for_a_lost_learner_are_finished() -> None:
    sim = running(1)
    (task,) = sim.job.tasks.open("learn")
    enough = sim.buffer.BATCH
    assert sim.run(20.0, lambda: task.drawing is not None and len(sim.buffer.items) >= enough)
    header, lost = task.drawing, sim.job.accounts.lost
    sim.kill(learner(sim))
    # The learner is missing in the operator's list, and the drawn batches arrive later.
    worker_tracking.update_from_list(sim.job, sim.operator.list_workers())
    batch = sim.buffer.draw()
    assert batch is not None and header is not None
    sim.deliver(ev.BatchesDrawn(header, (batch,)))
    assert sim.job.accounts.lost == lost + 1 and int(batch.keys[0, 0]) not in sim.buffer.out


def test_call_is_repeated_once_after_a_duplicate_not_ready_reply() -> None:
    sim = running(1)
    worker = sim.job.roster.get("collector/0")
    assert worker is not None
    assert sim.run(5.0, lambda: worker.call is not None and worker.called_at <= sim.now)
    assert worker.call is not None
    not_yet = ev.Replied(("collector/0", 0), worker.call.method, worker.call.header, NotReady())
    sent = len(sim.sent)
    sim.deliver(not_yet)
    sim.deliver(not_yet)
    assert calls(sim, "collector/0", sent) == [worker.call.method]


def starving(by_key: bool) -> Simulation:
    """Return a simulation whose learner waits for data, because no collected data reaches the buffer."""
    sim = running(1, by_key=by_key)
    sim.buffer.add = lambda count, source: None  # type: ignore[method-assign]
    assert sim.run(30.0, lambda: sim.job.learner.waits_for == "data")
    sim.run(5.0)
    return sim


@pytest.mark.parametrize("by_key", [True, False])
def test_learner_that_waits_for_data_is_not_restarted(by_key: bool) -> None:
    sim = starving(by_key)
    waited = sim.job.learner.seconds_without_data(sim.now)
    sim.run(200.0)
    assert sim.job.accounts.restarts == 0 and sim.job.accounts.retries == 0
    assert sim.job.learner.seconds_without_data(sim.now) - waited == pytest.approx(200.0, abs=0.5)


def test_unused_grant_is_taken_back_when_the_job_ends() -> None:
    sim = starving(by_key=False)
    assert sim.job.tasks.open("learn")[0].granted > 0
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    assert sim.run(20.0, lambda: sim.is_over)
    accounts = sim.job.accounts
    assert accounts.lost == 0 and accounts.granted == accounts.learned + accounts.dropped


def test_no_batch_is_drawn_during_a_pause() -> None:
    sim = running(1)
    worker = sim.job.roster.get("learner/0")
    assert worker is not None
    assert sim.run(20.0, lambda: worker.call is not None and worker.call.method == "data_demand")
    sim.deliver(ev.PauseRequested(True))
    drawn = sim.buffer.drawn
    sim.run(5.0)
    assert sim.buffer.drawn == drawn


@pytest.mark.parametrize("by_key", [True, False])
def test_unreported_batches_are_dropped_if_drawn_and_taken_back_if_granted(by_key: bool) -> None:
    sim = running(1, by_key=by_key)
    (task,), worker = sim.job.tasks.open("learn"), sim.job.roster.get("learner/0")
    assert worker is not None
    assert sim.run(30.0, lambda: task.granted > 1 and worker.call is not None and worker.call.method == "learn")
    assert worker.call is not None
    accounts, granted = dataclasses.replace(sim.job.accounts), task.granted
    one = (Update(task.batches[0].keys if by_key else np.zeros((1, 3), np.int64)),)
    version, steps = accounts.params_version + 1, accounts.learner_steps + 1
    sim.deliver(ev.Replied(("learner/0", 0), "learn", worker.call.header, Learned(version, steps, one)))
    now = sim.job.accounts
    assert now.learned == accounts.learned + 1 and now.lost == accounts.lost
    assert now.dropped - accounts.dropped == (granted - 1 if by_key else 0)
    assert accounts.granted - now.granted == (0 if by_key else granted - 1)


def test_collector_gets_the_task_with_the_same_index() -> None:
    sim = running(3)
    for _ in range(4):
        for worker in sim.live("collector"):
            sim.kill(worker)
        assert sim.run(30.0, lambda: at_work(sim) == 0)
        assert sim.run(30.0, lambda: at_work(sim) == 3)
        assert {t.worker_id for t in sim.job.tasks.open("collect")} == {f"collector/{i}" for i in range(3)}
        assert all(task.worker_id == f"collector/{task.index}" for task in sim.job.tasks.open("collect"))


def test_start_of_a_learner_contains_the_newest_version() -> None:
    sim = running(1)
    version = sim.job.accounts.params_version
    sim.kill(learner(sim))
    assert sim.run(30.0, lambda: sim.job.state is JobState.DEGRADED)
    version = sim.job.accounts.params_version
    assert sim.run(30.0, lambda: sim.job.state is JobState.RUNNING)
    start = next(s for s in sim.sent if (s.key, s.method) == (("learner/0", 1), "start_task"))
    assert start.args[0].options["min_version"] == version > 0


def test_epoch_and_attempt_of_learners_rise() -> None:
    sim = running(1)
    sim.kill(learner(sim))
    assert sim.run(30.0, lambda: sim.job.state is JobState.DEGRADED)
    assert sim.run(30.0, lambda: sim.job.state is JobState.RUNNING)
    sim.kill_coordinator()
    sim.kill(learner(sim))
    sim.start_coordinator()
    assert sim.run(60.0, lambda: sim.job.state is JobState.RUNNING)
    sim.deliver(ev.ScaleRequested("learner", 0))  # the task is closed; the next task counts its attempts from 0
    assert sim.run(30.0, lambda: not sim.job.tasks.open("learn"))
    sim.deliver(ev.ScaleRequested("learner", 1))
    assert sim.run(60.0, lambda: sim.job.state is JobState.RUNNING)
    starts = {}
    for send in sim.sent:
        if send.method == "start_task" and send.args[0].kind == "learn":
            starts[send.header.task_id, send.header.attempt] = (send.args[0].options["epoch"], send.header.attempt)
    attempts = list(starts.values())
    assert [number for _, number in attempts] == [0, 1, 2, 0]
    assert attempts == sorted(attempts) and attempts[0][0] == attempts[2][0] < attempts[3][0]


def test_number_of_granted_batches_is_limited() -> None:
    sim = running(1, limits=dataclasses.replace(LIMITS, grant=2))
    sim.run(20.0)
    granted = [send.args[0].count for send in sim.sent if send.method == "learn"]
    assert max(granted) == 2


def test_requested_checkpoint_is_saved_once() -> None:
    sim = running(1)
    sent = len(sim.sent)
    sim.deliver(ev.CheckpointRequested())
    sim.run(10.0)
    learns: dict[int, Learn] = {s.header.seq: s.args[0] for s in sim.sent[sent:] if s.method == "learn" and s.header}
    assert [learn.save for learn in learns.values()].count(True) == 1 and len(learns) > 2


def test_requested_checkpoint_of_a_paused_job_is_saved_at_once() -> None:
    sim = running(1)
    sim.deliver(ev.PauseRequested(True))
    sim.run(10.0)
    sent = len(sim.sent)
    sim.deliver(ev.CheckpointRequested())
    sim.run(10.0)
    learns: dict[int, Learn] = {s.header.seq: s.args[0] for s in sim.sent[sent:] if s.method == "learn" and s.header}
    assert [learn.save for learn in learns.values()] == [True] and sim.job.state is JobState.PAUSED


def test_only_one_learner_per_policy_gets_a_task() -> None:
    class Eager(TrainOne):
        def task(self, role: Any, index: int, view: Any) -> StartTask | None:
            return StartTask("learn" if role == "learner" else "collect", "main")

    sim = Simulation(commander=Eager(env_steps=10**9))
    sim._wanted["learner"] = 2
    sim.kill_coordinator()
    sim.journal = None
    sim.start_coordinator()
    sim.run(30.0)
    assert len(sim.live("learner")) == 2 and len(sim.job.tasks.open("learn")) == 1
    assert sorted(state(sim, f"learner/{index}").name for index in (0, 1)) == ["BUSY", "IDLE"]


# --- workers


def test_surplus_worker_is_released() -> None:
    sim = running(1)
    sim.operator.wanted["collector"] = 2  # as if an earlier coordinator had requested two collectors
    assert sim.run(20.0, lambda: sim.job.roster.newest("collector/1") is not None)
    sim.run(5.0)
    assert state(sim, "collector/1") is WorkerState.GONE and not calls(sim, "collector/1")


def test_lost_worker_is_replaced_and_surplus_worker_is_released() -> None:
    sim = running(2)
    told: list[tuple[str, Any]] = []
    for name in ("replace", "release"):
        tell = getattr(sim.operator, name)
        setattr(sim.operator, name, lambda key, name=name, tell=tell: (told.append((name, key)), tell(key)))
    sim.kill(sim.live("collector")[0])
    assert sim.run(10.0, lambda: bool(told)) and told == [("replace", ("collector/0", 0))]
    assert sim.run(30.0, lambda: at_work(sim) == 2)
    sim.deliver(ev.ScaleRequested("collector", 1))
    assert sim.run(10.0, lambda: len(told) == 2) and told[1] == ("release", ("collector/1", 0))


def test_workers_are_pinged_periodically() -> None:
    sim = running(1)
    sent = len(sim.sent)
    sim.run(30.0)
    pings = [send for send in sim.sent[sent:] if (send.key[0], send.method) == ("collector/0", "ping")]
    assert 9 <= len(pings) <= 11


def test_worker_with_an_address_that_never_replies_is_replaced() -> None:
    sim = running(1)
    sim.deliver(ev.ScaleRequested("collector", 2))
    assert sim.run(10.0, lambda: len(sim.live("collector")) == 2)
    sim.stop(sim.live("collector")[1])
    assert sim.run(LIMITS.lost_after_starting + 5.0, lambda: sim.job.accounts.restarts == 1)
    assert any("collector/1 (incarnation 0) is lost: it did not start within 6" in note.text for note in sim.notes)


def test_worker_may_be_silent_for_longer_while_its_task_starts() -> None:
    sim = running(1)
    sim.deliver(ev.ScaleRequested("collector", 2))
    assert sim.run(20.0, lambda: bool(calls(sim, "collector/1")))
    worker = sim.live("collector")[1]
    sim.stop(worker)
    sim.run(LIMITS.lost_after + 20.0)
    assert state(sim, "collector/1") is WorkerState.BUSY
    sim.resume(worker)
    assert sim.run(10.0, lambda: at_work(sim) == 2)
    assert sim.job.accounts.restarts == 0


def test_successful_start_resets_the_count_of_failed_starts() -> None:
    sim = running(1, limits=dataclasses.replace(LIMITS, starting_deadline=10.0, max_failures=1))
    for _ in range(3):
        sim.operator.never_comes.add("collector")
        sim.kill(sim.live("collector")[0])
        lost = sim.job.accounts.restarts
        # One failure is the killed worker, and the other is a failed start.
        assert sim.run(30.0, lambda lost=lost: sim.job.accounts.restarts >= lost + 2)
        sim.operator.never_comes.clear()
        assert sim.run(30.0, lambda: at_work(sim) == 1)
    assert sim.job.state is JobState.RUNNING


def test_losses_of_a_collector_never_fail_the_job() -> None:
    sim = running(1, limits=dataclasses.replace(LIMITS, max_failures=1, healthy_after=1e6))
    for _ in range(4):
        sim.kill(sim.live("collector")[0])
        assert sim.run(30.0, lambda: at_work(sim) == 0)
        assert sim.run(30.0, lambda: at_work(sim) == 1)
    assert sim.job.state is JobState.RUNNING


def test_successful_work_resets_the_failure_count() -> None:
    sim = running(1, limits=dataclasses.replace(LIMITS, max_failures=1, healthy_after=5.0))
    for _ in range(4):
        sim.kill(learner(sim))
        assert sim.run(30.0, lambda: sim.job.state is JobState.DEGRADED)
        assert sim.run(30.0, lambda: sim.job.state is JobState.RUNNING)
        sim.run(5.0 + 2 * LIMITS.ping_every)
    assert sim.job.state is JobState.RUNNING and sim.job.accounts.retries == 4


def test_too_many_losses_of_the_learner_fail_the_job() -> None:
    sim = running(1, limits=dataclasses.replace(LIMITS, max_failures=1, healthy_after=1e6))
    sim.kill(learner(sim))
    assert sim.run(30.0, lambda: sim.job.state is JobState.DEGRADED)
    assert sim.job.learner.waits_for == "learner"
    assert sim.run(30.0, lambda: sim.job.state is JobState.RUNNING)
    sim.kill(learner(sim))
    assert sim.run(60.0, lambda: sim.is_over)
    assert sim.over == [ev.Over(True, "learn/1 failed 2 times: its process has ended")]


def test_learner_that_always_hangs_fails_the_job() -> None:
    sim = running(1, limits=dataclasses.replace(LIMITS, max_failures=1))
    seconds = sim.work_seconds
    sim.work_seconds = lambda method, who: 1e9 if method == "learn" else seconds(method, who)  # type: ignore[method-assign]
    for _ in range(2):
        assert sim.run(30.0, lambda: sim.job.state is JobState.RUNNING)
        sim.run(100.0)  # run for longer than `healthy_after`
        sim.kill(learner(sim))  # as the learner's supervisor would do
        sim.run(1.0)
    assert sim.run(60.0, lambda: sim.is_over)
    assert sim.over == [ev.Over(True, "learn/1 failed 2 times: its process has ended")]


# --- evaluations


def test_evaluation_of_a_wrong_version_is_retried() -> None:
    sim = running(1)
    sim.deliver(ev.EvaluationRequested())

    def working() -> bool:
        worker = sim.job.roster.get("evaluator/0")
        return worker is not None and worker.call is not None and worker.call.method == "get_data"

    assert sim.run(30.0, working)
    worker = sim.job.roster.get("evaluator/0")
    assert worker is not None and worker.call is not None
    values = {"return_mean": 500.0, "return_std": 0.0, "length_mean": 1.0, "episodes": 1.0}
    sim.deliver(ev.Replied(("evaluator/0", 0), "get_data", worker.call.header, Evaluated(10**6, values)))
    assert sim.job.accounts.evaluations == []
    assert sim.run(30.0, lambda: bool(sim.job.accounts.evaluations))
    assert sim.job.accounts.evaluations[0][1] != 500.0


def test_version_pinned_for_a_finished_evaluation_is_unpinned() -> None:
    sim = running(1)
    sim.store.pins.append(3)
    sim.deliver(ev.Pinned("evaluate/99", "main", 3))
    assert sim.store.pins == []


def test_evaluation_of_a_policy_without_versions_is_cancelled() -> None:
    sim = running(1)
    task = tasks.evaluate(sim.job, "other")
    sim.deliver(ev.Pinned(task.task_id, "other", -1))
    assert task.state is TaskState.CANCELLED


def test_evaluation_row_has_no_training_episodes() -> None:
    sim = running(1, commander=TrainOne(env_steps=400))
    assert sim.run(400.0, lambda: sim.is_over)
    (row,) = [row.values for row in sim.rows if "return_mean" in row.values]
    assert set(row) == {"return_mean", "return_std", "length_mean", "eval_episodes"} and row["eval_episodes"] == 1.0


def test_evaluations_start_at_most_once_per_period() -> None:
    sim = running(1, commander=TrainOne(env_steps=10**9, eval_every=200))
    sim.run(60.0)
    began = [note for note in sim.notes if note.kind == "evaluation"]
    assert 2 <= len(began) <= sim.job.accounts.env_steps // 200
    assert sim.job.accounts.evaluated_at > 0


# --- the ending


@pytest.mark.parametrize("what", ["collectors", "learner", "evaluation"])
def test_each_step_of_the_ending_has_a_deadline(what: str) -> None:
    sim = running(1, commander=TrainOne(env_steps=400))
    seconds = sim.work_seconds
    hangs = {"collectors": ("close_task", "collector"), "learner": ("close_task", "learner")}
    method, role = hangs.get(what, ("get_data", "evaluator"))

    def never(called: str, worker: SimWorker) -> float:
        sim.rng.random()
        return 1e9 if (called, worker.role) == (method, role) else seconds(called, worker)

    sim.work_seconds = never  # type: ignore[method-assign]
    assert sim.run(400.0, lambda: sim.is_over)
    (over,) = sim.over
    why = {
        "collectors": "400 of 400 environment steps were taken",
        "learner": "; but learn/1 did not close within 30 s",
        "evaluation": "; but the last evaluation failed: it was not done within 120 s",
    }[what]
    assert over.failed == (what == "learner") and why in over.reason


def test_failed_last_evaluation_does_not_fail_the_job(monkeypatch) -> None:
    sim = running(1, commander=TrainOne(env_steps=400))
    monkeypatch.setattr(SimWorker, "_evaluate", lambda worker: Failed("EnvError", "no license", is_permanent=True))
    assert sim.run(400.0, lambda: sim.is_over)
    (over,) = sim.over
    assert not over.failed and over.reason.endswith("; but the last evaluation failed: EnvError: no license")
    assert sim.job.ending is not None and sim.job.ending.evaluation_error == "EnvError: no license"


@pytest.mark.parametrize("by", ["steps", "callback"])
def test_job_without_evaluations_ends_when_the_learner_ends(by: str) -> None:
    sim = running(1, commander=TrainOne(env_steps=400))
    sim.job.evaluates = False
    if by == "callback":
        sim.deliver(ev.EndRequested(StopReason(by, "a callback stopped it"), evaluates=True))
    assert sim.run(400.0, lambda: sim.is_over)
    (over,) = sim.over
    assert not over.failed and not any("return_mean" in row.values for row in sim.rows)
    assert sim.job.ending is not None and sim.job.ending.evaluation_error is None
    assert sim.job.ending.reason.by == by and sim.job.requests.wanted["evaluator"] == 0


def test_end_request_limits_the_time_to_close() -> None:
    sim = running(1)
    sim.stop(sim.live("collector")[0])
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough"), within=2.0))
    assert sim.run(6.0, lambda: sim.is_over)


def test_job_ends_even_if_the_operator_never_reports_the_end_of_workers() -> None:
    sim = running(1)
    sim.operator.disconnect = lambda: None  # type: ignore[method-assign]
    deliver = sim.deliver
    sim.deliver = lambda event: None if isinstance(event, ev.WorkersEnded) else deliver(event)  # type: ignore
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    assert sim.run(LIMITS.close_deadline + 10.0, lambda: sim.is_over)
    assert any("did not answer within 30 s" in note.text for note in sim.notes)


def test_scale_request_during_the_ending_changes_nothing() -> None:
    sim = running(1)
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    sim.deliver(ev.ScaleRequested("collector", 5))
    assert sim.job.requests.wanted["collector"] == 1


def test_training_row_covers_the_time_since_the_last_row() -> None:
    sim = running(1, limits=dataclasses.replace(LIMITS, row_every=100), commander=TrainOne(env_steps=450))
    assert sim.run(200.0, lambda: sim.is_over)
    rows = [row for row in sim.rows if "steps_per_second" in row.values]
    assert [row.env_steps for row in rows] == [100, 200, 300, 400, sim.job.accounts.env_steps]
    assert [row.values["episodes"] for row in rows] == [10, 10, 10, 10, sim.job.accounts.env_steps // 10 - 40]
    assert {(row.values["episode_return"], row.values["episode_length"]) for row in rows} == {(5.0, 10.0)}
    assert {row.values["env/speed"] for row in rows} == {3.0}  # a value that the environments log
    assert all(20.0 < row.values["steps_per_second"] < 60.0 for row in rows[1:])  # it is about 10 / 0.25


def test_first_row_of_a_resumed_run_covers_only_the_new_session() -> None:
    before = ActorCounts({"before": [100.0, 10.0, 500.0, 100.0]})
    job = TrainingJob(TrainOne(env_steps=1000), LIMITS, {"learner": 1}, by_key=False, now=0.0, counts_before=before)
    job.write_row()
    assert job.effects == []
    job.accounts.add(dict(env_steps=50, episodes=2, return_sum=30.0, length_sum=50, rank=0, incarnation=0))
    job.now = 5.0
    job.write_row()
    (row,) = job.effects
    assert row.env_steps == 150 and job.accounts.evaluated_at == 100
    assert (row.values["episode_return"], row.values["episodes"], row.values["steps_per_second"]) == (15.0, 2, 10.0)


# --- accounts


def test_reply_without_logs_keeps_the_last_logs() -> None:
    accounts = Accounts()
    accounts.learn(Learned(3, 5, (), 2, {"loss": 0.5}))
    accounts.learn(Learned(2, 6, (), 1))
    assert accounts.logs == {"loss": 0.5} and accounts.dropped == 3
    assert (accounts.params_version, accounts.learner_steps) == (3, 6)  # version numbers never fall


def test_long_curves_are_thinned_but_keep_their_span() -> None:
    accounts = Accounts()
    for number in range(1300):
        accounts.add(dict(env_steps=number, episodes=0, return_sum=0.0, length_sum=0.0, rank=0, incarnation=0))
        add_point(accounts.returns, accounts.env_steps, float(number))
        add_point(accounts.evaluations, accounts.env_steps, float(number), number)
    for curve in (accounts.returns, accounts.evaluations):
        assert 250 <= len(curve) <= 500 and curve[0][0] == 0.0 and curve[-1][0] > 1280.0
        assert all(row[0] == row[1] for row in curve)


def test_only_the_newest_finished_tasks_are_kept() -> None:
    board = Tasks()
    for _ in range(200):
        board.add(StartTask("evaluate", "main")).become(TaskState.CANCELLED)
    kept = [task.task_id for task in board]
    assert len(kept) <= 52 and kept[-1] == "evaluate/200" and board.open("evaluate") == []
    assert board.add(StartTask("learn", "main")).task_id == "learn/201"


# --- operator and requests


def test_permanent_operator_error_fails_the_job_and_is_shown() -> None:
    sim = running(1)
    sim.deliver(ev.OperatorFailed("AttributeError: no such thing", is_permanent=True))
    assert sim.run(100.0, lambda: sim.is_over)
    assert sim.job.state is JobState.FAILED and "AttributeError: no such thing" in sim.job.reason


def test_second_evaluation_request_starts_no_second_evaluation() -> None:
    sim = running(1)
    sim.run(5.0)
    sim.deliver(ev.EvaluationRequested())
    sim.deliver(ev.EvaluationRequested())
    assert len(sim.job.tasks.open("evaluate")) == 1


def test_open_fragments_of_a_lost_collector_are_counted() -> None:
    sim = running(2)
    worker = sim.job.roster.get("collector/1")
    assert worker is not None
    worker.progress.num_envs = 8
    worker_tracking.mark_lost(sim.job, worker, "it was killed")
    assert sim.job.accounts.discarded == 8


def test_learner_publishes_higher_versions_than_the_previous_job() -> None:
    job = TrainingJob(TrainOne(env_steps=10), LIMITS, {"learner": 1}, by_key=False, now=0.0, min_version=70)
    advance(job, ev.Submitted(), 0.0)
    advance(job, ev.OperatorAnswered((WorkerInfo("learner", 0, 0, "there"),)), 1.0)
    effects = advance(job, ev.Replied(("learner/0", 0), "ping", None, Alive("learner/0", 0, "idle")), 2.0)
    (start,) = [effect.args[0] for effect in effects if isinstance(effect, ev.Send) and effect.method == "start_task"]
    assert start.options["min_version"] == 70 and job.to_json()["min_version"] == 70


def test_saved_state_does_not_change_with_the_job() -> None:
    sim = running(1)
    before = sim.job.to_json()
    sim.deliver(ev.ScaleRequested("collector", 2))
    assert (before["requests"]["wanted"]["collector"], sim.job.to_json()["requests"]["wanted"]["collector"]) == (1, 2)
