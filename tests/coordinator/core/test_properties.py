"""The machine over random schedules. What must always hold is checked by `world.Simulation` with every event."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import hypothesis
import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import Failed, StartTask
from rlframe.coordinator.states import JobState, TaskState, WorkerState, is_over
from rlframe.stop_conditions import StopReason
from tests.coordinator.core.simulation import Simulation

# RLFRAME_SCHEDULES=2000 for a long look.
SCHEDULES = int(os.environ.get("RLFRAME_SCHEDULES", "8"))
ENDLESS = 10**9

which = st.integers(0, 7)


class Curriculum(TrainOne):
    """Wants other tasks a few times."""

    def task(self, role: Any, index: int, view: Any) -> StartTask | None:
        start, stage = super().task(role, index, view), min(view.env_steps // 200, 3)
        overrides = {"learner": {"policy": {"stage": stage // 2}}, "collector": {"env": {"stage": stage + index % 2}}}
        return start and dataclasses.replace(start, overrides=overrides[role])


class Schedules(RuleBasedStateMachine):
    """Whatever may happen to a job, in any order, and then a while in which nothing does."""

    @initialize(
        seed=st.integers(0, 2**16),
        by_key=st.booleans(),
        trouble=st.sampled_from([0.0, 0.05, 0.2]),
        steps=st.sampled_from([300, 2000, ENDLESS]),
        every=st.sampled_from([0, 400]),
        kind=st.sampled_from([TrainOne, Curriculum]),
    )
    def begin(self, seed: int, by_key: bool, trouble: float, steps: int, every: int, kind: type[TrainOne]) -> None:
        self.endless, self.cancelled = steps == ENDLESS, False
        commander = kind(env_steps=steps, eval_every=every)
        self.world = Simulation(seed=seed, by_key=by_key, trouble=trouble, commander=commander)

    @rule(seconds=st.sampled_from([0.02, 0.3, 1.0, 4.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(n=which, how=st.sampled_from(["kill", "stop", "fail"]))
    def hurt(self, n: int, how: str) -> None:
        live = self.world.live()
        if live:
            worker = live[n % len(live)]
            if how == "fail":
                worker.fails = Failed("ValueError", "boom")
            else:
                getattr(self.world, how)(worker)

    @rule()
    def resume_workers(self) -> None:
        for worker in self.world.all_workers:
            self.world.resume(worker)

    @rule(is_out=st.booleans())
    def operator(self, is_out: bool) -> None:
        self.world.operator.is_out = is_out

    @rule(n=st.integers(1, 5))
    def scale(self, n: int) -> None:
        self.world.deliver(ev.ScaleRequested("collector", n))

    @rule(
        event=st.sampled_from(
            [*map(ev.PauseRequested, (True, False)), ev.EvaluationRequested(), ev.CheckpointRequested()]
        )
    )
    def ask(self, event: object) -> None:
        self.world.deliver(event)

    @rule()
    def restore(self) -> None:
        self.world.deliver(ev.RestoreRequested())

    @rule(n=which)
    def say_an_old_answer_again(self, n: int) -> None:
        if self.world.old_answers:
            self.world.deliver(self.world.old_answers[n % len(self.world.old_answers)])

    @precondition(lambda self: self.world.job is not None)
    @rule(writes=st.booleans())
    def kill_coordinator(self, writes: bool) -> None:
        if writes:
            self.world.loses_effects = True
        else:
            self.world.kill_coordinator()

    @precondition(lambda self: self.world.job is None)
    @rule()
    def restart_coordinator(self) -> None:
        self.world.start_coordinator()

    @rule(chance=st.integers(0, 9))
    def cancel(self, chance: int) -> None:
        if chance == 0 and self.world.job is not None:
            self.cancelled = True
            self.world.deliver(ev.EndRequested(StopReason("interrupt", "enough")))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            check_that_it_recovers(self.world, endless=self.endless, cancelled=self.cancelled)


def check_that_it_recovers(world: Simulation, *, endless: bool, cancelled: bool) -> None:
    """Once nothing goes wrong any more the job works, and ends as it should."""
    world.operator.is_out, world.trouble, world.loses_effects = False, 0.0, False
    resumed = [worker for worker in world.all_workers if worker.is_stopped]
    for worker in resumed:
        world.resume(worker)
    for worker in world.all_workers:
        worker.fails = None
    world.start_coordinator()
    world.deliver(ev.PauseRequested(False))
    if endless and not cancelled and world.m.ending is None:
        world.run(90.0, lambda: world.is_over)
        if not world.is_over and world.m.ending is None:
            check_that_it_works(world)
        world.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    assert world.run(400.0, lambda: world.is_over), what_there_is(world)
    over = world.over[-1]
    assert len(world.over) == 1
    assert world.m.state is (JobState.FAILED if over.failed else JobState.CLOSED)
    assert not over.failed or "failed" in over.reason or "did not" in over.reason, over
    assert all(is_over(task.state) for task in world.m.tasks)
    assert not world.live()
    if world.life == 1:  # what a coordinator that was killed had just begun is not all known to the next
        assert not world.store.pins and world.pinned == world.unpinned
        if world.by_key:
            assert not world.buffer.out and world.buffer.settled == world.buffer.drawn
            assert world.updates == world.m.accounts.learned


def check_that_it_works(world: Simulation) -> None:
    job = world.m
    assert job.state is JobState.RUNNING, what_there_is(world)
    (learn,) = job.tasks.open("learn")
    assert learn.state is TaskState.RUNNING
    collectors = [worker for worker in job.roster.of("collector") if worker.state is WorkerState.BUSY]
    assert len(collectors) == job.requests.wanted["collector"], what_there_is(world)
    steps, learned = job.accounts.env_steps, job.accounts.learned
    world.run(5.0)
    assert job.accounts.env_steps > steps and job.accounts.learned > learned, what_there_is(world)


def what_there_is(world: Simulation) -> str:
    job = world.m
    tasks = [(task.task_id, task.state.name, task.worker_id, task.attempt) for task in job.tasks if not task.is_over]
    workers = [(w.worker_id, w.incarnation, w.state.name, w.call and w.call.method) for w in job.roster]
    notes = [note.text for note in world.notes[-12:]]
    ending = job.ending.to_json() if job.ending is not None else None
    return f"{job.state} {job.requests.wanted} {ending}\n{tasks}\n{workers}\n" + "\n".join(notes)


Schedules.TestCase.settings = hypothesis.settings(
    max_examples=SCHEDULES,
    stateful_step_count=30,
    deadline=None,
    derandomize="RLFRAME_SCHEDULES" not in os.environ,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestSchedules = Schedules.TestCase
