"""Tests of parameters in shared memory: learners and readers in other processes restart, die, and run at full speed."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading

import jax
import numpy as np
import pytest

from rlframe.agents import PPO, PPOConfig
from rlframe.errors import PeerError, UnavailableError, UsageError
from rlframe.handles import resolve
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.memory import MACHINE
from rlframe.learners import Learner, LearnerConfig
from rlframe.params.packing import PackedParams
from rlframe.params.publication import Publication
from rlframe.params.reader import ParamReader
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, RecordingBuffer, counting_agent, reward_batch
from tests.ports import free_address
from tests.serving import CHILD_DEADLINE, Child, client, serving
from tests.waiting import wait_until

DEADLINE = 60.0


class CountedLearner(Learner):
    """A learner for tests: `learn` does one update, `given` returns how often parameters were requested by a call."""

    def __init__(self, agent=None, checkpoint_dir=None, resumes=False):
        super().__init__(LearnerConfig(checkpoint_dir=checkpoint_dir), agent or counting_agent(), RecordingBuffer())
        self._given = 0
        if resumes:
            self.restore()

    def get_params(self, known_version=-1):
        self._given += 1
        return super().get_params(known_version)

    def get_packed(self, known_version=-1):
        self._given += 1
        return super().get_packed(known_version)

    def given(self):
        return self._given

    def learn(self, reward):
        self.step(reward_batch([reward] * 4))
        return self.params_version

    def run(self):
        threading.Event().wait()


class ElsewhereLearner(CountedLearner):
    """A learner whose shared memory readers cannot open, as if the learner ran on another machine."""

    def publication_reader(self):
        reader = pickle.loads(pickle.dumps(super().publication_reader()))
        reader._name = reader._name._replace(token=reader._name.token + 1)
        return reader


def connect(address):
    """Return (the learner, a reader of its parameters)."""
    learner = resolve(client(address), "learner", deadline=CHILD_DEADLINE)
    return learner, ParamReader(learner)


@contextlib.contextmanager
def child(address, *args):
    process = Child(address, *args)
    try:
        yield process
    finally:
        process.close()


def test_parameters_of_a_learner_in_another_process_are_read_from_shared_memory():
    address = free_address()
    with child(address, CountedLearner):
        learner, reader = connect(address)
        version, params = reader.get_params()
        given = learner.given()
        assert (version, params["w"]) == (1, 0.0) and reader.get_params(1) == (1, None)
        for number in range(20):
            assert learner.learn(float(number)) == number + 2
            version, params = reader.get_params(version)
            by_courier = client(address).get_params()
            assert version == by_courier[0] == number + 2
            assert params["w"].dtype == np.float32 and params["w"].tobytes() == by_courier[1]["w"].tobytes()
            assert reader.get_params(version) == (version, None)
        assert learner.given() == given + 20


def test_parameters_from_shared_memory_equal_the_result_of_get_params():
    address = free_address()
    agent = PPO(PPOConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    learner = CountedLearner(agent)
    with serving(learner, address):
        version, params = connect(address)[1].get_params(-1)
        assert learner.given() == 0
        expected = learner.get_params()
        assert version == expected[0]
        assert jax.tree.structure(params) == jax.tree.structure(expected[1])
        jax.tree.map(np.testing.assert_array_equal, params, expected[1])
    learner.close()


@pytest.mark.system
def test_inferencer_acts_with_the_newest_parameters_of_another_process():
    address = free_address()
    with child(address, CountedLearner):
        remote, _ = connect(address)
        inferencer = Inferencer(InferencerConfig(learner_deadline=CHILD_DEADLINE), counting_agent(), client(address))
        for number in range(5):
            version = remote.learn(1.0)
            inferencer.refresh()
            assert inferencer.params_version == version == number + 2
        assert remote.given() < 5


@pytest.mark.system
def test_reader_finds_the_successor_of_a_killed_learner(tmp_path):
    address = free_address()
    with child(address, CountedLearner, None, str(tmp_path)) as process:
        learner, reader = connect(address)
        reader.get_params()
        learner.learn(1.0)
        learner.save()
        newest = learner.learn(1.0)
        assert reader.get_params()[0] == newest
        process.kill()
        learner._deadline = 1.0
        with pytest.raises(PeerError, match=rf"The learner at {address} did not answer get_packed\(\) within 1 s"):
            for _ in range(
                int(DEADLINE / 0.01)
            ):  # the reader checks only ten times a second whether the learner is alive
                assert reader.get_params(newest) == (newest, None)
                threading.Event().wait(0.01)
    with child(address, CountedLearner, None, str(tmp_path), True):
        learner._deadline = CHILD_DEADLINE
        version, params = reader.get_params(newest)
        given = learner.given()
        assert version > newest and params["w"] == 0.5
        newest = learner.learn(1.0)
        assert reader.get_params(version)[0] == newest
        assert learner.given() == given


def test_reader_uses_courier_if_it_cannot_open_the_learners_memory():
    address = free_address()
    learner = ElsewhereLearner()
    with serving(learner, address):
        _, reader = connect(address)
        for number in range(3):
            assert reader.get_params()[0] == number + 1
            learner.learn(1.0)
        assert reader.get_params(4) == (4, None)
        assert learner.given() >= 4
    learner.close()


def test_readers_use_courier_after_the_learner_is_closed():
    address = free_address()
    learner = CountedLearner()
    with serving(learner, address):
        _, reader = connect(address)
        reader.get_params()
        learner.close()
        assert learner.publication_reader() is None
        learner.learn(1.0)
        version, params = reader.get_params(1)
        assert (version, params["w"]) == (2, 0.5) and learner.given() >= 1


LEAVES = {"large": (50_000,), "small": (7,)}


def packed(version):
    return PackedParams.of({name: np.full(shape, version, np.float32) for name, shape in LEAVES.items()})


def written(reader):
    """Return the newest version whose arrays are in shared memory."""
    return reader._memory.newest_written()[0]


def publish_at_full_speed(connection):
    """Publish versions without a pause. Each number in the arrays of version N is N."""
    version = 1
    publication = Publication(version, packed(version))
    connection.send(publication.reader())
    while not connection.poll():
        version += 1
        publication.publish(version, packed(version))
    publication.close()


@pytest.mark.system
def test_reads_during_fast_publishing_return_complete_and_increasing_versions():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=publish_at_full_speed, args=(there,))
    process.start()
    try:
        assert here.poll(CHILD_DEADLINE)
        reader = here.recv()
        known, whole = -1, 0
        while whole < 300:
            version, newer = reader.read(known) or (known, None)
            assert version >= known
            if newer is not None and version > known:
                known, whole = version, whole + 1
                for leaf in newer.unpack_numpy().values():
                    np.testing.assert_array_equal(leaf, known)
    finally:
        here.send("stop")
        process.join(DEADLINE)
    assert process.exitcode == 0 and reader.is_gone


def test_first_version_is_written_only_if_a_reader_requests_it():
    publication = Publication(1, packed(1))
    reader = pickle.loads(pickle.dumps(publication.reader()))
    for version in range(2, 50):
        publication.publish(version, packed(version))
    assert written(reader) == -1
    wait_until(lambda: reader.read(-1) is not None)
    assert reader.read(49) == (49, None)
    assert reader.read(-1)[0] == 49 and written(reader) == 49
    publication.close()
    publication.close()
    assert publication.reader() is None and reader.is_gone
    assert publication.get_packed()[0] == 49


def test_version_that_follows_a_read_is_written_without_a_request():
    publication = Publication(1, packed(1))
    reader = pickle.loads(pickle.dumps(publication.reader()))
    wait_until(lambda: reader.read(-1) is not None)
    publication.publish(2, packed(2))
    wait_until(lambda: written(reader) == 2)
    for version in range(3, 50):  # version 2 was not read, so no later version is written
        publication.publish(version, packed(version))
    assert written(reader) == 2
    assert reader.read(2)[0] == 49
    publication.close()


def test_only_readers_that_opened_the_memory_can_read_it_after_close():
    publication = Publication(1, packed(1))
    late, early = pickle.dumps(publication.reader()), pickle.loads(pickle.dumps(publication.reader()))
    wait_until(lambda: early.read() is not None)
    publication.close()
    assert early.is_gone and early.read()[0] == 1
    with pytest.raises(UnavailableError, match="has exited, has closed the memory"):
        pickle.loads(late).read()


def test_parameters_of_another_ray_node_are_refused(monkeypatch):
    monkeypatch.setenv(MACHINE, "one")
    publication = Publication(1, packed(1))
    elsewhere = pickle.dumps(publication.reader())
    monkeypatch.setenv(MACHINE, "other")
    with pytest.raises(UsageError, match=r"belongs to another Ray node.* call it over the network"):
        pickle.loads(elsewhere).read()
    publication.close()


def read_forever(address, connection):
    _, reader = connect(address)
    version = -1
    while True:
        version = reader.get_params(version)[0]
        connection.send(version)


@pytest.mark.system
def test_killed_reader_blocks_no_other_process():
    before = set(threading.enumerate())  # learners of other tests may have left threads
    address = free_address()
    learner = CountedLearner()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with serving(learner, address):
        _, reader = connect(address)
        process = context.Process(target=read_forever, args=(address, there))
        process.start()
        assert here.poll(CHILD_DEADLINE)
        reader.get_params()
        given = learner.given()
        for _ in range(100):
            learner.learn(1.0)
            reader.get_params()
        process.kill()
        process.join(DEADLINE)
        for _ in range(100):
            version = learner.learn(1.0)
            assert reader.get_params()[0] == version
        assert learner.given() == given
    learner.close()
    new = set(threading.enumerate()) - before
    assert not [thread for thread in new if thread.name == "rlframe parameters"]
