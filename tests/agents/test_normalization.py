"""Running statistics: equal to those of all data at once, and exact for the policy that acted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe.actors.stepper import zero_at_first
from rlframe.agents import (
    DQN,
    IMPALA,
    PPO,
    PQN,
    R2D2,
    SAC,
    TD3,
    DQNConfig,
    IMPALAConfig,
    PPOConfig,
    PQNConfig,
    R2D2Config,
    SACConfig,
    TD3Config,
)
from rlframe.agents.networks import MLPConfig
from rlframe.agents.normalization import (
    AccumulatingState,
    NormalisedParams,
    Normaliser,
    initial_moments,
    updated_moments,
)
from rlframe.agents.recurrent import LSTMConfig
from rlframe.errors import UsageError
from rlframe.types import FIRST, LAST, MID, SequenceBatch
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, IMAGE, VECTOR, learn, started

CONFIG = PPOConfig(
    unroll_length=8, num_epochs=1, num_minibatches=1, normalise_observations=True, normalise_rewards=True, discount=0.9
)
NETWORK = MLPConfig((8,))


def test_moments_of_parts_are_those_of_the_whole():
    random = np.random.RandomState(0)
    data = 5.0 + 3.0 * random.randn(60, 2).astype(np.float32)
    keep = (random.rand(60) < 0.7).astype(np.float32)
    moments = initial_moments([(2,)])._replace(count=jnp.float32(0.0))
    for start, stop in ((0, 10), (10, 13), (13, 60)):
        moments = updated_moments(moments, [data[start:stop]], keep[start:stop])
    kept = data[keep == 1.0]
    assert moments.count == len(kept)
    np.testing.assert_allclose(moments.mean[0], kept.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance[0], kept.var(axis=0), rtol=1e-4)


def test_moments_by_hand():
    moments = initial_moments([()])._replace(count=jnp.float32(2.0), mean=(jnp.float32(1.0),))  # of 0 and 2
    moments = updated_moments(moments, [jnp.array([7.0, 9.0, 99.0])], jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(moments.mean[0], (0 + 2 + 7 + 9) / 4)
    np.testing.assert_allclose(moments.variance[0], np.var([0, 2, 7, 9]))


def test_nothing_seen_changes_nothing():
    moments = initial_moments([(3,)])
    batches.assert_trees_equal(updated_moments(moments, [jnp.ones((4, 3))], jnp.zeros(4)), moments)


def test_vectors_of_floats_are_normalised_and_clipped_and_nothing_else():
    kinds = {"image": IMAGE, "kind": specs.DiscreteArray(4), "speed": specs.Array((), np.float32), "vector": VECTOR}
    normaliser = Normaliser(dataclasses.replace(CONFIG, observation_clip=2.0), kinds)
    statistics = normaliser.initial_statistics()
    moments = statistics.observation._replace(
        mean=(jnp.float32(1.0), jnp.array([0.0, 1.0, 2.0])), variance=(jnp.float32(4.0), jnp.array([1.0, 4.0, 9.0]))
    )
    observation = {
        "image": np.full((1, *IMAGE.shape), 9, np.uint8),
        "kind": np.array([3], np.int32),
        "speed": np.array([2.0], np.float32),
        "vector": np.array([[1.5, 2.0, -10.0]], np.float32),
    }
    seen = normaliser.observe(statistics._replace(observation=moments), observation)
    np.testing.assert_array_equal(seen["image"], observation["image"])
    np.testing.assert_array_equal(seen["kind"], observation["kind"])
    np.testing.assert_allclose(seen["speed"], [0.5], rtol=1e-6)
    np.testing.assert_allclose(seen["vector"], [[1.5, 0.5, -2.0]], rtol=1e-6)


@pytest.mark.parametrize(
    "network", [NETWORK, pytest.param(LSTMConfig((4,), 3), marks=pytest.mark.system)], ids=["mlp", "lstm"]
)
def test_log_probabilities_are_exact_under_the_statistics_that_acted(network):
    agent = PPO(CONFIG, VECTOR, BOX, network)
    params, state = started(agent)
    for seed in range(2):
        batch = batches.sequences(agent, params, state, seed=seed)
        data, statistics = agent.normaliser.batch(state.statistics, batch.data)
        logits, _, rows = agent._forward(params, agent.rollout(params, data))
        np.testing.assert_allclose(agent.policy.log_prob(logits, rows.sample), rows.log_prob, rtol=1e-5, atol=1e-5)
        params, state, _ = learn(agent, params, state, batch)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), state.statistics, statistics)
    assert abs(state.statistics.observation.count - 64) < 1e-3  # 2 batches of 4 x 8: each timestep is seen once
    assert np.all(np.abs(state.statistics.observation.mean[0]) > 0)


def test_what_is_published_holds_the_statistics():
    agent = PPO(CONFIG, VECTOR, BOX, NETWORK)
    params, state = started(agent)
    published = agent.actor_params(params, state)
    assert isinstance(published, NormalisedParams)
    batches.assert_trees_equal(published.statistics, state.statistics)
    shifted = state.statistics._replace(observation=state.statistics.observation._replace(mean=(jnp.full(3, 5.0),)))
    seen, far = (batches.timestep(VECTOR, 4)._replace(observation=np.full((4, 3), x, np.float32)) for x in (0.0, 5.0))
    rng = jax.random.PRNGKey(0)
    here = agent.eval_step(rng, published, seen, agent.initial_state(4))[0].action
    there = agent.eval_step(rng, published._replace(statistics=shifted), far, agent.initial_state(4))[0].action
    np.testing.assert_allclose(here, there, rtol=1e-6)


def test_returns_so_far_begin_anew_with_each_episode():
    agent = PPO(CONFIG, VECTOR, BOX, NETWORK)
    params, learner_state = started(agent)
    published = agent.actor_params(params, learner_state)
    step_types = np.array([[FIRST, FIRST], [MID, MID], [LAST, MID], [FIRST, LAST], [MID, FIRST], [MID, MID]])
    rewards = np.array([[0, 0], [1, 2], [3, 4], [0, 6], [7, 0], [9, 10]], np.float32)
    state = initial = agent.initial_state(2)
    step, returns = jax.jit(agent.actor_step), []
    for step_type, reward in zip(step_types, rewards):
        timestep = batches.timestep(VECTOR, 2)._replace(step_type=step_type, reward=reward)
        state = zero_at_first(timestep, jax.tree.map(np.asarray, state), initial)
        output, state = step(jax.random.PRNGKey(0), published, timestep, state)
        returns.append(output.extras["return"])
    expected = [[0, 0], [1, 2], [3.9, 5.8], [0, 11.22], [7, 0], [15.3, 10]]
    np.testing.assert_allclose(returns, expected, rtol=1e-5)


def test_rewards_are_scaled_by_the_deviation_of_returns_without_those_at_first():
    normaliser = Normaliser(dataclasses.replace(CONFIG, normalise_observations=False, reward_clip=1.5), VECTOR)
    returns = np.array([[0.0, 3.0, 50.0, 0.0], [2.0, 4.0, 6.0, 8.0]], np.float32)
    step_type = np.array([[FIRST, MID, LAST, FIRST, MID], [MID, MID, MID, LAST, FIRST]], np.uint8)
    reward = np.array([[3.0, 48.0, 0.0, -90.0], [2.0, 3.0, -4.0, 0.0]], np.float32)
    zeros = np.zeros((2, 5, 3), np.float32)
    began = AccumulatingState((), np.zeros(2, np.float32))
    data = SequenceBatch(zeros, step_type, (), reward, np.ones_like(reward), {"return": returns}, began)
    scaled, statistics = normaliser.batch(normaliser.initial_statistics(), data)
    deviation = np.std([3.0, 50.0, 2.0, 4.0, 6.0, 8.0])
    np.testing.assert_allclose(np.sqrt(statistics.returns.variance[0]), deviation, rtol=1e-4)
    np.testing.assert_allclose(scaled.reward, np.clip(reward / deviation, -1.5, 1.5), rtol=1e-4)
    assert scaled.observation is data.observation and scaled.agent_state == () and statistics.observation == ()


NORMALISES = {
    "dqn": lambda: DQN(DQNConfig(normalise_observations=True), VECTOR, DISCRETE, NETWORK),
    "sac": lambda: SAC(SACConfig(normalise_observations=True), VECTOR, BOX, NETWORK),
    "td3": lambda: TD3(TD3Config(normalise_observations=True), VECTOR, BOX, NETWORK),
    "impala": lambda: IMPALA(IMPALAConfig(normalise_observations=True), VECTOR, DISCRETE, NETWORK),
    "r2d2": lambda: R2D2(
        R2D2Config(sequence_length=5, burn_in=3, normalise_observations=True), VECTOR, DISCRETE, NETWORK
    ),
    "pqn": lambda: PQN(
        PQNConfig(unroll_length=8, num_minibatches=1, normalise_observations=True), VECTOR, DISCRETE, NETWORK
    ),
}


@pytest.mark.parametrize(
    "name", ["sac", "impala", *(pytest.param(name, marks=pytest.mark.system) for name in ("dqn", "td3", "r2d2", "pqn"))]
)
def test_every_agent_learns_as_if_its_observations_came_normalised(name):
    agent = NORMALISES[name]()
    plain = type(agent)(
        dataclasses.replace(agent.cfg, normalise_observations=False), VECTOR, agent.action_spec, NETWORK
    )
    params, state = started(agent)
    mean, variance = jnp.array([1.0, -2.0, 3.0]), jnp.array([4.0, 0.25, 9.0])
    moments = state.statistics.observation._replace(mean=(mean,), variance=(variance,))
    state = state._replace(statistics=state.statistics._replace(observation=moments))
    is_sequence = isinstance(agent, (IMPALA, R2D2, PQN))
    batch = batches.sequences(plain, params, started(plain)[1]) if is_sequence else batches.transitions(agent)
    raw = {"observation": batch.data.observation * jnp.sqrt(variance) + mean}
    if not is_sequence:
        raw["next_observation"] = batch.data.next_observation * jnp.sqrt(variance) + mean
    after, state, _ = batches.learn(agent, params, state, batch._replace(data=batch.data._replace(**raw)))
    expected, _, _ = batches.learn(plain, params, plain.initial_learner_state(params), batch)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4), after, expected)
    assert state.statistics.observation.count > 15
    seen, same = batches.timestep(VECTOR, 5), batches.timestep(VECTOR, 5)
    moments = state.statistics.observation
    same = same._replace(observation=seen.observation * jnp.sqrt(moments.variance[0]) + moments.mean[0])
    actions = [
        each.eval_step(jax.random.PRNGKey(0), each.actor_params(after, own), timestep, each.initial_state(5))[0].action
        for each, own, timestep in ((agent, state, same), (plain, plain.initial_learner_state(after), seen))
    ]
    np.testing.assert_allclose(*actions, atol=1e-4)


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match=r"PPOConfig.observation_clip must be above 0, got nan"):
        PPO(dataclasses.replace(CONFIG, observation_clip=float("nan")), VECTOR, BOX)
    with pytest.raises(UsageError, match=r"normalise_observations is for vectors of floats, of which .* have none"):
        PPO(CONFIG, IMAGE, DISCRETE)
