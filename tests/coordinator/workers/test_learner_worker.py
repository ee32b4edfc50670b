"""Tests of the worker that learns."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rlframe.actors import Actor
from rlframe.agents import DQN, PPO, DQNConfig, PPOConfig
from rlframe.coordinator.messages import CallRefused, Closed, Demand, Learn, Learned, NotReady, Started, StartTask
from rlframe.coordinator.param_store import Attempt, ParamStore
from rlframe.coordinator.workers import learner_worker as learner_module
from rlframe.coordinator.workers.learner_worker import LearnerWorker
from rlframe.envs import SyncEnv
from rlframe.errors import FencedError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import LearnerConfig
from rlframe.params.reader import ParamReader
from rlframe.replay import ReplayBuffer
from tests.coordinator.workers.caller import PATIENCE, Caller
from tests.fakes import CountingEnv, FixedParams, counting_agent
from tests.waiting import wait_until

POLICY = "main"
ROOT = Path(__file__).parents[3]


class LearnerSampledBuffer(ReplayBuffer):
    """A buffer from which the learner draws its batches, like a replay server."""

    fetches_by_key = False


class CoordinatorSampledBuffer(ReplayBuffer):
    """A buffer from which the coordinator draws. `calls` contains the learner's calls."""

    def __init__(self, agent) -> None:
        super().__init__(agent)
        self.gone, self.calls = set(), []
        self.is_damaged = False

    def fetch(self, keys, probabilities):
        if keys.tobytes() in self.gone:
            return None
        batch = super().fetch(keys, probabilities)
        if self.is_damaged:
            batch.data.reward[:] = np.nan
        return batch

    def update_priorities(self, keys, priorities):
        self.calls.append("priorities")

    def forget_before(self, version):
        self.calls.append("forget")

    def note_update(self, keys, version):
        self.calls.append("update")


def fill(buffer, steps: int = 8) -> None:
    inferencer = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.0)}))
    actor = Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, buffer)
    for _ in range(steps):
        actor.step()
    actor.close()


@pytest.fixture
def store():
    return ParamStore(kept=100)


@pytest.fixture
def make(store):
    """Return a function that makes a worker, and returns a caller for its task."""
    workers = []

    def make(buffer, agent=None, incarnation=0, *, task_id="learn", attempt=0, **config):
        agent = agent or counting_agent(prioritized=buffer.spec.kind == "prioritized")
        worker = LearnerWorker(LearnerConfig(**config), agent, buffer, store, "learner/0", 0, incarnation)
        workers.append(worker)
        return Caller(worker, task_id, attempt=attempt)

    yield make
    for worker in workers:
        worker.close()


def grant(count: int) -> Learn:
    return Learn(count, seconds=60.0)


def by_key(batches) -> Learn:
    return Learn(len(batches), tuple(batches), seconds=60.0)


def start(call: Caller, **options) -> Started:
    started = call.until_done("start_task", StartTask("learn", POLICY, options))
    assert isinstance(started, Started), started
    return started


def filled(kind=LearnerSampledBuffer, prioritized=False):
    buffer = kind(counting_agent(prioritized=prioritized))
    fill(buffer)
    return buffer


# --- start


def test_start_publishes_the_first_version(make, store):
    started = start(make(filled()))
    assert started.info == {"learner_steps": 0, "params_version": 1, "resumed": False}
    found = store.get(POLICY)
    assert (found.version, found.params) == (1, {"w": 0.0})
    assert found.hparams == {"learner_steps": 0, "policy": {}}


@pytest.mark.parametrize(("in_store", "min_version"), [(7, -1), (-1, 7), (5, 7), (7, 5)])
def test_learner_without_a_checkpoint_publishes_a_higher_version_than_all_known_versions(
    make, store, in_store, min_version
):
    if in_store >= 0:
        store.put(POLICY, in_store, {"w": np.float32(9.0)})
    call = make(filled())
    assert start(call, min_version=min_version).info["params_version"] == 8
    assert (store.newest_version(POLICY), store.get(POLICY).params) == (8, {"w": 0.0})
    assert call.until_done("learn", grant(1)).params_version == 9


def test_replacement_of_a_lost_learner_continues_from_the_last_checkpoint(make, store, tmp_path):
    config = {"checkpoint_dir": str(tmp_path / "checkpoints"), "resume": True, "checkpoint_every": 2}
    first = make(filled(), **config)
    start(first)
    first.until_done("learn", grant(5))
    published = store.newest_version(POLICY)
    again = make(filled(), incarnation=1, attempt=1, **config)  # the first worker is lost, so its task was not closed
    started = start(again, min_version=published)
    assert (started.info["learner_steps"], started.info["resumed"]) == (4, True)
    assert started.info["params_version"] == store.newest_version(POLICY) > published
    assert store.get(POLICY).params["w"] == 1 - 0.5**4  # parameters of the checkpoint


# --- grants


def test_learner_draws_and_reports_the_batches_of_a_grant(make, store):
    buffer = filled()
    call = make(buffer)
    start(call)
    learned = call.until_done("learn", grant(3))
    assert (learned.learner_steps, learned.params_version, learned.dropped) == (3, 4, 0)
    assert [update.keys.shape for update in learned.updates] == [(4, 3)] * 3
    assert all(update.priorities is None for update in learned.updates)
    assert learned.logs == {"loss": 0.0625, "staleness": 2.0}  # version 3 learned from data of version 1
    assert buffer.stats()["sampled"] == 12
    assert (store.newest_version(POLICY), store.get(POLICY).params["w"]) == (4, 0.875)


def test_newest_version_is_in_the_store_when_the_call_returns(make, store):
    call = make(filled())
    start(call)
    for count in (3, 2):
        learned = call.until_done("learn", grant(count))
        assert store.newest_version(POLICY) == learned.params_version
    assert store.versions(POLICY)[0] == 1 and store.newest_version(POLICY) == 6


def test_each_batch_gives_one_set_of_priorities_including_the_last_batch(make):
    buffer = filled(prioritized=True)
    written, write = [], buffer.update_priorities
    buffer.update_priorities = lambda keys, priorities: (written.append(keys), write(keys, priorities))
    call = make(buffer)
    start(call)
    learned = call.until_done("learn", grant(4))
    assert len(learned.updates) == len(written) == 4
    for update, keys in zip(learned.updates, written, strict=True):
        np.testing.assert_array_equal(update.keys, keys)
        np.testing.assert_array_equal(update.priorities, np.ones(4))
    assert len(call.until_done("learn", grant(2)).updates) == 2


def test_learner_without_data_replies_not_ready_and_learns_when_data_arrives(make):
    buffer = LearnerSampledBuffer(counting_agent())
    call = make(buffer)
    start(call)
    header = call.header()
    wait_until(lambda: call.worker.learn(header, Learn(1, seconds=0.05)) == NotReady("data"))
    fill(buffer)
    assert call.repeat_until_done("learn", Learn(1, seconds=0.05), header).learner_steps == 1


def test_no_update_starts_after_the_time_is_up(make):
    call = make(filled())
    start(call)
    learned = call.until_done("learn", Learn(10**6, seconds=0.1))
    assert 0 < len(learned.updates) < 10**6
    assert learned.learner_steps == len(learned.updates)


def test_demand_is_limited_by_the_remaining_learner_steps(make):
    call = make(filled(), max_learner_steps=40)
    start(call)
    assert call.until_done("data_demand") == Demand(32)
    call.until_done("learn", grant(30))
    assert call.until_done("data_demand") == Demand(10)
    call.until_done("learn", grant(10))
    assert call.until_done("data_demand") == Demand(0)


# --- batches drawn by the coordinator


def test_learner_reports_priorities_of_drawn_batches_but_does_not_write_them(make):
    buffer = filled(CoordinatorSampledBuffer, prioritized=True)
    call = make(buffer)
    start(call)
    batches = tuple(buffer.draw() for _ in range(3))
    learned = call.until_done("learn", by_key(batches))
    assert learned.learner_steps == 3 and learned.dropped == 0
    for update, batch in zip(learned.updates, batches, strict=True):
        np.testing.assert_array_equal(update.keys, batch.keys)
        np.testing.assert_array_equal(update.priorities, np.ones(4))
    assert buffer.calls == []


def test_missing_batches_are_dropped_and_counted(make):
    buffer = filled(CoordinatorSampledBuffer)
    call = make(buffer)
    start(call)
    batches = tuple(buffer.draw() for _ in range(3))
    buffer.gone = {batches[1].keys.tobytes()}
    learned = call.until_done("learn", by_key(batches))
    assert (learned.learner_steps, learned.dropped) == (2, 1)
    assert [update.keys.tolist() for update in learned.updates] == [batches[i].keys.tolist() for i in (0, 2)]
    buffer.gone |= {batches[0].keys.tobytes()}
    learned = call.until_done("learn", by_key(batches[:2]))
    assert (learned.updates, learned.dropped, learned.learner_steps) == ((), 2, 2)


def test_drawn_batches_are_learned_even_if_the_time_is_up(make):
    buffer = filled(CoordinatorSampledBuffer)
    call = make(buffer)
    start(call)
    batches = tuple(buffer.draw() for _ in range(3))
    assert len(call.until_done("learn", Learn(3, batches, seconds=0.0)).updates) == 3


def test_learner_saves_only_a_buffer_that_it_samples(make, tmp_path):
    for kind, saved in ((CoordinatorSampledBuffer, False), (LearnerSampledBuffer, True)):
        buffer = filled(kind)
        call = make(buffer, checkpoint_dir=str(tmp_path / kind.__name__), checkpoint_every=1)
        start(call)
        call.until_done("learn", by_key([buffer.draw()]) if kind is CoordinatorSampledBuffer else grant(1))
        replay = tmp_path / kind.__name__ / "replay"
        assert (replay.is_dir() and any(replay.iterdir())) == saved


# --- checkpoints and the end of a task


def steps_saved(path) -> list[int]:
    return sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdigit())


def test_checkpoints_are_written_when_due_and_when_requested(make, tmp_path):
    call = make(filled(), checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_every=4, checkpoint_seconds=1e9)
    start(call)
    call.until_done("learn", grant(9))
    assert steps_saved(tmp_path / "checkpoints") == [4, 8]
    call.until_done("learn", Learn(1, seconds=60.0, save=True))
    assert steps_saved(tmp_path / "checkpoints") == [4, 8, 10]


@pytest.mark.parametrize("updates", [0, 3])
def test_save_request_without_batches_saves_the_published_version(make, store, tmp_path, updates):
    buffer = filled(CoordinatorSampledBuffer)
    call = make(buffer, checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_every=100, checkpoint_seconds=1e9)
    start(call)
    if updates:
        call.until_done("learn", by_key([buffer.draw() for _ in range(updates)]))
    learned = call.until_done("learn", Learn(0, save=True))
    assert dataclasses.replace(learned, logs={}) == Learned(store.newest_version(POLICY), updates, ())
    assert steps_saved(tmp_path / "checkpoints") == [updates]
    again = make(filled(), incarnation=1, attempt=1, checkpoint_dir=str(tmp_path / "checkpoints"), resume=True)
    evaluated = store.get(POLICY).params
    assert start(again).info["learner_steps"] == updates
    assert store.get(POLICY).params == evaluated == {"w": 1 - 0.5**updates}


def test_final_close_saves_the_last_version_and_returns_its_path(make, store, tmp_path):
    path = tmp_path / "checkpoints"
    call = make(filled(), checkpoint_dir=str(path), checkpoint_every=1000, checkpoint_seconds=1e9)
    start(call)
    call.until_done("learn", grant(3))
    closed = call.until_done("close_task", True)
    assert closed == Closed({"learner_steps": 3, "params_version": 4, "checkpoint": str(path / "3")})
    assert store.get(POLICY).params["w"] == 0.875
    again = make(filled(), incarnation=1, checkpoint_dir=str(path), resume=True)
    assert start(again).info == {"learner_steps": 3, "params_version": 5, "resumed": True}


def test_close_that_is_not_final_saves_nothing(make, tmp_path):
    call = make(filled(), checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_seconds=1e9)
    start(call)
    call.until_done("learn", grant(3))
    assert call.until_done("close_task", False).result["checkpoint"] is None


def test_non_finite_loss_fails_permanently_and_is_not_published(make, store):
    buffer = filled(CoordinatorSampledBuffer)
    call = make(buffer)
    start(call)
    buffer.is_damaged = True
    failed = call.until_done("learn", by_key([buffer.draw()]))
    assert (failed.error, failed.is_permanent) == ("NonFiniteLossError", True)
    assert store.versions(POLICY) == [1]


def test_newer_attempt_publishes_higher_versions_than_the_older_attempt(make, store):
    call = make(filled())
    start(call)
    call.until_done("learn", grant(3))
    call.attempt = 1
    assert start(call, min_version=4).info == {"learner_steps": 0, "params_version": 5, "resumed": False}
    assert store.versions(POLICY)[-2:] == [4, 5]


class BlockingBuffer(LearnerSampledBuffer):
    """A buffer whose `sample` blocks, as in a process that was stopped by SIGSTOP."""

    def __init__(self, agent) -> None:
        super().__init__(agent)
        self.blocks, self.is_blocked, self.resume = False, threading.Event(), threading.Event()

    def sample(self):
        if self.blocks:
            self.is_blocked.set()
            assert self.resume.wait(PATIENCE)
        return super().sample()


def everything_in(path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# With 0.0, the learner publishes first. With 1e9, it saves first.
@pytest.mark.parametrize("publish_every", [0.0, pytest.param(1e9, marks=pytest.mark.system)])
def test_learner_that_wakes_up_after_its_replacement_started_writes_nothing(
    make, store, tmp_path, monkeypatch, publish_every
):
    config = {"checkpoint_dir": str(tmp_path / "checkpoints"), "resume": True, "checkpoint_every": 1}
    buffer = filled(BlockingBuffer)
    old = make(buffer, **config)
    start(old)
    old.until_done("learn", grant(3))
    monkeypatch.setattr(learner_module, "_PUBLISH_EVERY", publish_every)
    buffer.blocks = True
    header = old.header()
    assert old.worker.learn(header, grant(5)) == NotReady()
    assert buffer.is_blocked.wait(PATIENCE)

    new = make(filled(), incarnation=1, attempt=1, **config)
    assert start(new).info["learner_steps"] == 3
    new.until_done("learn", grant(2))
    versions, files = store.versions(POLICY), everything_in(tmp_path)
    buffer.resume.set()
    failed = old.repeat_until_done("learn", grant(5), header)
    assert (failed.error, failed.is_permanent) == ("FencedError", False)
    assert "Attempt 0 of epoch 0 is fenced off" in failed.message
    assert (store.versions(POLICY), everything_in(tmp_path)) == (versions, files)
    assert old.worker.ping().phase == "idle"
    assert isinstance(old.until_done("learn", grant(1)), CallRefused)

    learned = new.until_done("learn", grant(2))
    assert (learned.learner_steps, store.newest_version(POLICY)) == (7, learned.params_version)
    assert learned.params_version > versions[-1] and steps_saved(tmp_path / "checkpoints")[-1] == 7


def test_fenced_learner_writes_no_last_checkpoint(make, store, tmp_path):
    config = {"checkpoint_dir": str(tmp_path / "checkpoints"), "resume": True, "checkpoint_every": 2}
    old = make(filled(), **config)
    start(old)
    old.until_done("learn", grant(3))
    new = make(filled(), incarnation=1, attempt=1, **config)
    start(new)
    files = everything_in(tmp_path)
    assert old.until_done("close_task", True).error == "FencedError"
    assert everything_in(tmp_path) == files and steps_saved(tmp_path / "checkpoints") == [2]
    assert old.worker.ping().phase == "idle"
    assert new.until_done("close_task", True).result["learner_steps"] == 2


def test_fenced_learner_reserves_no_versions(make, store, tmp_path):
    config = {"checkpoint_dir": str(tmp_path / "checkpoints"), "resume": True, "checkpoint_seconds": 1e9}
    old = make(filled(), checkpoint_every=10**6, **config)
    start(old)  # version 1 needs no reservation, but version 2 does
    start(make(filled(), incarnation=1, attempt=1, **config))
    files = everything_in(tmp_path)
    assert old.until_done("learn", grant(1)).error == "FencedError"
    assert everything_in(tmp_path) == files


def test_learner_publishes_a_higher_version_than_the_last_version_of_a_fenced_attempt(make, store):
    old, open_ = Attempt(0, 0), store.open_policy
    store.open_policy(POLICY, old)

    def open_late(policy_id, attempt):
        store.put(POLICY, 50, {"w": np.float32(9.0)}, attempt=old)
        open_(policy_id, attempt)

    store.open_policy = open_late
    new = make(filled(), attempt=1)
    assert start(new, min_version=7).info["params_version"] == 51
    assert new.until_done("learn", grant(1)).params_version == store.newest_version(POLICY) == 52


def test_learner_without_data_puts_its_version_into_a_restarted_store(make, store):
    call = make(filled(CoordinatorSampledBuffer), max_learner_steps=0)
    start(call)
    store._policies.clear()
    assert call.until_done("learn", Learn(0, ())).params_version == 1
    assert (store.versions(POLICY), store.get(POLICY).params) == ([1], {"w": 0.0})
    with pytest.raises(FencedError):
        store.check_not_fenced(POLICY, Attempt(-1, 0))


@pytest.mark.system
def test_process_that_resumes_after_its_replacement_started_writes_nothing(make, store, tmp_path):
    (tmp_path / "store").write_bytes(pickle.dumps(store))
    command = [sys.executable, "-m", "tests.coordinator.workers.learner_process", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as old:
        try:
            assert read_line(old) == "started"
            request_update(old)
            assert read_line(old)[0] == "Learned"
            os.kill(old.pid, signal.SIGSTOP)
            request_update(old)  # the process reads the request after SIGCONT
            config = {"checkpoint_dir": str(tmp_path / "checkpoints"), "resume": True, "checkpoint_every": 2}
            new = make(filled(), incarnation=1, attempt=1, **config)
            assert start(new).info["learner_steps"] == 1
            new.until_done("learn", grant(2))
            versions, files = store.versions(POLICY), everything_in(tmp_path)
            os.kill(old.pid, signal.SIGCONT)
            assert read_line(old) == ["Failed", "FencedError", "idle"]
            request_update(old)
            assert read_line(old) == ["CallRefused", "learner/0 has already ended learn, attempt 0.", "idle"]
            assert (store.versions(POLICY), everything_in(tmp_path)) == (versions, files)
            assert new.until_done("learn", grant(1)).params_version == store.newest_version(POLICY) == versions[-1] + 1
        finally:
            old.kill()


def request_update(process) -> None:
    process.stdin.write(b"learn\n")
    process.stdin.flush()


def read_line(process):
    return json.loads(process.stdout.readline())


def test_attempt_of_a_later_epoch_is_newer_even_with_a_lower_number(make, store):
    first = make(filled(), attempt=4)
    start(first, epoch=1_000)
    session = make(filled(), incarnation=1, task_id="of the next session")
    start(session, epoch=2_000)
    store.check_not_fenced(POLICY, Attempt(2_000, 0))
    first.attempt = 5
    failed = first.until_done("start_task", StartTask("learn", POLICY, {"epoch": 1_000}))
    assert (failed.error, failed.is_permanent) == ("FencedError", False)
    assert first.worker.ping().phase == "idle"
    assert session.until_done("learn", grant(1)).params_version == store.newest_version(POLICY)


def test_close_ends_a_grant_that_waits_for_data(make):
    call = make(LearnerSampledBuffer(counting_agent()))
    start(call)
    assert call.call_once("learn", Learn(1, seconds=1e6)) == NotReady()
    assert call.until_done("close_task", False).result["learner_steps"] == 0


# --- with real agents


@pytest.fixture(scope="module")
def cartpole():
    env = SyncEnv("gymnasium:CartPole-v1", 4, "loop")
    yield env.observation_spec, env.action_spec
    env.close()


def collect(agent, buffer, store, steps: int) -> Actor:
    inferencer = Inferencer(InferencerConfig(), agent, ParamReader(store, POLICY))
    actor = Actor(lambda seed: SyncEnv("gymnasium:CartPole-v1", 4, "loop", seed=seed), inferencer, buffer)
    actor.collect(steps=steps, seconds=60.0)
    return actor


def test_dqn_learns_from_collected_data(make, store, cartpole):
    config = DQNConfig(batch_size=32, min_replay_size=64, update_period=1, replay_capacity=1_000, prioritized=True,
                       total_learner_steps=100)  # fmt: skip
    agent = DQN(config, *cartpole)
    buffer = LearnerSampledBuffer(agent)
    call = make(buffer, agent)
    start(call)
    collect(agent, buffer, store, 200).close()
    learned = call.until_done("learn", grant(5))
    assert learned.learner_steps == 5 and np.isfinite(learned.logs["loss"])
    assert all((update.priorities > 0).all() for update in learned.updates)
    dropped = buffer.stats()["dropped_priorities"]
    assert dropped == 0 and len({update.keys.tobytes() for update in learned.updates}) == 5


@pytest.mark.system
def test_ppo_publishes_each_version_at_once_and_requests_one_batch(make, store, cartpole):
    agent = PPO(PPOConfig(unroll_length=8, num_epochs=1, num_minibatches=1), *cartpole)
    buffer = LearnerSampledBuffer(agent)
    call = make(buffer, agent)
    start(call)
    assert call.until_done("data_demand").batches == 1
    actor = collect(agent, buffer, store, 30)
    assert call.until_done("learn", grant(1)).params_version == 2
    actor.collect(steps=30, seconds=60.0)
    learned = call.until_done("learn", Learn(8, seconds=0.2))
    assert (learned.params_version, len(learned.updates)) == (3, 1)
    assert store.versions(POLICY) == [1, 2, 3]
    actor.close()


@pytest.mark.system
def test_too_old_batch_is_dropped_and_counted(make, store, cartpole):
    agent = PPO(PPOConfig(unroll_length=8, num_epochs=1, num_minibatches=1), *cartpole)
    buffer = CoordinatorSampledBuffer(agent)
    call = make(buffer, agent)
    start(call)
    collect(agent, buffer, store, 30).close()
    batch = buffer.draw()
    assert call.until_done("learn", by_key([batch])).dropped == 0
    learned = call.until_done("learn", by_key([batch]))  # learner has version 2, data has version 1
    assert (learned.updates, learned.dropped, learned.params_version) == ((), 1, 2)


def test_progress_count_rises_during_a_long_grant(make):
    call = make(filled())
    start(call)
    assert call.call_once("learn", Learn(10**6, seconds=1e6)) == NotReady()
    before = call.worker._progress_marker()
    wait_until(lambda: call.worker._progress_marker() > before)
    assert call.until_done("close_task", False).result["learner_steps"] > 0
