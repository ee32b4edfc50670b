"""Between an update and inference, parameters are packed once and unpacked once, for each kind of connection."""

from __future__ import annotations

import collections
import pickle

import numpy as np
import pytest

from rlframe.agents.trees import zero_timestep
from rlframe.coordinator.param_store import ParamStore
from rlframe.handles import Remote
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess import memory
from rlframe.learners import Learner, LearnerConfig
from rlframe.params.packing import Packing
from rlframe.params.reader import ParamReader
from tests.fakes import OBSERVATION_SPEC, RecordingBuffer, counting_agent, reward_batch
from tests.in_process import InProcess

UPDATES = 4


class Elsewhere(Learner):
    """A learner without shared memory."""

    def publication_reader(self):
        return None


def in_one_process(learner, stack):
    return learner, lambda: None


def by_a_handle(learner, stack):
    transport = InProcess()
    methods = {name: getattr(learner, name) for name in ("get_packed", "get_params", "publication_reader")}
    server = transport.serve(methods)
    stack.append(server.stop)
    return Remote([server.address], "learner", transport=transport), lambda: None


def by_a_store(learner, stack):
    made = ParamStore()
    stack.append(made.close)
    store = pickle.loads(pickle.dumps(made))

    def publish():  # does the same as a `LearnerWorker`
        version, packed = learner.get_packed(store.newest_version("main"))
        if packed is not None:
            store.put("main", version, packed)

    return ParamReader(store, "main"), publish


WAYS = {
    "in one process": (Learner, in_one_process),
    "shared memory": (Learner, by_a_handle),
    "calls": (Elsewhere, by_a_handle),
    "shared memory of a store": (Learner, by_a_store),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_version_is_packed_once_and_unpacked_once(way, monkeypatch):
    if not memory.SUPPORTED and "shared" in way:
        pytest.skip("shared memory is not supported here")
    cls, connect = WAYS[way]
    agent, stack, counts = counting_agent(), [], collections.Counter()
    learner = cls(LearnerConfig(), agent, RecordingBuffer())
    params = Packing(learner.get_params()[1])

    def count(name):
        method = getattr(Packing, name)

        def counted(self, *args):
            counts[name] += self == params
            return method(self, *args)

        monkeypatch.setattr(Packing, name, counted)

    for name in ("pack_jax", "unpack_jax", "pack_numpy", "unpack_numpy"):
        count(name)
    learned, traced = [], {}
    try:
        source, publish = connect(learner, stack)
        inferencer = Inferencer(InferencerConfig(), agent, source)
        for reward in range(UPDATES):
            learner.step(reward_batch([float(reward)] * 4))
            publish()
            env_ids, state = np.arange(1), inferencer.initial_state(1)
            output, _ = inferencer.inference(env_ids, zero_timestep(OBSERVATION_SPEC, 1), state)
            learned.append((output.params_version, float(output.extras["w"][0])))
            traced = traced or dict(counts)
    finally:
        for close in stack:
            close()
        learner.close()
    expected, w = [], 0.0
    for reward in range(UPDATES):
        w += 0.5 * (reward - w)
        expected.append((reward + 2, w))
    assert learned == expected
    # Only jitted functions pack and unpack. JAX traced them only for the first version, so the counts did not change.
    assert counts["unpack_jax"] > 0 and counts == traced
    assert not counts["pack_numpy"] and not counts["unpack_numpy"]
