"""Tests of recurrent networks: cells match worked examples, and acting and learning use the same states."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe import Actor, Inferencer, InferencerConfig, Learner, LearnerConfig, ReplayBuffer, SyncEnv
from rlframe.agents import DQN, IMPALA, PPO, DQNConfig, IMPALAConfig, PPOConfig
from rlframe.agents.networks import Head, action_values
from rlframe.agents.recurrent import GRUConfig, LSTMConfig, LSTMState, RecurrentNetwork, SteppedNetwork
from rlframe.errors import UsageError
from rlframe.types import FIRST, LAST
from tests.agents.batches import DISCRETE, IMAGE, VECTOR, random_tree

SMALL = {"lstm": LSTMConfig(hidden=(4,), size=3), "gru": GRUConfig(hidden=(4,), size=3)}
HEADS = (Head(2), Head(1))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def test_lstm_of_size_one_matches_worked_example():
    weights = jnp.asarray([[0.5, -1.0, 0.25, 2.0]])  # input gate, cell candidate, forget gate, output gate
    state = LSTMState(jnp.asarray([[0.4]]), jnp.asarray([[-0.3]]))
    output, after = LSTMConfig(size=1)._step(weights, jnp.asarray([[0.1, 0.2, 0.3, 0.4]]), state)
    enter, new, forget, out = 0.1 + 0.4 * 0.5, 0.2 - 0.4, 0.3 + 0.4 * 0.25, 0.4 + 0.4 * 2.0
    cell = sigmoid(forget + 1.0) * -0.3 + sigmoid(enter) * np.tanh(new)
    np.testing.assert_allclose(after.cell, [[cell]], rtol=1e-6)
    np.testing.assert_allclose(after.hidden, [[sigmoid(out) * np.tanh(cell)]], rtol=1e-6)
    np.testing.assert_array_equal(output, after.hidden)


def test_gru_of_size_one_matches_worked_example():
    weights = jnp.asarray([[0.5, -1.0, 2.0]])  # reset gate, update gate, candidate
    output, after = GRUConfig(size=1)._step(weights, jnp.asarray([[0.1, 0.2, 0.3]]), jnp.asarray([[0.4]]))
    reset, update = sigmoid(0.1 + 0.4 * 0.5), sigmoid(0.2 - 0.4)
    np.testing.assert_allclose(after, [[update * 0.4 + (1.0 - update) * np.tanh(0.3 + reset * 0.4 * 2.0)]], rtol=1e-6)
    np.testing.assert_array_equal(output, after)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("has_unroll", [True, False])
def test_unroll_equals_single_steps_and_resets_the_state_when_an_episode_starts(name, has_unroll):
    network = SMALL[name].build(VECTOR, HEADS)
    params = network.init(jax.random.PRNGKey(0), np.zeros((1, 3), np.float32))
    observation = random_tree(VECTOR, (2, 6))
    step_type = np.array([[1, 1, 2, 0, 1, 1], [0, 1, 1, 1, 2, 0]], np.uint8)
    initial = jax.tree.map(lambda leaf: leaf + 0.7, network.initial_state(2))
    expected, state = [], initial
    for t in range(6):
        first = (step_type[:, t] == FIRST)[:, None]
        state = jax.tree.map(lambda old, new: np.where(first, new, old), state, network.initial_state(2))  # noqa: B023
        outputs, state = network.apply(params, observation[:, t], state)
        expected.append(outputs)
    core = SteppedNetwork(network if has_unroll else network._replace(unroll=None))
    outputs, after = core.unroll(params, observation, step_type, initial)
    jax.tree.map(lambda *leaves: np.testing.assert_allclose(*leaves, rtol=1e-5, atol=1e-6), after, state)
    for output, steps in zip(outputs, zip(*expected)):
        np.testing.assert_allclose(output, np.stack(steps, axis=1), rtol=1e-5, atol=1e-6)


def acted(agent, num_steps):
    """Act for `num_steps` steps. Return the resulting batch and the parameters."""
    replay_buffer = ReplayBuffer(agent, seed=1)
    learner = Learner(LearnerConfig(seed=1), agent, replay_buffer)
    inferencer = Inferencer(InferencerConfig(seed=1), agent, learner)
    actor = Actor(lambda seed: SyncEnv("PositionOnlyCartPole-v1", 4, "loop", seed=seed), inferencer, replay_buffer)
    for _ in range(num_steps):
        actor.step()
    batch = replay_buffer.sample()
    actor.close()
    return batch, learner.get_params()[1]


@pytest.fixture(scope="module")
def specs():
    env = SyncEnv("PositionOnlyCartPole-v1", 1, "loop", seed=1)
    yield env.observation_spec, env.action_spec
    env.close()


@pytest.mark.parametrize("name", ["lstm", pytest.param("gru", marks=pytest.mark.system)])
def test_ppo_learns_with_the_same_recurrent_states_as_in_acting(specs, name):
    cfg = PPOConfig(unroll_length=40, num_epochs=1, num_minibatches=2)
    agent = PPO(cfg, *specs, SMALL[name])
    batch, params = acted(agent, 40)
    data = batch.data
    # episodes end and start within the batch
    assert (data.step_type == LAST).any() and (data.step_type[:, 1:] == FIRST).any()
    rollout = agent.rollout(params, data)
    assert rollout.log_prob.shape == (4, 40)
    logits, value, rows = agent.predictions(params, rollout)
    np.testing.assert_allclose(agent.distribution.log_prob(logits, rows.sample), rows.log_prob, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value, rows.value, rtol=1e-4, atol=1e-5)
    new, learner_state, logs = jax.jit(agent.learner_step)(params, agent.initial_learner_state(params), batch)
    assert np.isfinite(logs["loss"]) and learner_state.steps == 1
    # the update has changed all parameters
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(new)))


@pytest.mark.system
@pytest.mark.parametrize("name", [pytest.param("lstm", marks=pytest.mark.system), "gru"])
def test_impala_learns_with_the_same_recurrent_states_as_in_acting(specs, name):
    agent = IMPALA(IMPALAConfig(unroll_length=20, batch_size=8, learning_rate=6e-4), *specs, SMALL[name])
    batch, params = acted(agent, 45)
    # some unrolls start in the middle of an episode
    assert any(leaf.any() for leaf in jax.tree.leaves(batch.data.agent_state))
    logs = agent.loss(params, agent.initial_learner_state(params), batch)[1]
    np.testing.assert_allclose(logs["clipped_rho"], 1.0, atol=1e-5)  # all importance ratios are 1
    state = jax.tree.map(lambda leaf: leaf + 1.0, batch.data.agent_state)
    other = batch._replace(data=batch.data._replace(agent_state=state))
    assert agent.loss(params, agent.initial_learner_state(params), other)[1]["clipped_rho"] < 0.99999


def test_minibatches_of_a_recurrent_network_contain_whole_unrolls(specs):
    agent = PPO(PPOConfig(unroll_length=8, num_minibatches=5), *specs, SMALL["gru"])
    batch, params = acted(agent, 8)
    with pytest.raises(UsageError, match="num_minibatches=5 is above .*num_envs rows for a recurrent network"):
        agent.check_num_envs(4)
    # After an actor has died, a batch can have fewer rows than minibatches. Each row is then a minibatch.
    _, learner_state, logs = jax.jit(agent.learner_step)(params, agent.initial_learner_state(params), batch)
    assert np.isfinite(logs["loss"]) and learner_state.opt_state[1].count == 4 * agent.cfg.num_epochs


def test_custom_network_is_recurrent_if_it_has_initial_state():
    def make_net(observation_spec, action_spec):
        def apply(params, observation, state):
            state = state + observation.sum(axis=1)
            return (state[:, None] * params, state), state

        return RecurrentNetwork(lambda rng, observation: jnp.ones((1, 3)), apply, lambda n: np.zeros(n, np.float32))

    agent = PPO(PPOConfig(), VECTOR, DISCRETE, make_net)
    assert agent.step_spec.agent_state.shape == ()
    short = dataclasses.replace(DQNConfig(), min_replay_size=1)
    with pytest.raises(UsageError, match=r"make_net has a state, which this agent does not carry.* PPO, IMPALA"):
        DQN(short, VECTOR, DISCRETE, make_net)
    with pytest.raises(UsageError, match="LSTMConfig has a state"):
        DQN(short, VECTOR, DISCRETE, LSTMConfig())


@pytest.mark.parametrize("name", SMALL)
def test_dueling_recurrent_network_has_separate_layers_after_the_core(name):
    network = dataclasses.replace(SMALL[name], dueling=True).build(VECTOR, (action_values(2),))
    observation, state = random_tree(VECTOR, (5,)), network.initial_state(5)
    params = network.init(jax.random.PRNGKey(0), observation)
    (values,), after = network.apply(params, observation, state)
    core, parts = after.hidden if name == "lstm" else after, []
    for i in range(2):
        layer, head = params[f"torso{i}_dense0"], params[f"head{i}"]
        assert layer["w"].shape == (3, 3)
        parts.append(np.tanh(core @ layer["w"] + layer["b"]) @ head["w"] + head["b"])
    expected = parts[1] + parts[0] - parts[0].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.system
def test_images_are_processed_by_convolutions_before_the_core():
    network = LSTMConfig(hidden=(8,), size=4).build(IMAGE, HEADS)
    params = network.init(jax.random.PRNGKey(0), random_tree(IMAGE, (1,)))
    assert any("image" in name for module in params.values() for name in module)
    outputs, _ = network.unroll(params, random_tree(IMAGE, (2, 3)), np.zeros((2, 3), bool), network.initial_state(2))
    assert [output.shape for output in outputs] == [(2, 3, 2), (2, 3, 1)]
