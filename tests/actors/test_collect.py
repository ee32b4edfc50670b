"""Tests of `Actor.collect`, which runs the loop of `run` for a limited time or number of steps."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest

from rlframe import AsyncEnv, SyncEnv
from rlframe.actors import Actor
from rlframe.actors.pacing import UnrollGate
from rlframe.errors import StoppedError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.types import ReplaySpec, Sequence
from tests.fakes import CountingEnv, FixedParams, RecordingBuffer, counting_agent
from tests.waiting import wait_until

UNROLLS = ReplaySpec("queue", Sequence(5), None, 1_000, max_staleness=0, lapse_after=0.2)


class Clock:
    """A fake clock. `OneVersion.wait_for_version` advances it."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in ("actor", "pacing"):
        monkeypatch.setattr(f"rlframe.actors.{module}.time", made)
    return made


class OneVersion(FixedParams):
    """A fake learner that never publishes a second version."""

    def __init__(self, clock):
        super().__init__({"w": np.float32(0.0)})
        self._clock = clock

    def wait_for_version(self, known, timeout):
        self._clock.now += timeout
        return self.version


class Versions(FixedParams):
    """A fake learner. A test raises its version with `raise_to`."""

    def __init__(self) -> None:
        super().__init__({"w": np.float32(0.0)})
        self.changed = threading.Condition()

    def wait_for_version(self, known, timeout):
        with self.changed:
            self.changed.wait_for(lambda: self.version > known, timeout)
            return self.version

    def raise_to(self, version):
        with self.changed:
            self.version = version
            self.changed.notify_all()


def make(buffer=None, learner=None, builder=lambda: SyncEnv(CountingEnv, 2, "loop")) -> Actor:
    inferencer = Inferencer(InferencerConfig(), counting_agent(), learner or Versions())
    return Actor(builder, inferencer, buffer or RecordingBuffer())


def on_policy(learner, lapse_after=0.2) -> tuple[Actor, RecordingBuffer]:
    buffer = RecordingBuffer()
    buffer.spec = dataclasses.replace(UNROLLS, lapse_after=lapse_after)
    return make(buffer, learner), buffer


def test_collect_takes_the_requested_steps_and_continues_in_the_next_call():
    buffer = RecordingBuffer()
    actor = make(buffer)
    assert actor.collect(steps=5) is False
    assert actor.env_steps == 6 and len(buffer.steps) == 3  # each step has two environments
    actor.collect(steps=2)
    assert actor.env_steps == 8 and len(buffer.steps) == 5  # `env_steps` does not count the step after LAST
    counts = [step.timestep.observation[0, 0] for _, step in buffer.steps]
    assert counts == [0, 1, 2, 3, 0]
    actor.close()


def test_collect_ends_after_its_time_limit():
    actor = make()
    began = time.monotonic()
    assert actor.collect(seconds=0.2) is False
    assert time.monotonic() - began >= 0.2
    assert actor.env_steps > 0
    before = actor.env_steps
    actor.collect(steps=10**9, seconds=0.0)
    assert actor.env_steps == before
    actor.close()


def collect_until_it_waits(actor):
    while not actor.collect(seconds=0.1):  # more than one call, because the first step compiles
        assert actor.env_steps < 1_000


def test_collect_returns_true_if_time_runs_out_while_it_waits_for_a_version():
    learner = Versions()
    actor, buffer = on_policy(learner, lapse_after=60.0)
    collect_until_it_waits(actor)
    assert len(buffer.steps) == 5
    assert actor.collect(seconds=0.05) is True
    assert len(buffer.steps) == 5
    learner.raise_to(2)
    collect_until_it_waits(actor)
    assert [step.params_version for _, step in buffer.steps] == [1] * 5 + [2] * 5
    actor.close()


def test_waiting_time_adds_up_over_several_collect_calls(clock):
    actor, buffer = on_policy(OneVersion(clock), lapse_after=10.0)
    began, calls = clock.now, 0
    while len(buffer.steps) < 10:
        actor.collect(steps=1, seconds=7.0)
        calls += 1
    assert clock.now - began == pytest.approx(30.0, abs=0.3)  # three times `lapse_after`; the gate checks every 0.2 s
    assert calls == 8 + 4  # 8 calls take steps, and 4 calls only wait
    actor.close()


def test_time_between_waits_does_not_count_as_waiting_time(clock):
    gate, learner, stop = (
        UnrollGate(dataclasses.replace(UNROLLS, lapse_after=10.0)),
        OneVersion(clock),
        threading.Event(),
    )
    for _ in range(5):
        gate.count_step(1)
    gate.wait_until_open(learner, stop, clock.now + 5.0)
    clock.now += 40.0  # the job is paused for longer than the maximum wait of the gate
    gate.wait_until_open(learner, stop, clock.now + 20.0)
    assert gate.is_closed
    gate.wait_until_open(learner, stop, clock.now + 10.0)
    assert not gate.is_closed


def test_collect_does_not_wait_after_the_last_requested_unroll():
    actor, _ = on_policy(Versions(), lapse_after=60.0)
    assert actor.collect(steps=8) is False
    actor.close()


def test_stop_ends_collect_while_it_waits_for_space_in_the_buffer():
    class FullBuffer(RecordingBuffer):
        def __init__(self):
            super().__init__()
            self.stopped = threading.Event()

        def add(self, env_ids, step):
            if len(self.steps) == 3:
                assert self.stopped.wait(60.0)
                raise StoppedError("stopped")
            super().add(env_ids, step)

    buffer = FullBuffer()
    actor = make(buffer)
    # With a real buffer, `Actor.stop` ends the wait. With this buffer, the test must end it.
    stop, actor.stop = actor.stop, lambda: (stop(), buffer.stopped.set())
    results = []
    thread = threading.Thread(target=lambda: results.append(actor.collect(seconds=60.0)))
    thread.start()
    wait_until(lambda: len(buffer.steps) == 3 and actor.is_adding)
    actor.stop()
    thread.join(60.0)
    assert results == [True]
    actor.close()


def test_collect_after_stop_takes_no_steps():
    buffer = RecordingBuffer()
    actor = make(buffer)
    actor.stop()
    assert actor.collect(steps=10) is False
    assert buffer.steps == []
    actor.close()


def test_warm_up_compiles_inference_and_takes_no_step():
    buffer = RecordingBuffer()
    actor = make(buffer)
    actor.warm_up()
    assert actor._inferencer.stats()["compilations"] == 1
    assert actor.env_steps == 0 and buffer.steps == []
    actor.collect(steps=2)
    assert actor._inferencer.stats()["compilations"] == 1
    assert [int(step.timestep.observation[0, 0]) for _, step in buffer.steps] == [0]
    actor.close()


def test_asynchronous_pool_is_rejected_for_on_policy_replay():
    buffer = RecordingBuffer()
    buffer.spec = UNROLLS
    actor = make(buffer, builder=lambda: AsyncEnv(CountingEnv, 4, 2, "thread"))
    with pytest.raises(UsageError, match="wait together"):
        actor.collect(steps=1)
    actor.close()


def test_collect_steps_an_asynchronous_pool():
    actor = make(builder=lambda: AsyncEnv(CountingEnv, 4, 2, "thread"))
    actor.warm_up()
    assert actor.collect(steps=20) is False
    assert actor.env_steps >= 20
    actor.close()
