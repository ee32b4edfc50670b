"""Whole jobs, in simulated time."""

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
    world = Simulation(collectors=collectors, commander=kwargs.pop("commander", ENDLESS), **kwargs)  # type: ignore[arg-type]
    assert world.run(30.0, lambda: at_work(world) == collectors and world.m.accounts.learned > 3)
    return world


def at_work(world: Simulation) -> int:
    return sum(task.state is TaskState.RUNNING for task in world.m.tasks.open("collect"))


def learner(world: Simulation):
    return world.live("learner")[0]


@pytest.mark.parametrize("by_key", [True, False])
def test_a_job_ends_at_its_limit_with_its_last_version_evaluated(by_key: bool) -> None:
    world = Simulation(by_key=by_key, commander=TrainOne(env_steps=1000, eval_every=300))
    assert world.run(200.0, lambda: world.is_over)
    accounts = world.m.accounts
    assert not world.over[0].failed and world.over[0].reason == "1,000 of 1,000 environment steps were taken"
    assert accounts.env_steps >= 1000 and accounts.learned > 0 and accounts.lost == 0
    assert accounts.evaluations[-1][1:] == [world.store.newest, world.store.newest]  # the mean is the version here
    assert world.m.ending is not None and world.m.ending.evaluation["params_version"] == world.store.newest
    assert world.checkpoint == (accounts.learner_steps, world.store.newest)  # the final policy was saved
    assert len(accounts.evaluations) >= 3 and not world.store.pins and not world.buffer.out
    assert not world.live() and len(world.over) == 1


@pytest.mark.parametrize("by_key", [True, False])
def test_an_evaluation_during_a_job_is_of_a_version_that_a_checkpoint_holds(by_key: bool) -> None:
    world = Simulation(by_key=by_key, commander=TrainOne(env_steps=1000, eval_every=100))
    assert world.run(200.0, lambda: world.is_over)
    versions = [version for _, _, version in world.m.accounts.evaluations]
    assert len(versions) >= 4 and set(versions[:-1]) <= world.saved and versions[-1] == world.checkpoint[1]


@pytest.mark.parametrize("by_key", [True, False])
def test_the_learner_of_a_paused_job_saves_for_an_evaluation(by_key: bool) -> None:
    world = running(by_key=by_key)
    world.deliver(ev.PauseRequested(True))
    world.run(10.0)
    world.deliver(ev.EvaluationRequested())
    assert world.run(30.0, lambda: bool(world.m.accounts.evaluations))
    assert world.m.accounts.evaluations[-1][2] in world.saved
    assert world.m.state is JobState.PAUSED and world.m.accounts.lost == 0


def test_an_evaluation_waits_for_the_learner_that_replaces_a_dead_one() -> None:
    world = running()
    world.deliver(ev.EvaluationRequested())
    world.kill(learner(world))
    assert world.run(60.0, lambda: bool(world.m.accounts.evaluations))
    assert world.m.accounts.evaluations[-1][2] in world.saved


@pytest.mark.parametrize("fault", ["dies and is not replaced", "hangs and is not lost for that"])
def test_an_evaluation_waits_for_a_learner_that_saves_no_longer_than_its_deadline(fault: str) -> None:
    world = running(limits=dataclasses.replace(LIMITS, lost_after=math.inf, lost_after_starting=math.inf))
    world.deliver(ev.EvaluationRequested())
    assert world.run(60.0, lambda: not world.m.tasks.open("evaluate"))
    if fault == "hangs and is not lost for that":
        world.stop(learner(world))
    else:
        world.operator.is_out = True
        world.kill(learner(world))
    world.deliver(ev.EvaluationRequested())
    began = world.now
    assert world.run(300.0, lambda: len(world.m.accounts.evaluations) == 2)
    assert LIMITS.progress_deadline <= world.now - began < LIMITS.progress_deadline + 20.0
    said = [note.text for note in world.notes if "is logged before its checkpoint" in note.text]
    assert len(said) == 1 and "no learner has saved main within 120 s" in said[0]


def test_calls_are_made_in_the_order_of_the_diagram() -> None:
    world = Simulation(commander=TrainOne(env_steps=100))
    assert world.run(200.0, lambda: world.is_over)
    asked = methods(world, "learner")
    assert (asked[0], asked[-1], methods(world, "collector")[-1]) == ("start_task", "close_task", "close_task")
    learns = [index for index, method in enumerate(asked) if method == "learn"]
    assert learns and all(asked[index - 1] == "data_demand" for index in learns)
    assert set(methods(world, "collector")[1:-1]) == {"get_data"}
    assert methods(world, "evaluator") == ["start_task", "get_data", "close_task"]
    first = next(send for send in world.sent if send.header is not None and send.worker_id == "collector/0")
    assert (first.method, world.sent[0].method) == (
        "start_task",
        "ping",
    )  # `Simulation` checks that a learner had started


def methods(world: Simulation, role: str) -> list[str]:
    """Of each new call."""
    found, seqs = [], set()
    for send in world.sent:
        if send.header is not None and send.worker_id.startswith(role) and send.header.seq not in seqs:
            seqs.add(send.header.seq)
            found.append(send.method)
    return found


def test_collectors_are_scaled_up_and_down_while_it_trains() -> None:
    world = running(1)
    world.deliver(ev.ScaleRequested("collector", 4))
    assert world.run(30.0, lambda: at_work(world) == 4)
    world.deliver(ev.ScaleRequested("collector", 2))
    assert world.run(10.0, lambda: len(world.live("collector")) == 2 and at_work(world) == 2)
    closed = [send for send in world.sent if send.method == "close_task"]
    assert {send.worker_id for send in closed} == {"collector/2", "collector/3"}
    assert world.m.accounts.restarts == 0
    world.run(20.0)
    assert [worker.worker_id for worker in world.live("collector")] == ["collector/0", "collector/1"]


@pytest.mark.parametrize("role", ["learner", "collector"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_worker_that_dies_or_hangs_is_replaced_at_its_index(role: str, how: str) -> None:
    world = running(2)
    worker = world.live(role)[0]
    getattr(world, how)(worker)
    deadline = 1.0 if how == "kill" else LIMITS.lost_after + 1.0
    assert world.run(deadline, lambda: world.m.roster.newest(worker.worker_id).state is WorkerState.LOST)
    assert world.m.state is (JobState.DEGRADED if role == "learner" else JobState.RUNNING)
    assert world.run(30.0, lambda: world.m.state is JobState.RUNNING and at_work(world) == 2)
    new = world.m.roster.newest(worker.worker_id)
    assert new.incarnation == worker.incarnation + 1 and new.state is WorkerState.BUSY
    assert world.m.accounts.restarts == 1
    world.resume(worker)  # the old one changes nothing any more
    world.run(5.0)
    assert world.m.roster.newest(worker.worker_id) is new


@pytest.mark.parametrize("method", ["get_data", "ping"])
def test_a_worker_at_whose_address_another_answers_is_lost_and_its_task_has_not_failed(method: str) -> None:
    world = running(1)
    (worker,) = (known for known in world.m.roster if known.role == "collector")
    (task,) = world.m.tasks.open("collect")
    key = (worker.worker_id, worker.incarnation)
    assert worker.call is not None
    header, reply = worker.call.header, CallRefused("The call is for another.", is_misdirected=True)
    if method == "ping":
        header, reply = None, Alive(worker.worker_id, worker.incarnation + 1, "idle")
    world.deliver(ev.Replied(*key, method, header, reply))
    assert worker.state is WorkerState.LOST and (task.failures, world.m.accounts.restarts) == (0, 1)
    assert world.run(30.0, lambda: at_work(world) == 1)


def test_a_worker_that_hangs_is_suspect_first_and_comes_back() -> None:
    world = running(1)
    worker = world.live("collector")[0]
    world.stop(worker)
    assert world.run(LIMITS.suspect_after + 1.0, lambda: state(world, "collector/0") is WorkerState.SUSPECT)
    world.resume(worker)
    assert world.run(2.0, lambda: state(world, "collector/0") is WorkerState.BUSY)
    assert world.m.accounts.restarts == 0


def state(world: Simulation, worker_id: str) -> WorkerState:
    worker = world.m.roster.newest(worker_id)
    assert worker is not None
    return worker.state


def test_a_worker_that_answers_has_its_call_repeated_until_its_supervisor_ends_it() -> None:
    world = running(1)
    slow = world.live("collector")[0]
    seconds = world.work_seconds
    world.work_seconds = lambda method, who: 1e9 if who is slow else seconds(method, who)  # type: ignore[method-assign]
    world.run(900.0)
    assert state(world, "collector/0") is WorkerState.BUSY and world.m.accounts.restarts == 0
    world.kill(slow)
    assert world.run(30.0, lambda: world.m.accounts.restarts == 1 and at_work(world) == 1)


def test_training_goes_on_while_the_operator_is_away_and_is_reconciled_after() -> None:
    world = running(2)
    world.operator.is_out = True
    world.kill(world.live("collector")[1])
    steps = world.m.accounts.env_steps
    world.run(40.0)
    assert world.m.accounts.env_steps > steps and world.m.operator.problem
    assert at_work(world) == 1  # nobody replaces it
    world.deliver(ev.ScaleRequested("collector", 3))
    world.operator.is_out = False
    assert world.run(30.0, lambda: at_work(world) == 3)
    assert world.m.operator.problem == ""


def test_a_pause_stops_collecting_and_learning_until_it_is_resumed() -> None:
    world = running(2)
    world.deliver(ev.PauseRequested(True))
    world.run(3.0)
    accounts = world.m.accounts
    before = accounts.env_steps
    world.run(200.0)  # longer than the deadline on progress
    assert (world.m.state, accounts.env_steps, accounts.restarts) == (JobState.PAUSED, before, 0)
    world.deliver(ev.PauseRequested(False))
    world.run(3.0)
    assert world.m.state is JobState.RUNNING and accounts.env_steps > before


@pytest.mark.parametrize("after", [0.0, 0.3, 1.5, 4.0, 20.0])
@pytest.mark.parametrize("is_out", [True, False])
def test_a_job_can_be_cancelled_at_any_time_and_ends_soon(after: float, is_out: bool) -> None:
    world = Simulation(commander=ENDLESS)
    world.operator.is_out = is_out
    world.run(after)
    world.deliver(ev.EndRequested(StopReason("interrupt", "enough"), within=6.0))
    assert world.run(20.0, lambda: world.is_over)
    assert (world.over[0].failed, world.over[0].reason) == (False, "enough")


def test_a_stop_is_sticky() -> None:
    world = running(1)
    world.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    world.deliver(ev.PauseRequested(False))
    world.deliver(ev.ScaleRequested("collector", 3))
    world.deliver(ev.EndRequested(StopReason("interrupt", "another reason")))
    world.kill_coordinator()
    world.start_coordinator()
    assert world.m.ending is not None
    assert world.run(60.0, lambda: world.is_over)
    assert world.over == [ev.Over(False, "enough")]


def test_a_restarted_coordinator_adopts_the_workers_that_went_on() -> None:
    world = running(2)
    keys = sorted(worker.key for worker in world.live())
    steps, learned = world.m.accounts.env_steps, world.m.accounts.learned
    world.kill_coordinator()
    world.run(5.0)
    world.start_coordinator()
    assert world.run(5.0, lambda: at_work(world) == 2 and world.m.state is JobState.RUNNING)
    assert sorted(worker.key for worker in world.live()) == keys
    assert [note.kind for note in world.notes].count("adopted") == 3
    assert world.m.accounts.coordinator_restarts == 1 and world.m.accounts.retries == 0
    world.run(5.0)
    assert world.m.accounts.env_steps > steps and world.m.accounts.learned > learned


@pytest.mark.parametrize("is_replaced_meanwhile", [True, False])
def test_workers_that_end_while_the_coordinator_is_away_are_counted_as_restarts(is_replaced_meanwhile: bool) -> None:
    world = running(2)
    lost = [learner(world), world.live("collector")[1]]
    world.kill_coordinator()
    world.operator.is_out = not is_replaced_meanwhile
    for worker in lost:
        world.kill(worker)
    world.run(10.0)
    world.operator.is_out = False
    world.start_coordinator()
    assert world.run(30.0, lambda: at_work(world) == 2 and world.m.state is JobState.RUNNING)
    assert (world.m.accounts.restarts, world.m.accounts.coordinator_restarts) == (2, 1)
    gone = {note.text for note in world.notes if note.kind == "lost"}
    why = "its process was replaced" if is_replaced_meanwhile else "its process has ended"
    assert gone == {f"{one.worker_id} (incarnation 0) is lost: {why}." for one in lost}
    world.kill_coordinator()
    world.start_coordinator()
    world.run(5.0)
    assert world.m.accounts.restarts == 2  # each once


def test_workers_that_ended_are_counted_by_a_coordinator_whose_predecessor_had_not_heard_of_the_operator() -> None:
    world = running(2)
    world.kill_coordinator()
    world.kill(world.live("collector")[0])
    world.operator.is_out = True
    world.start_coordinator()
    world.run(1.0)
    assert world.m.accounts.restarts == 0
    world.kill_coordinator()
    world.operator.is_out = False
    world.start_coordinator()
    assert world.run(60.0, lambda: at_work(world) == 2)
    assert world.m.accounts.restarts == 1


def test_a_restart_in_the_ending_still_takes_the_closing_results() -> None:
    world = running(2)
    world.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    world.kill_coordinator()
    world.start_coordinator()
    assert world.run(60.0, lambda: world.is_over)
    assert not world.over[0].failed
    assert world.m.accounts.env_steps == sum(worker.counts["env_steps"] for worker in world.all_workers)
    assert world.checkpoint == (world.m.accounts.learner_steps, world.store.newest)


def test_an_evaluation_whose_worker_dies_is_done_again_at_the_same_version() -> None:
    world = running(1)
    world.deliver(ev.EvaluationRequested())
    assert world.run(30.0, lambda: any(t.state is TaskState.RUNNING for t in world.m.tasks.open("evaluate")))
    version = world.m.tasks.open("evaluate")[0].start.options["params_version"]
    world.kill(world.live("evaluator")[0])
    assert world.run(30.0, lambda: bool(world.m.accounts.evaluations))
    assert [row[2] for row in world.m.accounts.evaluations] == [version] and world.store.newest > version
    world.run(2.0)
    assert not world.store.pins


def test_connections_are_closed_before_the_operator_is_left() -> None:
    world = running(2)
    effects: list[object] = []
    execute = world._execute
    world._execute = lambda effect: (effects.append(effect), execute(effect))  # type: ignore[method-assign]
    world.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    assert world.run(60.0, lambda: world.is_over)
    left = next(index for index, effect in enumerate(effects) if isinstance(effect, ev.EndWorkers))
    shut = [effect.worker_id for effect in effects[:left] if isinstance(effect, ev.Disconnect)]
    assert shut == ["learner/0", "collector/0", "collector/1"]
    assert not [
        effect for effect in effects[left:] if isinstance(effect, (ev.Disconnect, ev.Send, ev.Connect, ev.Release))
    ]
    assert {worker.state for worker in world.m.roster} == {WorkerState.GONE}


def test_a_learner_lost_while_the_job_drains_comes_back_and_saves() -> None:
    world = running(1)
    world.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    world.kill(learner(world))
    assert world.run(60.0, lambda: world.is_over)
    assert not world.over[0].failed
    assert world.checkpoint[1] == world.store.newest
    closed = [send.incarnation for send in world.sent if (send.worker_id, send.method) == ("learner/0", "close_task")]
    assert set(closed) == {1}


def test_a_failure_for_good_fails_the_job_at_once() -> None:
    world = running(1)
    learner(world).fails = Failed("UsageError", "no such agent", is_permanent=True)
    assert world.run(60.0, lambda: world.is_over)
    assert world.over == [ev.Over(True, "learn/1 failed: UsageError: no such agent")]


def test_a_learner_that_cannot_save_in_the_ending_fails_the_job() -> None:
    world = running(1)
    world.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    learner(world).fails = Failed("CheckpointError", "no room", is_permanent=True)
    assert world.run(60.0, lambda: world.is_over)
    assert world.over == [ev.Over(True, "enough; but learn/1 failed: CheckpointError: no room")]


def test_a_task_that_fails_too_often_fails_the_job() -> None:
    world = running(1)

    def boom(method: str, worker: object) -> float:
        if worker.role == "collector":  # type: ignore[attr-defined]
            worker.fails = Failed("ValueError", "boom")  # type: ignore[attr-defined]
        return 0.1

    world.work_seconds = boom  # type: ignore[method-assign]
    assert world.run(60.0, lambda: world.is_over)
    assert world.over[0].failed and "failed 6 times: ValueError: boom" in world.over[0].reason


def test_workers_that_never_come_fail_the_job() -> None:
    world = Simulation(limits=Limits(starting_deadline=60.0, max_failures=2), commander=ENDLESS)
    world.operator.never_comes.add("learner")
    assert world.run(300.0, lambda: world.is_over)
    assert world.over[0].failed and "learner/0 did not come up 3 times in a row" in world.over[0].reason


@pytest.mark.parametrize("role", ["learner", "collector"])
def test_a_job_whose_operator_lists_nobody_of_a_role_fails(role: str) -> None:
    world = Simulation(commander=ENDLESS)
    world.operator.never_starts.add(role)
    assert not world.run(LIMITS.starting_deadline - 1.0, lambda: world.is_over)
    assert world.run(3.0 + LIMITS.close_deadline, lambda: world.is_over)
    why = f"the operator answers, but has listed no {role} for 300 s: see that it can start one"
    assert world.over == [ev.Over(True, why)]


def test_a_job_whose_operator_never_answers_fails() -> None:
    world = Simulation(commander=ENDLESS)
    world.operator.is_out = True
    assert not world.run(LIMITS.starting_deadline - 1.0, lambda: world.is_over)
    assert world.run(15.0, lambda: world.is_over)
    assert world.over == [ev.Over(True, "the operator could not be reached for 300 s: it is away")]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_outage_of_the_operator_is_waited_for_in_a_run(restarts: bool) -> None:
    world = running(1, limits=dataclasses.replace(LIMITS, starting_deadline=20.0))
    world.operator.is_out = True
    if restarts:
        world.kill_coordinator()
        world.start_coordinator()
    else:
        world.kill(learner(world))
    world.run(60.0)
    assert world.m.operator.problem and not world.is_over
    world.operator.is_out = False
    assert world.run(30.0, lambda: world.m.state is JobState.RUNNING and at_work(world) == 1)


def test_a_replay_buffer_that_raises_is_asked_again_and_not_for_ever() -> None:
    world = running(1)
    world.buffer.raises = "OSError: it is full"
    world.run(20.0)
    draws = [note.text for note in world.notes if note.kind == "replay"]
    assert draws == ["The replay buffer gives no batches; it is asked again. OSError: it is full"]
    assert world.m.learner.waits_for == "data"
    world.buffer.raises, learned = "", world.m.accounts.learned
    world.run(LIMITS.progress_deadline + 1.0)
    assert world.m.accounts.learned > learned and world.m.state is JobState.RUNNING
    world.buffer.raises = "OSError: it is gone"
    assert not world.run(LIMITS.progress_deadline - 10.0, lambda: world.is_over)
    assert world.run(40.0, lambda: world.is_over)
    assert world.over == [ev.Over(True, "the replay buffer has given no batches for 120 s: OSError: it is gone")]


def test_wall_time_ends_a_job_to_which_nobody_comes() -> None:
    world = Simulation(commander=TrainOne(seconds=20.0))
    world.operator.is_out = True
    assert world.run(60.0, lambda: world.is_over)
    assert world.over == [ev.Over(False, "20 of 20 s have passed")]


def test_a_learner_told_to_restore_starts_again_above_the_versions_that_were() -> None:
    world = running(1)
    newest = world.store.newest
    world.deliver(ev.RestoreRequested())
    assert world.run(20.0, lambda: world.m.state is JobState.RUNNING and learner(world).task == ("learn/1", 1))
    assert world.run(20.0, lambda: learner(world).started is not None and world.store.newest > newest)
    assert world.m.accounts.restarts == 0


def test_what_was_lost_is_counted() -> None:
    world = running(1)
    assert world.run(20.0, lambda: world.m.tasks.open("learn")[0].granted > 0)
    granted = world.m.tasks.open("learn")[0].granted
    world.kill(learner(world))
    assert world.run(2.0, lambda: world.m.state is JobState.DEGRADED)
    assert world.m.accounts.lost == granted and not world.buffer.out


def test_nobody_is_lost_where_that_is_turned_off() -> None:
    limits = dataclasses.replace(LIMITS, lost_after=math.inf, lost_after_starting=math.inf)
    world = running(1, limits=limits)
    world.stop(world.live("collector")[0])
    world.run(3.0 * LIMITS.lost_after_starting)
    assert world.m.accounts.restarts == 0


class Curriculum(TrainOne):
    """Makes the environment harder after a number of steps, and gives each collector its own exploration."""

    def task(self, role, index, view):
        stage = view.env_steps // 1000
        if role == "learner":
            return StartTask("learn", "main", overrides={"policy": {"learning_rate": 0.1 / (1 + stage // 2)}})
        overrides = {"env": {"level": stage}, "collector": {"epsilon": 0.5**index}}
        return StartTask("collect", "main", overrides=overrides) if stage < 4 or index == 0 else None


def test_a_worker_has_another_task_when_the_commander_says_so_and_only_then() -> None:
    world = running(2, commander=Curriculum(env_steps=10**9))
    of = {task.index: task for task in world.m.tasks.open("collect")}
    assert of[1].start.overrides == {"env": {"level": 0}, "collector": {"epsilon": 0.5}}
    assert world.run(60.0, lambda: world.m.accounts.env_steps > 900) and len(list(world.m.tasks)) == 3
    world.kill(world.live("collector")[1])  # its successor is told the same
    assert world.run(60.0, lambda: of[1].attempt == 1 and at_work(world) == 2)
    assert world.run(60.0, lambda: world.m.accounts.env_steps > 3200 and at_work(world) == 2)
    assert all(task.start.overrides["env"] == {"level": 3} for task in world.m.tasks.open("collect"))
    assert of[0].state is of[1].state is TaskState.SUCCEEDED
    first, second = (task for task in world.m.tasks if task.kind == "learn")
    assert first.state is TaskState.SUCCEEDED and second.state is TaskState.RUNNING
    assert second.start.overrides == {"policy": {"learning_rate": 0.05}}
    assert world.checkpoint[0] > 0  # it was saved for the second
    assert world.run(60.0, lambda: world.m.accounts.env_steps > 4200)
    assert [task.index for task in world.m.tasks.open("collect")] == [0]


def test_a_restarted_coordinator_finds_the_overrides_of_the_tasks_that_went_on() -> None:
    world = running(2, commander=Curriculum(env_steps=10**9))
    before = {task.task_id: task.start.overrides for task in world.m.tasks}
    world.kill_coordinator()
    world.start_coordinator()
    assert world.run(30.0, lambda: at_work(world) == 2)
    assert {task.task_id: task.start.overrides for task in world.m.tasks} == before
    assert not [note for note in world.notes if note.kind == "closed"]


def test_the_example_of_the_package_a_collector_dies_and_its_successor_gets_the_task() -> None:
    job = TrainingJob(ENDLESS, LIMITS, {"learner": 1, "collector": 1}, by_key=False, now=0.0)
    effects: list[Any] = []

    def happens(event: Any) -> list[str]:
        effects[:] = [effect for effect in advance(job, event, job.now + 0.1) if not isinstance(effect, ev.Note)]
        return [effect.method if isinstance(effect, ev.Send) else type(effect).__name__ for effect in effects]

    def answers(reply: Any) -> list[str]:
        call = next(effect for effect in reversed(effects) if isinstance(effect, ev.Send))
        return happens(ev.Replied(*call.key, call.method, call.header, reply))

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
    assert happens(ev.Replied(*late.key, "get_data", late.header, collected)) == []
