"""Property tests of the state machine with random events. `Simulation` checks the invariants after each event."""

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

# Set RLFRAME_SCHEDULES=2000 for a long test.
SCHEDULES = int(os.environ.get("RLFRAME_SCHEDULES", "4"))
ENDLESS = 10**9

which = st.integers(0, 7)


class Curriculum(TrainOne):
    """A commander that changes the tasks a few times."""

    def task(self, role: Any, index: int, view: Any) -> StartTask | None:
        start, stage = super().task(role, index, view), min(view.env_steps // 200, 3)
        overrides = {"learner": {"policy": {"stage": stage // 2}}, "collector": {"env": {"stage": stage + index % 2}}}
        return start and dataclasses.replace(start, overrides=overrides[role])


class Schedules(RuleBasedStateMachine):
    """Random sequences of requests and failures, followed by a time without failures."""

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
        self.sim = Simulation(seed=seed, by_key=by_key, trouble=trouble, commander=commander)

    @rule(seconds=st.sampled_from([0.02, 0.3, 1.0, 4.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.sim.run(seconds)

    @rule(n=which, how=st.sampled_from(["kill", "stop", "fail"]))
    def hurt(self, n: int, how: str) -> None:
        live = self.sim.live()
        if live:
            worker = live[n % len(live)]
            if how == "fail":
                worker.fails = Failed("ValueError", "boom")
            else:
                getattr(self.sim, how)(worker)

    @rule()
    def resume_workers(self) -> None:
        for worker in self.sim.all_workers:
            self.sim.resume(worker)

    @rule(is_out=st.booleans())
    def operator(self, is_out: bool) -> None:
        self.sim.operator.is_out = is_out

    @rule(n=st.integers(1, 5))
    def scale(self, n: int) -> None:
        self.sim.deliver(ev.ScaleRequested("collector", n))

    @rule(
        event=st.sampled_from(
            [*map(ev.PauseRequested, (True, False)), ev.EvaluationRequested(), ev.CheckpointRequested()]
        )
    )
    def ask(self, event: object) -> None:
        self.sim.deliver(event)

    @rule()
    def restore(self) -> None:
        self.sim.deliver(ev.RestoreRequested())

    @rule(n=which)
    def repeat_an_old_reply(self, n: int) -> None:
        if self.sim.old_answers:
            self.sim.deliver(self.sim.old_answers[n % len(self.sim.old_answers)])

    @precondition(lambda self: self.sim.maybe_job is not None)
    @rule(writes=st.booleans())
    def kill_coordinator(self, writes: bool) -> None:
        if writes:
            self.sim.loses_effects = True
        else:
            self.sim.kill_coordinator()

    @precondition(lambda self: self.sim.maybe_job is None)
    @rule()
    def restart_coordinator(self) -> None:
        self.sim.start_coordinator()

    @rule(chance=st.integers(0, 9))
    def cancel(self, chance: int) -> None:
        if chance == 0 and self.sim.maybe_job is not None:
            self.cancelled = True
            self.sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            check_that_it_recovers(self.sim, endless=self.endless, cancelled=self.cancelled)


def check_that_it_recovers(sim: Simulation, *, endless: bool, cancelled: bool) -> None:
    """Check that the job runs and ends if there are no more failures."""
    sim.operator.is_out, sim.trouble, sim.loses_effects = False, 0.0, False
    resumed = [worker for worker in sim.all_workers if worker.is_stopped]
    for worker in resumed:
        sim.resume(worker)
    for worker in sim.all_workers:
        worker.fails = None
    sim.start_coordinator()
    sim.deliver(ev.PauseRequested(False))
    if endless and not cancelled and sim.job.ending is None:
        sim.run(90.0, lambda: sim.is_over)
        if not sim.is_over and sim.job.ending is None:
            check_that_it_works(sim)
        sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    assert sim.run(400.0, lambda: sim.is_over), what_there_is(sim)
    over = sim.over[-1]
    assert len(sim.over) == 1
    assert sim.job.state is (JobState.FAILED if over.failed else JobState.CLOSED)
    assert not over.failed or "failed" in over.reason or "did not" in over.reason, over
    assert all(is_over(task.state) for task in sim.job.tasks)
    assert not sim.live()
    if sim.life == 1:  # a restarted coordinator may not have recorded the last effects
        assert not sim.store.pins and sim.pinned == sim.unpinned
        if sim.by_key:
            assert not sim.buffer.out and sim.buffer.settled == sim.buffer.drawn
            assert sim.updates == sim.job.accounts.learned


def check_that_it_works(sim: Simulation) -> None:
    job = sim.job
    assert job.state is JobState.RUNNING, what_there_is(sim)
    (learn,) = job.tasks.open("learn")
    assert learn.state is TaskState.RUNNING
    collectors = [worker for worker in job.roster.of("collector") if worker.state is WorkerState.BUSY]
    assert len(collectors) == job.requests.wanted["collector"], what_there_is(sim)
    steps, learned = job.accounts.env_steps, job.accounts.learned
    sim.run(5.0)
    assert job.accounts.env_steps > steps and job.accounts.learned > learned, what_there_is(sim)


def what_there_is(sim: Simulation) -> str:
    job = sim.job
    tasks = [(task.task_id, task.state.name, task.worker_id, task.attempt) for task in job.tasks if not task.is_over]
    workers = [(w.worker_id, w.incarnation, w.state.name, w.call and w.call.method) for w in job.roster]
    notes = [note.text for note in sim.notes[-12:]]
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
