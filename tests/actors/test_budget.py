"""An Actor stops at its step budget and continues when the budget is raised."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlframe import SyncEnv
from rlframe.actors import Actor
from rlframe.inferencers import Inferencer, InferencerConfig
from tests.fakes import CountingEnv, FixedParams, RecordingBuffer, counting_agent
from tests.waiting import wait_until


def make(*, budget: float, incarnation: int = 0) -> Actor:
    buffer = RecordingBuffer()
    buffer.claim_rank = lambda rank=None: (0, incarnation)
    inferencer = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.0)}))
    return Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, buffer, budget=budget)


@contextlib.contextmanager
def running(actor: Actor) -> Iterator[Any]:
    thread = threading.Thread(target=actor.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        actor.stop()
        thread.join(30.0)
        assert not thread.is_alive()
        actor.close()


def test_actor_waits_when_budget_is_used_up_and_continues_when_it_is_raised():
    actor = make(budget=10)
    with running(actor):
        wait_until(lambda: actor.env_steps >= 10)
        time.sleep(0.3)
        assert actor.env_steps in (10, 11)  # the actor steps two environments at a time
        assert actor.allow(0, 20)["env_steps"] in (10, 11)
        wait_until(lambda: actor.env_steps >= 20)
        time.sleep(0.3)
        assert actor.env_steps in (20, 21)


def test_budget_for_the_previous_incarnation_is_ignored():
    actor = make(budget=1000, incarnation=1)
    with running(actor):
        actor.allow(0, 1000)
        time.sleep(0.3)
        assert actor.env_steps == 0  # only the monitor has the step count of the previous incarnation
        actor.allow(1, 4)
        wait_until(lambda: actor.env_steps >= 4)


@pytest.mark.parametrize("incarnation", [0, 1])
def test_actor_without_a_budget_limit_runs_immediately(incarnation: int):
    actor = make(budget=float("inf"), incarnation=incarnation)
    with running(actor):
        wait_until(lambda: actor.env_steps > 100)
