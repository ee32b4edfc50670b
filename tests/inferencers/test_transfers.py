"""Arrays that a call of an Inferencer copies to the device and back."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from dm_env import specs

from rlframe.agents import PPO, PPOConfig
from rlframe.agents.networks import MLPConfig
from rlframe.agents.recurrent import LSTMConfig
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.params.packing import ByteLayout
from rlframe.types import MID, TimeStep, global_env_ids

OBSERVATION = {
    "vector": specs.Array((3,), np.float32),
    "flags": specs.BoundedArray((2,), np.uint8, 0, 1),
    "count": specs.BoundedArray((), np.int32, 0, 9),
}
NETWORKS = {"mlp": MLPConfig(hidden=(8,)), "lstm": LSTMConfig(hidden=(8,), size=8)}
ROWS = 5


def make_call(agent, seed=0):
    rng = np.random.default_rng(seed)
    observation = {
        "vector": rng.standard_normal((ROWS, 3)).astype(np.float32),
        "flags": rng.integers(0, 2, (ROWS, 2)).astype(np.uint8),
        "count": rng.integers(0, 10, ROWS).astype(np.int32),
    }
    ones = np.ones(ROWS, np.float32)
    timestep = TimeStep(np.full(ROWS, MID, np.uint8), ones, ones, observation)
    state = jax.tree.map(np.asarray, agent.initial_state(ROWS))
    return global_env_ids(0, np.arange(ROWS)), timestep, state


@pytest.mark.parametrize("network", NETWORKS)
def test_packed_request_gives_the_same_answer_with_one_upload_and_one_download(network, monkeypatch):
    agent = PPO(PPOConfig(total_learner_steps=1), OBSERVATION, specs.DiscreteArray(4), net_factory=NETWORKS[network])
    learner = Learner(LearnerConfig(), agent, None)
    plain, packing = (Inferencer(InferencerConfig(pack_requests=packs), agent, learner) for packs in (False, True))
    call = make_call(agent)
    jax.tree.map(np.testing.assert_array_equal, packing.inference(*call), plain.inference(*call))
    uploads, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda tree, *device: uploads.append(tree) or put(tree, *device))
    downloads, policy, step = [], packing._policy, packing._policy.step
    monkeypatch.setattr(policy, "step", lambda *args: downloads.extend(found := step(*args)) or found)
    with jax.transfer_guard_host_to_device("disallow"):
        packing.inference(*make_call(agent, seed=1))
    assert [upload.dtype for upload in uploads] == [np.uint8] and len(downloads) == 1
    learner.close()


def test_byte_layout_returns_the_tree_with_the_dtypes_of_jax():
    tree = {
        "a": np.array([True, False, True]),
        "b": (np.float64(1.5), np.arange(6, dtype=np.int64).reshape(2, 3)),
        "c": (),
    }
    layout = ByteLayout(tree)
    found = jax.jit(layout.unpack_jax)(layout.pack(tree))
    jax.tree.map(np.testing.assert_array_equal, found, tree)
    assert found["b"][0].dtype == np.float32 and found["b"][1].dtype == np.int32


def test_parameters_do_not_pass_through_the_host_if_the_learner_is_on_the_same_device():
    agent = PPO(PPOConfig(total_learner_steps=1), OBSERVATION, specs.DiscreteArray(4), net_factory=NETWORKS["mlp"])
    learner = Learner(LearnerConfig(), agent, None)
    inferencer = Inferencer(InferencerConfig(), agent, learner)
    inferencer.refresh()
    learner.adopt(*learner.state, {}, updates=1)
    with jax.transfer_guard_host_to_device("disallow"):
        before = inferencer.params_version
        inferencer.refresh()
    assert inferencer.params_version == before + 1
    assert all(isinstance(array, jax.Array) for array in learner.get_packed()[1].arrays)
    learner.close()
