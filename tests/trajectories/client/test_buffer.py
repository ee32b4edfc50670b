"""An ordinary Learner trains from the trajectory service. Each batch counts once, even if processes are killed."""

from __future__ import annotations

import pickle
import threading
import time
import uuid

import httpx
import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.learners import Learner, LearnerConfig
from rlframe.replay.base import STATS
from rlframe.trajectories import Group, TrajectoryBuffer, TrajectoryClient
from tests.trajectories.bigrams import Bigram, sample_group
from tests.trajectories.serving import DEADLINE, running_service
from tests.waiting import wait_until

SETTINGS = {"batch_size": 2, "max_token_len": 16, "num_steps": 100}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def run():
    return uuid.uuid4().hex


@pytest.fixture
def client(service, run):
    with TrajectoryClient(service.url, run=run, timeout=DEADLINE) as client:
        client.register(**SETTINGS)
        yield client


@pytest.fixture
def make_buffer(service, run, client):
    """Return a function that makes buffers. Close the buffers at the end."""
    buffers = []

    def make(**options) -> TrajectoryBuffer:
        buffers.append(TrajectoryBuffer(service.url, run=run, timeout=DEADLINE, **options))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


def numbered(number: int, **fields) -> Group:
    """Return a group of two sequences, with the number as their scores."""
    return Group([[number, 1]] * 2, [[-100, 1]] * 2, [float(number)] * 2, **fields)


def number_of(batch) -> int:
    return int(batch.data.scores[0])


def test_batch_has_data_keys_and_versions(client, make_buffer):
    buffer = make_buffer()
    assert buffer.sample() is None
    env = client.register_env(desired_name="e", group_size=1, max_token_length=16)
    client.post(Group([[1, 2, 3]], [[-100, 2, 3]], [0.5], env_id=env.env_id, policy_version=4))
    client.post(Group([[4] * 20], [[4] * 20], [1.0]))
    batch = buffer.wait_for_batch(DEADLINE)
    assert batch.data.tokens.shape == (2, 16)
    np.testing.assert_array_equal(batch.data.mask, [[0, 1, 1] + [0] * 13, [1] * 16])
    np.testing.assert_array_equal(batch.keys, [[0, 0, 0], [-1, 0, 1]])
    np.testing.assert_array_equal(batch.params_version, [4, -1])
    np.testing.assert_array_equal(batch.probabilities, np.float32([0.5, 0.5]))
    np.testing.assert_array_equal(batch.data.group, [0, 1])
    assert (batch.keys.dtype, batch.params_version.dtype) == (np.int64, np.int64)
    stats = buffer.stats()
    assert set(STATS) < set(stats)
    expected = dict(batches=1, sampled=2, added=2, steps=19, cut=1, came_again=0, lost_leases=0, items=0)
    assert {name: stats[name] for name in expected} == expected


def test_advantages_of_wrong_length_are_logged_once_and_counted(service, client, make_buffer, caplog):
    buffer = make_buffer()
    item = {"tokens": [[1, 2], [3, 4]], "masks": [[1, 2], [3, 4]], "scores": [1.0, 2.0], "advantages": [[0.5], [3, 4]]}
    for _ in range(2):
        assert httpx.post(f"{client.url}/scored_data", json=item).json() == {"status": "received"}
    for _ in range(2):
        batch = buffer.wait_for_batch(DEADLINE)
        np.testing.assert_array_equal(batch.data.advantages[:, :2], [[1, 1], [3, 4]])
    assert buffer.stats()["unfit_advantages"] == 2
    assert [record.message[:13] for record in caplog.records] == ["1 sequences o"]


def test_group_with_unknown_token_is_refused_and_acknowledged(client, make_buffer, caplog):
    buffer = make_buffer(vocab_size=8)
    assert buffer.sample() is None  # environments cannot register before the trainer's first request
    env = client.register_env(max_token_length=16, desired_name="other", weight=1.0, group_size=2).env_id
    client.post([Group([[8, 1]] * 2, [[8, 1]] * 2, [1.0, 0.0], env_id=env)])  # the batch has no other group
    assert buffer.wait_for_batch(DEADLINE) is None
    assert f"environment {env} has the token 8, but the model's tokens are 0 to 7" in caplog.text
    client.post([Group([[-5, 1]] * 2, [[-5, 1]] * 2, [1.0, 0.0], env_id=env), numbered(2)])
    assert buffer.wait_for_batch(DEADLINE) is None
    batch = buffer.wait_for_batch(DEADLINE)
    np.testing.assert_array_equal(batch.data.scores, [2, 2])
    assert buffer.stats()["refused"] == 2 and len(caplog.records) == 1
    buffer.note_update(batch.keys, 1)
    buffer.close()
    assert make_buffer().sample() is None  # All groups are acknowledged.


def test_other_groups_of_batch_with_unknown_token_are_trained_on(service, make_buffer):
    run = uuid.uuid4().hex
    with TrajectoryClient(service.url, run=run, timeout=DEADLINE) as client:
        client.register(batch_size=4, max_token_len=16, num_steps=100)
        client.post([Group([[9, 1]] * 2, [[9, 1]] * 2, [1.0, 0.0]), numbered(2)])
        buffer = TrajectoryBuffer(service.url, run=run, timeout=DEADLINE, vocab_size=8)
        data = buffer.wait_for_batch(DEADLINE).data
        buffer.close()
    np.testing.assert_array_equal(data.mask.sum(axis=1), [0, 0, 1, 1])
    np.testing.assert_array_equal(data.tokens[:, :2], [[0, 0], [0, 0], [2, 1], [2, 1]])
    assert not data.advantages[:2].any() and data.scores[:2].tolist() == [0, 0]


def test_size_counts_queued_groups(client, make_buffer):
    buffer = make_buffer()
    client.post([numbered(1), numbered(2)])
    assert buffer.size == 2
    assert buffer.stats()["bytes"] > 0


def test_buffer_without_registered_trainer_is_refused(service):
    with pytest.raises(UsageError, match=r"No trainer has registered.*TrajectoryClient.register"):
        TrajectoryBuffer(service.url, run="nobody")


def test_actors_cannot_write_to_trajectory_buffer(make_buffer):
    buffer = make_buffer()
    with pytest.raises(UsageError, match="environments send their groups"):
        buffer.claim_rank(1)
    with pytest.raises(UsageError, match="no priorities"):
        buffer.update_priorities(np.zeros((1, 3)), np.zeros(1))


def test_buffer_can_be_pickled(client, make_buffer):
    copy = pickle.loads(pickle.dumps(make_buffer(max_token_len=8)))
    client.post(numbered(3))
    assert copy.sample().data.tokens.shape == (2, 8)
    copy.close()


# Leases.


def test_batch_is_acknowledged_when_next_batch_is_requested(client, make_buffer):
    buffer = make_buffer()
    client.post([numbered(1), numbered(2)])
    assert number_of(buffer.sample()) == 1
    assert client.status().leased == 1
    assert number_of(buffer.sample()) == 2
    assert client.status().leased == 1
    assert buffer.sample() is None
    assert client.status().leased == 0


def test_unfinished_batches_are_given_back(client, make_buffer):
    client.post([numbered(number) for number in range(6)])
    buffer = make_buffer()
    dataset = buffer.make_dataset(prefetch=2)
    assert [number_of(next(dataset)) for _ in range(2)] == [0, 1]
    wait_until(lambda: client.status().leased == 3)  # leased: the current batch and two prefetched batches
    dataset.close()
    wait_until(lambda: client.status().queue_size == 2)
    other = make_buffer()
    assert [number_of(other.sample()) for _ in range(2)] == [2, 3]
    buffer.close()  # the reader did not finish the second batch
    assert [number_of(other.sample()) for _ in range(3)] == [1, 4, 5]
    assert other.sample() is None and client.status().leased == 0


def test_finished_batches_are_acknowledged_at_close(client, make_buffer):
    client.post([numbered(1), numbered(2)])
    buffer = make_buffer()
    with buffer.make_dataset() as dataset:
        buffer.note_update(next(dataset).keys, 7)
    buffer.close()
    other = make_buffer()
    assert number_of(other.sample()) == 2 and other.sample() is None


def test_batch_of_dead_buffer_goes_to_another_buffer(client, make_buffer):
    client.post(numbered(1))
    dead = make_buffer(lease=0.3)
    first = dead.sample()
    dead._renewal.close()  # A dead process does not renew the lease of its batch.
    other = make_buffer()
    batch = other.wait_for_batch(DEADLINE)
    assert (number_of(batch), batch.keys[0, 1]) == (1, first.keys[0, 1])


def test_lease_is_renewed_while_batch_is_in_use(client, make_buffer):
    client.post([numbered(1), numbered(2)])
    buffer, other = make_buffer(lease=3.0), make_buffer()
    assert number_of(buffer.sample()) == 1
    until_later = time.monotonic() + 4.0  # more seconds than the lease of a batch
    assert number_of(other.sample()) == 2
    while time.monotonic() < until_later:
        assert other.sample() is None
        time.sleep(0.05)
    assert buffer.sample() is None
    assert (buffer.stats()["lost_leases"], client.status().leased) == (0, 0)


def test_batch_of_interrupted_request_is_given_back(client, make_buffer, monkeypatch):
    client.post([numbered(1), numbered(2)])
    buffer = make_buffer()
    ask = buffer._client.batch

    def interrupted(**options):
        ask(**options)
        raise KeyboardInterrupt

    monkeypatch.setattr(buffer._client, "batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.sample()
    monkeypatch.undo()
    assert client.status().queue_size == 1
    buffer.close()
    other = make_buffer()
    assert [number_of(other.sample()) for _ in range(2)] == [1, 2]


def test_redelivered_batch_is_not_returned_twice(client, make_buffer, monkeypatch):
    client.post(numbered(1))
    buffer = make_buffer(lease=0.3)
    monkeypatch.setattr(
        buffer._client, "renew", lambda *args, **options: False
    )  # The request fails as if the service were unreachable.
    with buffer.make_dataset(prefetch=2) as dataset:
        wait_until(lambda: buffer.stats()["came_again"] >= 1)  # The lease of the batch ended before the batch was read.
        assert number_of(next(dataset)) == 1
        client.post(numbered(2))
        assert number_of(next(dataset)) == 2
    assert buffer.stats()["batches"] == 2


def test_lost_lease_is_counted(client, make_buffer):
    client.post(numbered(1))
    buffer = make_buffer()
    batch = buffer.sample()
    assert client.ack(int(batch.keys[0, 1]))
    assert buffer.sample() is None
    assert buffer.stats()["lost_leases"] == 1


@pytest.mark.system
def test_every_group_is_read_once_despite_kills_of_the_service(tmp_path):
    with running_service(tmp_path) as service, TrajectoryClient(service.url, timeout=DEADLINE) as client:
        client.register(**SETTINGS)
        buffer = TrajectoryBuffer(service.url, timeout=DEADLINE)

        def post() -> None:
            for number in range(40):
                client.post(numbered(number))

        posting = threading.Thread(target=post)
        posting.start()
        read = []
        with buffer.make_dataset(timeout=DEADLINE) as dataset:
            for batch in dataset:
                read.append(number_of(batch))
                if len(read) in (5, 20):
                    service.restart()
                if len(read) == 40:
                    break
        posting.join(DEADLINE)
        buffer.close()
        assert read == list(range(40))


@pytest.mark.system
def test_close_does_not_wait_for_dead_service(tmp_path):
    with running_service(tmp_path, "--store", "memory") as service, TrajectoryClient(service.url) as client:
        client.register(**SETTINGS)
        client.post(numbered(1))
        before = set(threading.enumerate())
        buffer = TrajectoryBuffer(service.url, timeout=10 * DEADLINE)
        dataset = buffer.make_dataset()
        next(dataset)
        service.kill()
        buffer.close()
        assert buffer.closed and list(dataset) == []
        assert "rlframe replay dataset" not in {thread.name for thread in set(threading.enumerate()) - before}


# The Learner.


@pytest.mark.system
def test_learner_trains_on_groups_sampled_from_its_parameters(client, make_buffer):
    client.register(**{**SETTINGS, "batch_size": 32})
    buffer = make_buffer()
    learner = Learner(LearnerConfig(), Bigram(), buffer)
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(25):
        version, params = learner.get_params()
        client.post([sample_group(params, rng, version) for _ in range(4)])
        logs = learner.step(buffer.wait_for_batch(DEADLINE))
        scores.append(float(logs["score"]))
        assert logs["staleness"] == 0
    assert learner.step(buffer.sample()) is None
    assert np.mean(scores[:3]) < 0.4 and np.mean(scores[-3:]) > 0.8
    status = client.status()
    assert (status.policy_version, status.current_step, status.leased) == (learner.params_version, 25, 0)


def test_learner_trains_while_environments_send_groups(service, run, client, make_buffer):
    client.register(**{**SETTINGS, "batch_size": 16}, max_staleness=8, stale="discard")
    buffer = make_buffer()
    learner = Learner(LearnerConfig(max_learner_steps=60), Bigram(), buffer)
    assert buffer.sample() is None  # environments cannot register before the trainer's first request
    failures, finished = [], threading.Event()

    def environment(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            env_id = client.register_env(desired_name="e", group_size=8, max_token_length=16).env_id
            while not finished.is_set():
                if client.env_status(env_id).queue_size > 8:
                    finished.wait(0.02)
                    continue
                version, params = learner.get_params()
                client.post(sample_group(params, rng, version, env_id=env_id))
        except Exception as error:
            failures.append(error)

    environments = [threading.Thread(target=environment, args=(seed,)) for seed in range(2)]
    for thread in environments:
        thread.start()
    learner.run()
    finished.set()
    for thread in environments:
        thread.join(DEADLINE)
    learner.close()
    assert failures == []
    stats = learner.stats()
    assert stats["learner_steps"] == 60 and 0 <= stats["staleness"] <= 12
    rng, (version, params) = np.random.default_rng(9), learner.get_params()
    assert np.mean(sample_group(params, rng, version, sequences=64).scores) > 0.8
    buffer.close()
    status = client.status()
    assert status.policy_version >= learner.params_version - 2
    # The buffer gave the last batch back. Until another request gets this batch, its groups count as leased.
    assert httpx.get(f"{service.url}/runs/{run}/report", timeout=DEADLINE).json()["batches_out"] == 0
    assert status.current_step >= 60


def test_staleness_is_averaged_over_known_versions(client, make_buffer):
    client.register(**{**SETTINGS, "batch_size": 4})
    buffer = make_buffer()
    learner = Learner(LearnerConfig(), Bigram(), buffer)
    params, rng = learner.get_params()[1], np.random.default_rng(0)
    client.post([sample_group(params, rng, version, sequences=2) for version in (None, None, 1, None)])
    assert np.isnan(learner.step(buffer.wait_for_batch(DEADLINE))["staleness"])
    assert learner.step(buffer.sample())["staleness"] == 1  # group of version 1, parameters of version 2
