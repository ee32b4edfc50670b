"""Tests of whole jobs in simulated time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.config import Limits
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.machine import advance
from rlframe.coordinator.messages import Alive, CallRefused, Collected, Failed, Started, StartTask, WorkerInfo
from rlframe.coordinator.states import JobState, TaskState, WorkerState
from rlframe.stop_conditions import StopReason
from tests.coordinator.core.simulation import LIMITS, Simulation

ENDLESS = TrainOne(env_steps=10**9)


def running(collectors: int = 2, **kwargs: object) -> Simulation:
    sim = Simulation(collectors=collectors, commander=kwargs.pop("commander", ENDLESS), **kwargs)  # type: ignore[arg-type]
    assert sim.run(30.0, lambda: at_work(sim) == collectors and sim.job.accounts.learned > 3)
    return sim


def at_work(sim: Simulation) -> int:
    return sum(task.state is TaskState.RUNNING for task in sim.job.tasks.open("collect"))


def learner(sim: Simulation):
    return sim.live("learner")[0]


@pytest.mark.parametrize("by_key", [True, False])
def test_job_ends_at_its_limit_and_evaluates_its_last_version(by_key: bool) -> None:
    sim = Simulation(by_key=by_key, commander=TrainOne(env_steps=1000, eval_every=300))
    assert sim.run(200.0, lambda: sim.is_over)
    accounts = sim.job.accounts
    assert not sim.over[0].failed and sim.over[0].reason == "1,000 of 1,000 environment steps were taken"
    assert accounts.env_steps >= 1000 and accounts.learned > 0 and accounts.lost == 0
    # In the simulation the mean return is the version.
    assert accounts.evaluations[-1][1:] == [
        sim.store.newest,
        sim.store.newest,
    ]
    assert sim.job.ending is not None and sim.job.ending.evaluation["params_version"] == sim.store.newest
    assert sim.checkpoint == (accounts.learner_steps, sim.store.newest)  # the final policy was saved
    assert len(accounts.evaluations) >= 3 and not sim.store.pins and not sim.buffer.out
    assert not sim.live() and len(sim.over) == 1


@pytest.mark.parametrize("by_key", [True, False])
def test_each_evaluated_version_is_in_a_checkpoint(by_key: bool) -> None:
    sim = Simulation(by_key=by_key, commander=TrainOne(env_steps=1000, eval_every=100))
    assert sim.run(200.0, lambda: sim.is_over)
    versions = [version for _, _, version in sim.job.accounts.evaluations]
    assert len(versions) >= 4 and set(versions[:-1]) <= sim.saved and versions[-1] == sim.checkpoint[1]


@pytest.mark.parametrize("by_key", [True, False])
def test_learner_of_a_paused_job_saves_before_an_evaluation(by_key: bool) -> None:
    sim = running(by_key=by_key)
    sim.deliver(ev.PauseRequested(True))
    sim.run(10.0)
    sim.deliver(ev.EvaluationRequested())
    assert sim.run(30.0, lambda: bool(sim.job.accounts.evaluations))
    assert sim.job.accounts.evaluations[-1][2] in sim.saved
    assert sim.job.state is JobState.PAUSED and sim.job.accounts.lost == 0


def test_evaluation_waits_for_the_replacement_of_a_dead_learner() -> None:
    sim = running()
    sim.deliver(ev.EvaluationRequested())
    sim.kill(learner(sim))
    assert sim.run(60.0, lambda: bool(sim.job.accounts.evaluations))
    assert sim.job.accounts.evaluations[-1][2] in sim.saved


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_evaluation_starts_without_a_save_after_the_deadline(fault: str) -> None:
    sim = running(limits=dataclasses.replace(LIMITS, lost_after=math.inf, lost_after_starting=math.inf))
    sim.deliver(ev.EvaluationRequested())
    assert sim.run(60.0, lambda: not sim.job.tasks.open("evaluate"))
    if fault == "hangs":
        sim.stop(learner(sim))
    else:
        sim.operator.is_out = True
        sim.kill(learner(sim))
    sim.deliver(ev.EvaluationRequested())
    began = sim.now
    assert sim.run(300.0, lambda: len(sim.job.accounts.evaluations) == 2)
    assert LIMITS.progress_deadline <= sim.now - began < LIMITS.progress_deadline + 20.0
    texts = [note.text for note in sim.notes if "starts without a checkpoint of its version" in note.text]
    assert len(texts) == 1 and "no learner saved main within 120 s" in texts[0]


def test_calls_have_the_documented_order() -> None:
    sim = Simulation(commander=TrainOne(env_steps=100))
    assert sim.run(200.0, lambda: sim.is_over)
    asked = methods(sim, "learner")
    assert (asked[0], asked[-1], methods(sim, "collector")[-1]) == ("start_task", "close_task", "close_task")
    learns = [index for index, method in enumerate(asked) if method == "learn"]
    assert learns and all(asked[index - 1] == "data_demand" for index in learns)
    assert set(methods(sim, "collector")[1:-1]) == {"get_data"}
    assert methods(sim, "evaluator") == ["start_task", "get_data", "close_task"]
    first = next(send for send in sim.sent if send.header is not None and send.key[0] == "collector/0")
    # `Simulation` checks that a learner started before the first collector.
    assert (first.method, sim.sent[0].method) == (
        "start_task",
        "ping",
    )


def methods(sim: Simulation, role: str) -> list[str]:
    """Return the method names of the calls to the workers of a role. Leave out repeated calls."""
    found, seqs = [], set()
    for send in sim.sent:
        if send.header is not None and send.key[0].startswith(role) and send.header.seq not in seqs:
            seqs.add(send.header.seq)
            found.append(send.method)
    return found


def test_collectors_are_scaled_up_and_down_during_training() -> None:
    sim = running(1)
    sim.deliver(ev.ScaleRequested("collector", 4))
    assert sim.run(30.0, lambda: at_work(sim) == 4)
    sim.deliver(ev.ScaleRequested("collector", 2))
    assert sim.run(10.0, lambda: len(sim.live("collector")) == 2 and at_work(sim) == 2)
    closed = [send for send in sim.sent if send.method == "close_task"]
    assert {send.key[0] for send in closed} == {"collector/2", "collector/3"}
    assert sim.job.accounts.restarts == 0
    sim.run(20.0)
    assert [worker.worker_id for worker in sim.live("collector")] == ["collector/0", "collector/1"]


@pytest.mark.parametrize("role", ["learner", "collector"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_replacement_of_a_dead_or_hanging_worker_gets_the_same_index(role: str, how: str) -> None:
    sim = running(2)
    worker = sim.live(role)[0]
    getattr(sim, how)(worker)
    deadline = 1.0 if how == "kill" else LIMITS.lost_after + 1.0
    assert sim.run(deadline, lambda: sim.job.roster.newest(worker.worker_id).state is WorkerState.LOST)
    assert sim.job.state is (JobState.DEGRADED if role == "learner" else JobState.RUNNING)
    assert sim.run(30.0, lambda: sim.job.state is JobState.RUNNING and at_work(sim) == 2)
    new = sim.job.roster.newest(worker.worker_id)
    assert new.incarnation == worker.incarnation + 1 and new.state is WorkerState.BUSY
    assert sim.job.accounts.restarts == 1
    sim.resume(worker)  # replies of the old process have no effect
    sim.run(5.0)
    assert sim.job.roster.newest(worker.worker_id) is new


@pytest.mark.parametrize("method", ["get_data", "ping"])
def test_reply_of_another_worker_marks_the_worker_as_lost_without_a_failure(method: str) -> None:
    sim = running(1)
    (worker,) = (known for known in sim.job.roster if known.role == "collector")
    (task,) = sim.job.tasks.open("collect")
    key = (worker.worker_id, worker.incarnation)
    assert worker.call is not None
    header, reply = worker.call.header, CallRefused("The call is for another.", is_misdirected=True)
    if method == "ping":
        header, reply = None, Alive(worker.worker_id, worker.incarnation + 1, "idle")
    sim.deliver(ev.Replied(key, method, header, reply))
    assert worker.state is WorkerState.LOST and (task.failures, sim.job.accounts.restarts) == (0, 1)
    assert sim.run(30.0, lambda: at_work(sim) == 1)


def test_silent_worker_is_suspect_until_it_replies() -> None:
    sim = running(1)
    worker = sim.live("collector")[0]
    sim.stop(worker)
    assert sim.run(LIMITS.suspect_after + 1.0, lambda: state(sim, "collector/0") is WorkerState.SUSPECT)
    sim.resume(worker)
    assert sim.run(2.0, lambda: state(sim, "collector/0") is WorkerState.BUSY)
    assert sim.job.accounts.restarts == 0


def state(sim: Simulation, worker_id: str) -> WorkerState:
    worker = sim.job.roster.newest(worker_id)
    assert worker is not None
    return worker.state


def test_call_of_a_slow_worker_is_repeated_until_the_worker_ends() -> None:
    sim = running(1)
    slow = sim.live("collector")[0]
    seconds = sim.work_seconds
    sim.work_seconds = lambda method, who: 1e9 if who is slow else seconds(method, who)  # type: ignore[method-assign]
    sim.run(400.0)
    assert state(sim, "collector/0") is WorkerState.BUSY and sim.job.accounts.restarts == 0
    sim.kill(slow)
    assert sim.run(30.0, lambda: sim.job.accounts.restarts == 1 and at_work(sim) == 1)


def test_training_continues_during_an_operator_outage_and_requests_are_met_after_it() -> None:
    sim = running(2)
    sim.operator.is_out = True
    sim.kill(sim.live("collector")[1])
    steps = sim.job.accounts.env_steps
    sim.run(40.0)
    assert sim.job.accounts.env_steps > steps and sim.job.operator.problem
    assert at_work(sim) == 1  # no replacement during the outage
    sim.deliver(ev.ScaleRequested("collector", 3))
    sim.operator.is_out = False
    assert sim.run(30.0, lambda: at_work(sim) == 3)
    assert sim.job.operator.problem == ""


def test_pause_stops_collecting_and_learning() -> None:
    sim = running(2)
    sim.deliver(ev.PauseRequested(True))
    sim.run(3.0)
    accounts = sim.job.accounts
    before = accounts.env_steps
    sim.run(200.0)  # run for longer than `progress_deadline`
    assert (sim.job.state, accounts.env_steps, accounts.restarts) == (JobState.PAUSED, before, 0)
    sim.deliver(ev.PauseRequested(False))
    sim.run(3.0)
    assert sim.job.state is JobState.RUNNING and accounts.env_steps > before


@pytest.mark.parametrize("after", [0.0, 0.3, 1.5, 4.0, 20.0])
@pytest.mark.parametrize("is_out", [True, False])
def test_job_can_be_cancelled_at_any_time_and_ends_soon(after: float, is_out: bool) -> None:
    sim = Simulation(commander=ENDLESS)
    sim.operator.is_out = is_out
    sim.run(after)
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough"), within=6.0))
    assert sim.run(20.0, lambda: sim.is_over)
    assert (sim.over[0].failed, sim.over[0].reason) == (False, "enough")


def test_later_requests_and_a_restart_do_not_undo_a_stop() -> None:
    sim = running(1)
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    sim.deliver(ev.PauseRequested(False))
    sim.deliver(ev.ScaleRequested("collector", 3))
    sim.deliver(ev.EndRequested(StopReason("interrupt", "another reason")))
    sim.kill_coordinator()
    sim.start_coordinator()
    assert sim.job.ending is not None
    assert sim.run(60.0, lambda: sim.is_over)
    assert sim.over == [ev.Over(False, "enough")]


def test_restarted_coordinator_adopts_running_workers() -> None:
    sim = running(2)
    keys = sorted(worker.key for worker in sim.live())
    steps, learned = sim.job.accounts.env_steps, sim.job.accounts.learned
    sim.kill_coordinator()
    sim.run(5.0)
    sim.start_coordinator()
    assert sim.run(5.0, lambda: at_work(sim) == 2 and sim.job.state is JobState.RUNNING)
    assert sorted(worker.key for worker in sim.live()) == keys
    assert [note.kind for note in sim.notes].count("adopted") == 3
    assert sim.job.accounts.coordinator_restarts == 1 and sim.job.accounts.retries == 0
    sim.run(5.0)
    assert sim.job.accounts.env_steps > steps and sim.job.accounts.learned > learned


@pytest.mark.parametrize("is_replaced_meanwhile", [True, False])
def test_workers_that_end_without_a_coordinator_are_counted_as_restarts(is_replaced_meanwhile: bool) -> None:
    sim = running(2)
    lost = [learner(sim), sim.live("collector")[1]]
    sim.kill_coordinator()
    sim.operator.is_out = not is_replaced_meanwhile
    for worker in lost:
        sim.kill(worker)
    sim.run(10.0)
    sim.operator.is_out = False
    sim.start_coordinator()
    assert sim.run(30.0, lambda: at_work(sim) == 2 and sim.job.state is JobState.RUNNING)
    assert (sim.job.accounts.restarts, sim.job.accounts.coordinator_restarts) == (2, 1)
    gone = {note.text for note in sim.notes if note.kind == "lost"}
    why = "its process was replaced" if is_replaced_meanwhile else "its process has ended"
    assert gone == {f"{one.worker_id} (incarnation 0) is lost: {why}." for one in lost}
    sim.kill_coordinator()
    sim.start_coordinator()
    sim.run(5.0)
    assert sim.job.accounts.restarts == 2  # each replaced worker is counted once


def test_ended_workers_are_counted_after_two_restarts_and_an_operator_outage() -> None:
    sim = running(2)
    sim.kill_coordinator()
    sim.kill(sim.live("collector")[0])
    sim.operator.is_out = True
    sim.start_coordinator()
    sim.run(1.0)
    assert sim.job.accounts.restarts == 0
    sim.kill_coordinator()
    sim.operator.is_out = False
    sim.start_coordinator()
    assert sim.run(60.0, lambda: at_work(sim) == 2)
    assert sim.job.accounts.restarts == 1


def test_coordinator_restarted_during_the_ending_counts_the_closing_results() -> None:
    sim = running(2)
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    sim.kill_coordinator()
    sim.start_coordinator()
    assert sim.run(60.0, lambda: sim.is_over)
    assert not sim.over[0].failed
    assert sim.job.accounts.env_steps == sum(worker.counts["env_steps"] for worker in sim.all_workers)
    assert sim.checkpoint == (sim.job.accounts.learner_steps, sim.store.newest)


def test_evaluation_of_a_dead_worker_is_retried_with_the_same_version() -> None:
    sim = running(1)
    sim.deliver(ev.EvaluationRequested())
    assert sim.run(30.0, lambda: any(t.state is TaskState.RUNNING for t in sim.job.tasks.open("evaluate")))
    version = sim.job.tasks.open("evaluate")[0].start.options["params_version"]
    sim.kill(sim.live("evaluator")[0])
    assert sim.run(30.0, lambda: bool(sim.job.accounts.evaluations))
    assert [row[2] for row in sim.job.accounts.evaluations] == [version] and sim.store.newest > version
    sim.run(2.0)
    assert not sim.store.pins


def test_connections_are_dropped_before_the_workers_are_ended() -> None:
    sim = running(2)
    effects: list[object] = []
    execute = sim._execute
    sim._execute = lambda effect: (effects.append(effect), execute(effect))  # type: ignore[method-assign]
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    assert sim.run(60.0, lambda: sim.is_over)
    left = next(index for index, effect in enumerate(effects) if isinstance(effect, ev.EndWorkers))
    shut = [effect.key[0] for effect in effects[:left] if isinstance(effect, ev.Disconnect)]
    assert shut == ["learner/0", "collector/0", "collector/1"]
    assert not [
        effect for effect in effects[left:] if isinstance(effect, (ev.Disconnect, ev.Send, ev.Connect, ev.Release))
    ]
    assert {worker.state for worker in sim.job.roster} == {WorkerState.GONE}


def test_learner_lost_during_the_ending_is_replaced_and_saves() -> None:
    sim = running(1)
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    sim.kill(learner(sim))
    assert sim.run(60.0, lambda: sim.is_over)
    assert not sim.over[0].failed
    assert sim.checkpoint[1] == sim.store.newest
    closed = [send.key[1] for send in sim.sent if (send.key[0], send.method) == ("learner/0", "close_task")]
    assert set(closed) == {1}


def test_permanent_failure_fails_the_job_at_once() -> None:
    sim = running(1)
    learner(sim).fails = Failed("UsageError", "no such agent", is_permanent=True)
    assert sim.run(60.0, lambda: sim.is_over)
    assert sim.over == [ev.Over(True, "learn/1 failed: UsageError: no such agent")]


def test_failed_last_save_fails_the_job() -> None:
    sim = running(1)
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    learner(sim).fails = Failed("CheckpointError", "no room", is_permanent=True)
    assert sim.run(60.0, lambda: sim.is_over)
    assert sim.over == [ev.Over(True, "enough; but learn/1 failed: CheckpointError: no room")]


def test_task_that_fails_too_often_fails_the_job() -> None:
    sim = running(1)

    def boom(method: str, worker: object) -> float:
        if worker.role == "collector":  # type: ignore[attr-defined]
            worker.fails = Failed("ValueError", "boom")  # type: ignore[attr-defined]
        return 0.1

    sim.work_seconds = boom  # type: ignore[method-assign]
    assert sim.run(60.0, lambda: sim.is_over)
    assert sim.over[0].failed and "failed 6 times: ValueError: boom" in sim.over[0].reason


def test_workers_that_never_start_fail_the_job() -> None:
    sim = Simulation(limits=Limits(starting_deadline=60.0, max_failures=2), commander=ENDLESS)
    sim.operator.never_comes.add("learner")
    assert sim.run(300.0, lambda: sim.is_over)
    assert sim.over[0].failed and "learner/0 failed to start 3 times in a row" in sim.over[0].reason


IMPATIENT = dataclasses.replace(LIMITS, starting_deadline=6.0, max_failures=3)


def test_job_continues_without_a_collector_that_never_starts() -> None:
    sim = running(2, limits=IMPATIENT)
    sim.operator.never_comes.add("collector")
    lost = sim.live("collector")[0]
    sim.kill(lost)
    learned = sim.job.accounts.learned
    assert not sim.run(60.0, lambda: sim.is_over)
    assert sim.job.accounts.restarts > IMPATIENT.max_failures and sim.job.accounts.learned > learned
    assert at_work(sim) == 1 and sim.job.ending is None


def test_job_succeeds_without_an_evaluator_that_never_starts() -> None:
    sim = Simulation(limits=IMPATIENT, commander=TrainOne(env_steps=500))
    sim.operator.never_comes.add("evaluator")
    assert sim.run(600.0, lambda: sim.is_over)
    assert not sim.over[0].failed


@pytest.mark.parametrize("role", ["learner", "collector"])
def test_job_fails_if_the_operator_never_lists_a_required_role(role: str) -> None:
    sim = Simulation(commander=ENDLESS)
    sim.operator.never_starts.add(role)
    assert not sim.run(LIMITS.starting_deadline - 1.0, lambda: sim.is_over)
    assert sim.run(3.0 + LIMITS.close_deadline, lambda: sim.is_over)
    why = f"the operator has listed no {role} for 300 s: check that it can start one"
    assert sim.over == [ev.Over(True, why)]


def test_job_fails_if_the_operator_never_answers() -> None:
    sim = Simulation(commander=ENDLESS)
    sim.operator.is_out = True
    assert not sim.run(LIMITS.starting_deadline - 1.0, lambda: sim.is_over)
    assert sim.run(15.0, lambda: sim.is_over)
    assert sim.over == [ev.Over(True, "the operator could not be reached for 300 s: it is away")]


@pytest.mark.parametrize("restarts", [False, True])
def test_operator_outage_during_a_run_does_not_fail_the_job(restarts: bool) -> None:
    sim = running(1, limits=dataclasses.replace(LIMITS, starting_deadline=20.0))
    sim.operator.is_out = True
    if restarts:
        sim.kill_coordinator()
        sim.start_coordinator()
    else:
        sim.kill(learner(sim))
    sim.run(60.0)
    assert sim.job.operator.problem and not sim.is_over
    sim.operator.is_out = False
    assert sim.run(30.0, lambda: sim.job.state is JobState.RUNNING and at_work(sim) == 1)


def test_failing_replay_buffer_is_retried_until_the_deadline() -> None:
    sim = running(1)
    sim.buffer.raises = "OSError: it is full"
    sim.run(20.0)
    draws = [note.text for note in sim.notes if note.kind == "replay"]
    assert draws == ["Cannot draw batches from the replay buffer; trying again. OSError: it is full"]
    assert sim.job.learner.waits_for == "data"
    sim.buffer.raises, learned = "", sim.job.accounts.learned
    sim.run(LIMITS.progress_deadline + 1.0)
    assert sim.job.accounts.learned > learned and sim.job.state is JobState.RUNNING
    sim.buffer.raises = "OSError: it is gone"
    assert not sim.run(LIMITS.progress_deadline - 10.0, lambda: sim.is_over)
    assert sim.run(40.0, lambda: sim.is_over)
    assert sim.over == [ev.Over(True, "no batch could be drawn from the replay buffer for 120 s: OSError: it is gone")]


def test_time_limit_ends_a_job_without_workers() -> None:
    sim = Simulation(commander=TrainOne(seconds=20.0))
    sim.operator.is_out = True
    assert sim.run(60.0, lambda: sim.is_over)
    assert sim.over == [ev.Over(False, "20 of 20 s have passed")]


def test_restored_learner_publishes_higher_versions_than_before() -> None:
    sim = running(1)
    newest = sim.store.newest
    sim.deliver(ev.RestoreRequested())
    assert sim.run(20.0, lambda: sim.job.state is JobState.RUNNING and learner(sim).task == ("learn/1", 1))
    assert sim.run(20.0, lambda: learner(sim).started is not None and sim.store.newest > newest)
    assert sim.job.accounts.restarts == 0


def test_lost_batches_are_counted() -> None:
    sim = running(1)
    assert sim.run(20.0, lambda: sim.job.tasks.open("learn")[0].granted > 0)
    granted = sim.job.tasks.open("learn")[0].granted
    sim.kill(learner(sim))
    assert sim.run(2.0, lambda: sim.job.state is JobState.DEGRADED)
    assert sim.job.accounts.lost == granted and not sim.buffer.out


def test_no_worker_is_lost_if_the_allowed_silence_is_infinite() -> None:
    limits = dataclasses.replace(LIMITS, lost_after=math.inf, lost_after_starting=math.inf)
    sim = running(1, limits=limits)
    sim.stop(sim.live("collector")[0])
    sim.run(3.0 * LIMITS.lost_after_starting)
    assert sim.job.accounts.restarts == 0


class Curriculum(TrainOne):
    """A commander that makes the environment harder over time, and sets the exploration of each collector."""

    def task(self, role, index, view):
        stage = view.env_steps // 1000
        if role == "learner":
            return StartTask("learn", "main", overrides={"policy": {"learning_rate": 0.1 / (1 + stage // 2)}})
        overrides = {"env": {"level": stage}, "collector": {"epsilon": 0.5**index}}
        return StartTask("collect", "main", overrides=overrides) if stage < 4 or index == 0 else None


def test_tasks_change_only_when_the_commander_changes_them() -> None:
    sim = running(2, commander=Curriculum(env_steps=10**9))
    of = {task.index: task for task in sim.job.tasks.open("collect")}
    assert of[1].start.overrides == {"env": {"level": 0}, "collector": {"epsilon": 0.5}}
    assert sim.run(60.0, lambda: sim.job.accounts.env_steps > 900) and len(list(sim.job.tasks)) == 3
    sim.kill(sim.live("collector")[1])  # the replacement gets the same task
    assert sim.run(60.0, lambda: of[1].attempt == 1 and at_work(sim) == 2)
    assert sim.run(60.0, lambda: sim.job.accounts.env_steps > 3200 and at_work(sim) == 2)
    assert all(task.start.overrides["env"] == {"level": 3} for task in sim.job.tasks.open("collect"))
    assert of[0].state is of[1].state is TaskState.SUCCEEDED
    first, second = (task for task in sim.job.tasks if task.kind == "learn")
    assert first.state is TaskState.SUCCEEDED and second.state is TaskState.RUNNING
    assert second.start.overrides == {"policy": {"learning_rate": 0.05}}
    assert sim.checkpoint[0] > 0  # the first task saved a checkpoint for the second task
    assert sim.run(60.0, lambda: sim.job.accounts.env_steps > 4200)
    assert [task.index for task in sim.job.tasks.open("collect")] == [0]


def test_restarted_coordinator_keeps_the_overrides_of_running_tasks() -> None:
    sim = running(2, commander=Curriculum(env_steps=10**9))
    before = {task.task_id: task.start.overrides for task in sim.job.tasks}
    sim.kill_coordinator()
    sim.start_coordinator()
    assert sim.run(30.0, lambda: at_work(sim) == 2)
    assert {task.task_id: task.start.overrides for task in sim.job.tasks} == before
    assert not [note for note in sim.notes if note.kind == "closed"]


def test_example_in_the_package_docstring() -> None:
    job = TrainingJob(ENDLESS, LIMITS, {"learner": 1, "collector": 1}, by_key=False, now=0.0)
    effects: list[Any] = []

    def happens(event: Any) -> list[str]:
        effects[:] = [effect for effect in advance(job, event, job.now + 0.1) if not isinstance(effect, ev.Note)]
        return [effect.method if isinstance(effect, ev.Send) else type(effect).__name__ for effect in effects]

    def answers(reply: Any) -> list[str]:
        call = next(effect for effect in reversed(effects) if isinstance(effect, ev.Send))
        return happens(ev.Replied(call.key, call.method, call.header, reply))

    here = WorkerInfo("learner", 0, 0, "there")
    advance(job, ev.Submitted(), 0.0)
    happens(ev.OperatorAnswered((here,)))
    answers(Alive("learner/0", 0, "idle"))
    answers(Started())
    for incarnation in (0, 1):
        listed = ev.OperatorAnswered((here, WorkerInfo("collector", 0, incarnation, "there")))
        assert happens(listed) == ["Connect", "ping"]
        assert answers(Alive("collector/0", incarnation, "idle")) == ["resources", "start_task"]
        assert effects[-1].header.task_id == "collect/2" and effects[-1].header.attempt == incarnation
        assert answers(Started()) == ["get_data"]
        if incarnation == 0:
            late = effects[-1]
            stats = {"env_steps": 64, "episodes": 2, "return_sum": 30.0, "length_sum": 60, "rank": 0, "incarnation": 0}
            collected = Collected(stats, 0, length=64)
            assert answers(collected) == ["get_data"] and job.accounts.env_steps == 64
            assert happens(ev.OperatorAnswered((here,))) == ["Disconnect", "Replace"]
    assert happens(ev.Replied(late.key, "get_data", late.header, collected)) == []
