"""Checks of updates on several devices. `test_many_devices.py` runs them in a process with 8 simulated devices."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.ours.learner import fused_dqn, traffic
from rlframe.agents import (
    DQN,
    GRPO,
    IMPALA,
    PPO,
    PQN,
    R2D2,
    SAC,
    DQNConfig,
    GRPOConfig,
    IMPALAConfig,
    Normalized,
    PPOConfig,
    PQNConfig,
    R2D2Config,
    SACConfig,
)
from rlframe.agents.networks import MLPConfig
from rlframe.agents.recurrent import LSTMConfig
from rlframe.device.driver import CompiledRounds
from rlframe.device.rounds import CallLimits, Start
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.envs.jax_envs import make_jax_env
from rlframe.envs.jax_pool import env_keys
from rlframe.language.model import ModelConfig
from rlframe.language.model.tokenizers import ByteTokenizer
from rlframe.language.warm_up import warm_up
from rlframe.learners import Learner, LearnerConfig
from rlframe.learners.update import InitialState, LearnerUpdate
from rlframe.sharding import LearnerDevices
from tests.agents.batches import BOX, DISCRETE, IMAGE, SMALL_CNN, VECTOR, sequences, started, transitions
from tests.agents.token_batches import token_batch

SMALL = MLPConfig(hidden=(16,))
EPOCHS = {"unroll_length": 8, "num_epochs": 2, "num_minibatches": 2, "total_learner_steps": 10, "envs_per_batch": 8}
MODEL = ModelConfig(vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
GRPO_CONFIG = GRPOConfig(model=MODEL, max_tokens=16, batch_size=8, total_learner_steps=10, learning_rate=1e-3)
LENGTHS, GROUPS = [5, 6, 7, 8, 9, 5, 6, 7], [0, 0, 1, 1, 2, 2, 3, 3]

AGENTS = {
    "ppo": PPO(PPOConfig(**EPOCHS), VECTOR, DISCRETE, net_factory=SMALL),
    "ppo_normalized": Normalized(PPO(PPOConfig(**EPOCHS), VECTOR, DISCRETE, net_factory=SMALL), observations=True),
    "ppo_lstm": PPO(PPOConfig(**EPOCHS), VECTOR, DISCRETE, net_factory=LSTMConfig(hidden=(16,), size=16)),
    "ppo_images": PPO(PPOConfig(**EPOCHS), IMAGE, DISCRETE, net_factory=SMALL_CNN),
    "impala": IMPALA(IMPALAConfig(unroll_length=8, total_learner_steps=10), VECTOR, DISCRETE, net_factory=SMALL),
    "pqn": PQN(PQNConfig(**EPOCHS), VECTOR, DISCRETE, net_factory=SMALL),
    "dqn": DQN(DQNConfig(prioritized=True, total_learner_steps=10), VECTOR, DISCRETE, net_factory=SMALL),
    "sac": SAC(SACConfig(), VECTOR, BOX, net_factory=SMALL),
    "r2d2": R2D2(R2D2Config(), VECTOR, DISCRETE, net_factory=LSTMConfig(hidden=(16,), size=16)),
    "grpo": GRPO(GRPO_CONFIG),
    "grpo_micro_batches": GRPO(dataclasses.replace(GRPO_CONFIG, micro_batch_size=4)),
}


def mark_slow(names, fast=("ppo", "dqn")):
    """Return parameters of a test. All except the `fast` ones are system tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.system) for name in names]


def make_batch(name, size=8):
    agent = AGENTS[name]
    if name.startswith("grpo"):
        return token_batch(16, LENGTHS[:size], GROUPS[:size])
    if name in ("dqn", "sac"):
        return transitions(agent, size)
    length = agent.replay_spec.item.length
    return sequences(agent, *started(agent), size, length)


def learn(agent, batch, devices, updates=2):
    """Return the result of a few updates, which share the work between `devices`."""
    arrays = InitialState(agent).make(seed=0)
    update = LearnerUpdate(agent, arrays.packing(agent), devices)
    params, learner_state, for_actors = devices.put_state(arrays)
    for _ in range(updates):
        params, learner_state, logs, for_actors, is_finite = update(
            params, learner_state, update.put(batch), for_actors
        )
    assert is_finite
    return params, learner_state, logs, update.for_actors(for_actors)


def assert_close(one, several, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol, atol), one, several)


@pytest.mark.parametrize("name", mark_slow(AGENTS))
def test_four_devices_compute_the_same_as_one(name):
    batch = make_batch(name)
    one, four = (learn(AGENTS[name], batch, LearnerDevices(count)) for count in (1, 4))
    assert_close(one[:3], four[:3])
    assert_close(one[3].unpack_numpy(), four[3].unpack_numpy())
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(four[0]))
    assert all(len(array.sharding.device_set) == 1 for array in four[3].arrays)


@pytest.mark.parametrize("name", mark_slow(["ppo", "dqn", "grpo"], fast=["dqn"]))
def test_batch_that_cannot_be_divided_gives_the_same_numbers(name):
    batch = make_batch(name, 6)
    one, four = (learn(AGENTS[name], batch, LearnerDevices(count)) for count in (1, 4))
    assert_close(one[:3], four[:3])


@pytest.mark.system
@pytest.mark.parametrize("name", ["grpo", "grpo_micro_batches"])
def test_devices_have_parts_of_the_parameters_with_shard_params(name):
    batch = make_batch(name)
    one, four = (
        learn(AGENTS[name], batch, LearnerDevices(1)),
        learn(AGENTS[name], batch, LearnerDevices(4, shard_params=True)),
    )
    assert_close(one[:3], four[:3])
    assert_close(one[3].unpack_numpy(), four[3].unpack_numpy())
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(four[:2]))
    on_first = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(four[:2]))
    assert on_first < 0.3 * total


@pytest.mark.system
@pytest.mark.parametrize("shard_params", [False, True])
def test_supervised_warm_up_on_four_devices_gives_the_parameters_of_one(shard_params):
    sizes = {"supervised_steps": 3, "supervised_batch_size": 8, "supervised_learning_rate": 1e-3}
    model = dataclasses.replace(MODEL, vocab_size=ByteTokenizer().vocab_size)
    agent = GRPO(dataclasses.replace(GRPO_CONFIG, model=model, **sizes))

    def demonstrate(source, count):
        return [(f"{letter}>", letter) for letter in source.choices("abcd", k=count)]

    one = warm_up(agent, demonstrate, ByteTokenizer())
    four = warm_up(agent, demonstrate, ByteTokenizer(), devices=4, shard_params=shard_params)
    assert_close(one, four)


def gradient_step(name, params, batch):
    """Return (f(params, learner_state, rows) -> (logs, gradients), rows of a minibatch that is already formed)."""
    agent, batch = AGENTS[name], batch._replace(keys=(), params_version=())
    if hasattr(agent, "minibatch_gradients"):
        return agent.minibatch_gradients, jax.tree.map(np.asarray, agent.rollout(params, batch.data))
    if name == "grpo":  # `_rows` compares the scores within each group: it moves a few numbers per sequence
        gradients = jax.grad(agent._loss_of_rows, has_aux=True)
        return lambda *args: gradients(*args)[::-1], jax.tree.map(np.asarray, agent._rows(batch.data))
    return agent.compute_gradients, batch


@pytest.mark.parametrize(
    "name", mark_slow(["ppo", "ppo_lstm", "impala", "pqn", "dqn", "sac", "r2d2", "grpo"], fast=["ppo"])
)
def test_gradient_step_moves_only_gradients_and_scalars(name):
    agent, devices = AGENTS[name], LearnerDevices(4)
    params, learner_state = started(agent)
    gradient_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    moved = []
    for size in (4, 8):
        compute, rows = gradient_step(name, params, make_batch(name, size))
        step = jax.jit(lambda *args, compute=compute: devices.keep_state(compute(*args)[1]))
        args = devices.put_state(params), devices.put_state(learner_state), devices.put_rows(rows)
        with devices.dividing():
            moved.append(traffic(step.lower(*args).compile().as_text()))
    assert moved[0] == moved[1]  # nothing grows with the batch
    assert {*moved[0]} == {"all-reduce"}
    assert 0 <= moved[0]["all-reduce"] - gradient_bytes <= 1_024


def test_checkpoint_of_four_devices_is_restored_on_two_bit_for_bit(tmp_path):
    agent, batch = AGENTS["ppo"], make_batch("ppo")
    learner = Learner(LearnerConfig(checkpoint_dir=str(tmp_path), devices=4), agent, None)
    for _ in range(3):
        learner.step(batch._replace(keys=()))
    learner.save(final=True)
    learner.close()
    for count in (1, 2, 4):
        restored = Learner(LearnerConfig(checkpoint_dir=str(tmp_path), devices=count, resume=True), agent, None)
        jax.tree.map(np.testing.assert_array_equal, restored.state, learner.state)
        jax.tree.map(np.testing.assert_array_equal, restored.get_params()[1], learner.get_params()[1])
        assert restored.learner_steps == 3
        restored.close()


def test_published_parameters_are_the_copy_of_the_first_device():
    agent = AGENTS["ppo"]
    learner = Learner(LearnerConfig(devices=4), agent, None)
    learner.step(make_batch("ppo"))
    _, packed = learner.get_packed()
    for array, on_all in zip(packed.arrays, learner._actor_arrays, strict=True):
        assert array.unsafe_buffer_pointer() == on_all.addressable_data(0).unsafe_buffer_pointer()
    learner.close()


FUSED = {
    "ppo": lambda specs: PPO(PPOConfig(**EPOCHS), *specs, net_factory=SMALL),
    "ppo_lstm": lambda specs: PPO(PPOConfig(**EPOCHS), *specs, net_factory=LSTMConfig(hidden=(16,), size=16)),
    "dqn": lambda specs: DQN(
        DQNConfig(prioritized=True, total_learner_steps=10, min_replay_size=32, replay_capacity=256),
        *specs,
        net_factory=SMALL,
    ),
}


@pytest.mark.parametrize("name", mark_slow(FUSED, fast=["dqn"]))
def test_fused_rounds_on_four_devices_equal_those_on_one(name):
    envs = BatchedJaxEnv(make_jax_env("jax:CartPole-v1", {}), 1, 1, None)
    agent = FUSED[name]((envs.codec.observation_spec, envs.codec.action_spec))
    results = []
    for count in (1, 4):
        devices = LearnerDevices(count)
        compiled = CompiledRounds(agent, envs, 8, None, devices)
        params, learner_state, _ = devices.put_state(InitialState(agent).make(seed=0))
        carry = compiled.init(*Start(jax.random.PRNGKey(0), params, learner_state, env_keys(0, 8)))
        carry = compiled.run(carry, CallLimits(*np.array([40, 1_000, 4, 4], np.int32)))
        results.append(carry)
    one, four = results
    assert one.tally.updates > 0
    assert_close(one, four, rtol=1e-3, atol=1e-4)
    places = jax.tree.leaves(four.replay.steps if name == "dqn" else four.replay.unrolls)
    assert not any(leaf.sharding.is_fully_replicated for leaf in [*places, *jax.tree.leaves(four.acting.timestep)])


@pytest.mark.system
def test_sampling_a_divided_replay_moves_the_batch_and_not_the_replay():
    small, large = (sum(traffic(fused_dqn(4, size)[0].as_text()).values()) for size in (10_000, 100_000))
    assert small <= large < 1.1 * small < 100_000  # bytes; the replay has more than 4 MB
