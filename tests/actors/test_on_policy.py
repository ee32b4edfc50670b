"""On-policy agents in several processes: each batch has one version, even if actors pause or die."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlframe import Actor, AsyncEnv, Inferencer, InferencerConfig, LearnerConfig, ReplayBuffer, SharedMemReplayBuffer
from rlframe.errors import UsageError
from rlframe.handles import Remote
from rlframe.replay.reverb import ReverbReplayBuffer
from tests.on_policy import NUM_ENVS, RecordingLearner, env_builder, make_actor, make_agent
from tests.ports import free_address
from tests.replay.factories import servers
from tests.serving import Child, running, serving
from tests.waiting import wait_until

T = 16  # unroll_length
BOTH = [0] * NUM_ENVS + [1] * NUM_ENVS  # ranks of the items in a batch with items of both actors


@contextlib.contextmanager
def actors(*args: Any) -> Iterator[Callable[[], Child]]:
    """Yield a function that starts actors in separate processes."""
    children: list[Child] = []

    def start() -> Child:
        children.append(Child(free_address(), make_actor, *args))
        return children[-1]

    yield start
    for child in children:
        child.close()


def wait_for_batches(learner: RecordingLearner, ranks: list[int], count: int = 3) -> None:
    """Wait until the learner has learned from `count` more batches whose items have exactly these ranks."""
    begin = len(learner.learned)
    wait_until(lambda: [batch.ranks for batch in learner.learned[begin:]].count(ranks) >= count)


def assert_on_policy(learner: RecordingLearner) -> None:
    for learned in learner.learned:
        assert learned.versions == [learned.version]
        assert learned.behind == [0]  # every step used the parameters that the learner updated


@pytest.mark.system
def test_every_batch_has_the_newest_version_while_actors_pause_die_and_restart():
    agent = make_agent()
    buffer = SharedMemReplayBuffer(agent, num_writers=2)
    learner, address = RecordingLearner(LearnerConfig(), agent, buffer), free_address()
    after = functools.partial(wait_for_batches, learner)
    with serving(learner, address), running(learner), actors(agent, [address], buffer, False) as start:
        first = start()
        wait_until(lambda: buffer.stats()["steps"] > 0)  # the first actor has claimed rank 0
        second = start()
        after(BOTH, 10)
        second.kill(signal.SIGSTOP)
        after(BOTH[:NUM_ENVS])
        second.kill(signal.SIGCONT)
        after(BOTH, 10)
        first.kill(signal.SIGKILL)
        after(BOTH[NUM_ENVS:])
        start()
        after(BOTH)
    assert_on_policy(learner)
    buffer.close()


@pytest.mark.system
def test_batches_have_the_newest_version_with_reverb_and_an_inference_service():
    agent, inference, address = make_agent(), free_address(), free_address()
    server = servers().start(ReverbReplayBuffer.tables(agent, block=NUM_ENVS))
    buffer, actor_buffer = (ReverbReplayBuffer(agent, server) for _ in range(2))
    learner = RecordingLearner(LearnerConfig(), agent, buffer)
    service = Inferencer(InferencerConfig(), agent, Remote([address], "learner"))
    after = functools.partial(wait_for_batches, learner)
    nodes = (serving(learner, address), serving(service, inference), running(service), running(learner))
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node)
        start = stack.enter_context(actors(agent, [inference], actor_buffer, True))
        first = start()
        start()
        after(BOTH, 10)
        first.kill(signal.SIGSTOP)
        begin = len(learner.learned)
        wait_until(lambda: any(len(batch.ranks) == NUM_ENVS for batch in learner.learned[begin:]))
        first.kill(signal.SIGCONT)
        after(BOTH, 10)
    assert_on_policy(learner)
    for one in (buffer, actor_buffer):
        one.close()
    servers().stop(server)


def lone_actor(learner: Any, agent: Any, buffer: Any) -> Actor:
    return Actor(env_builder, Inferencer(InferencerConfig(), agent, learner), buffer)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_actor_is_ahead_of_the_learner_by_at_most_max_staleness_and_stop_ends_its_wait(max_staleness):
    agent = make_agent(max_staleness=max_staleness)
    # `lapse_after` is high, so that the actor waits even if the learner compiles for a long time.
    buffer = ReplayBuffer(agent, lapse_after=1_000.0)
    learner = RecordingLearner(LearnerConfig(), agent, buffer)
    actor = lone_actor(learner, agent, buffer)
    ahead = max_staleness + 1
    with running(actor):
        for updates in range(4):
            wait_until(lambda: buffer.stats()["steps"] == (updates + ahead) * T * NUM_ENVS)  # noqa: B023
            assert learner.step(buffer.sample()) is not None
        wait_until(lambda: buffer.stats()["steps"] == (4 + ahead) * T * NUM_ENVS)
        threading.Event().wait(0.1)  # enough time for a step, which the actor must not take
        assert buffer.stats()["steps"] == (4 + ahead) * T * NUM_ENVS
    actor.close()  # `running` has checked that `stop` ends `run` within 30 s
    assert [batch.behind for batch in learner.learned] == [[min(i, max_staleness)] for i in range(4)]


@pytest.mark.system
def test_actor_starts_another_unroll_when_the_previous_one_was_lost(caplog):
    agent = make_agent()
    buffer = ReplayBuffer(agent, lapse_after=0.2)
    learner = RecordingLearner(LearnerConfig(), agent, buffer)
    actor = lone_actor(learner, agent, buffer)
    with running(actor):
        wait_until(lambda: buffer.size >= NUM_ENVS)
        buffer.sample()
        wait_until(lambda: buffer.size >= NUM_ENVS)
        assert learner.step(buffer.sample()) is not None
    actor.close()
    assert "No version after 1 arrived" in caplog.text
    assert_on_policy(learner)


def test_learner_drops_a_batch_that_was_sampled_before_the_last_update(caplog):
    agent = make_agent()
    buffer = ReplayBuffer(agent)
    learner = RecordingLearner(LearnerConfig(), agent, buffer)
    actor = lone_actor(learner, agent, buffer)
    for _ in range(T):
        actor.step()
    batch = buffer.sample()
    assert learner.step(batch) is not None
    assert learner.step(batch) is None
    assert learner.params_version == 2
    assert "Dropping a batch of versions 1 to 1" in caplog.text
    actor.close()


def test_asynchronous_environments_are_rejected_for_on_policy_agents():
    agent = make_agent()
    buffer = ReplayBuffer(agent)
    learner = RecordingLearner(LearnerConfig(), agent, buffer)
    builder = lambda seed: AsyncEnv("gymnasium:CartPole-v1", 4, 2, "thread", seed=seed)  # noqa: E731
    actor = Actor(builder, Inferencer(InferencerConfig(), agent, learner), buffer)
    with pytest.raises(UsageError, match="Use a SyncEnv"):
        actor.run()
    actor.close()
