"""Tests of `Normalized`: statistics, log-probabilities, and transforms of any inner agent."""

from __future__ import annotations

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe.agents import (
    DQN,
    IMPALA,
    PPO,
    PQN,
    R2D2,
    SAC,
    TD3,
    Agent,
    DQNConfig,
    IMPALAConfig,
    Normalized,
    PPOConfig,
    PQNConfig,
    R2D2Config,
    SACConfig,
    TD3Config,
)
from rlframe.agents.networks import MLPConfig
from rlframe.agents.recurrent import LSTMConfig
from rlframe.agents.transforms import NormalizedAgentState, NormalizedParams, initial_moments, updated_moments
from rlframe.agents.trees import reset_where
from rlframe.errors import UsageError
from rlframe.learners import Learner, LearnerConfig
from rlframe.replay import ReplayBuffer
from rlframe.types import FIRST, LAST, MID, AgentOutput, ReplaySpec, Sequence, SequenceBatch
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, IMAGE, SMALL_CNN, VECTOR, learn, started

CONFIG = PPOConfig(unroll_length=8, num_epochs=1, num_minibatches=1, discount=0.9)
NETWORK = MLPConfig((8,))


def ppo(spec=VECTOR, network=NETWORK, **options):
    """Return a PPO agent with normalized observations and rewards. `options` are passed to `Normalized`."""
    return Normalized(PPO(CONFIG, spec, BOX, network), **{"rewards": True, **options})


def test_moments_updated_from_several_batches_equal_the_moments_of_all_data():
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


def test_moments_match_worked_example():
    moments = initial_moments([()])._replace(count=jnp.float32(2.0), mean=(jnp.float32(1.0),))  # moments of 0 and 2
    moments = updated_moments(moments, [jnp.array([7.0, 9.0, 99.0])], jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(moments.mean[0], (0 + 2 + 7 + 9) / 4)
    np.testing.assert_allclose(moments.variance[0], np.var([0, 2, 7, 9]))


def test_masked_values_do_not_change_moments():
    moments = initial_moments([(3,)])
    batches.assert_trees_equal(updated_moments(moments, [jnp.ones((4, 3))], jnp.zeros(4)), moments)


def test_only_float_vectors_are_normalized_and_clipped():
    kinds = {"image": IMAGE, "kind": specs.DiscreteArray(4), "speed": specs.Array((), np.float32), "vector": VECTOR}
    agent = ppo(kinds, SMALL_CNN, rewards=False, observation_clip=2.0)
    statistics = started(agent)[1].statistics
    moments = statistics.observation._replace(
        mean=(jnp.float32(1.0), jnp.array([0.0, 1.0, 2.0])), variance=(jnp.float32(4.0), jnp.array([1.0, 4.0, 9.0]))
    )
    observation = {
        "image": np.full((1, *IMAGE.shape), 9, np.uint8),
        "kind": np.array([3], np.int32),
        "speed": np.array([2.0], np.float32),
        "vector": np.array([[1.5, 2.0, -10.0]], np.float32),
    }
    data = batches.transitions(agent, 1).data._replace(observation=observation, next_observation=observation)
    seen = agent.normalized(statistics._replace(observation=moments), data)[0].observation
    np.testing.assert_array_equal(seen["image"], observation["image"])
    np.testing.assert_array_equal(seen["kind"], observation["kind"])
    np.testing.assert_allclose(seen["speed"], [0.5], rtol=1e-6)
    np.testing.assert_allclose(seen["vector"], [[1.5, 0.5, -2.0]], rtol=1e-6)


@pytest.mark.parametrize(
    "network", [NETWORK, pytest.param(LSTMConfig((4,), 3), marks=pytest.mark.system)], ids=["mlp", "lstm"]
)
def test_log_probabilities_are_equal_in_learning_and_acting(network):
    agent = ppo(network=network)
    inner, (params, state) = agent.agent, started(agent)
    for seed in range(2):
        batch = batches.sequences(agent, params, state, seed=seed)
        data, statistics = agent.normalized(state.statistics, batch.data)
        logits, _, rows = inner.predictions(params, inner.rollout(params, data))
        np.testing.assert_allclose(
            inner.distribution.log_prob(logits, rows.sample), rows.log_prob, rtol=1e-5, atol=1e-5
        )
        params, state, _ = learn(agent, params, state, batch)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), state.statistics, statistics)
    assert abs(state.statistics.observation.count - 64) < 1e-3  # 2 batches of 4 x 8 timesteps, each counted once
    assert np.all(np.abs(state.statistics.observation.mean[0]) > 0)


def test_parameters_for_actors_contain_the_statistics():
    agent = ppo()
    params, state = started(agent)
    published = agent.actor_params(params, state)
    assert isinstance(published, NormalizedParams)
    batches.assert_trees_equal(published.statistics, state.statistics)
    shifted = state.statistics._replace(observation=state.statistics.observation._replace(mean=(jnp.full(3, 5.0),)))
    seen, far = (batches.timestep(VECTOR, 4)._replace(observation=np.full((4, 3), x, np.float32)) for x in (0.0, 5.0))
    rng = jax.random.PRNGKey(0)
    here = agent.eval_step(rng, published, seen, agent.initial_state(4))[0].action
    there = agent.eval_step(rng, published._replace(statistics=shifted), far, agent.initial_state(4))[0].action
    np.testing.assert_allclose(here, there, rtol=1e-6)


def test_discounted_reward_sum_restarts_at_each_episode():
    agent = ppo()
    params, learner_state = started(agent)
    published = agent.actor_params(params, learner_state)
    step_types = np.array([[FIRST, FIRST], [MID, MID], [LAST, MID], [FIRST, LAST], [MID, FIRST], [MID, MID]])
    rewards = np.array([[0, 0], [1, 2], [3, 4], [0, 6], [7, 0], [9, 10]], np.float32)
    state = initial = agent.initial_state(2)
    step, returns = jax.jit(agent.actor_step), []
    for step_type, reward in zip(step_types, rewards):
        timestep = batches.timestep(VECTOR, 2)._replace(step_type=step_type, reward=reward)
        state = reset_where(timestep.step_type == FIRST, jax.tree.map(np.asarray, state), initial)
        output, state = step(jax.random.PRNGKey(0), published, timestep, state)
        returns.append(output.extras["return"])
    expected = [[0, 0], [1, 2], [3.9, 5.8], [0, 11.22], [7, 0], [15.3, 10]]
    np.testing.assert_allclose(returns, expected, rtol=1e-5)
    output, after = agent.eval_step(jax.random.PRNGKey(0), published, timestep, state)
    assert output.extras == {}
    np.testing.assert_allclose(after.return_so_far, [9 + 0.9 * 15.3, 10 + 0.9 * 10], rtol=1e-5)


def test_rewards_are_divided_by_the_standard_deviation_of_returns_and_first_timesteps_are_ignored():
    agent = ppo(observations=False, reward_clip=1.5)
    returns = np.array([[0.0, 3.0, 50.0, 0.0], [2.0, 4.0, 6.0, 8.0]], np.float32)
    step_type = np.array([[FIRST, MID, LAST, FIRST, MID], [MID, MID, MID, LAST, FIRST]], np.uint8)
    reward = np.array([[3.0, 48.0, 0.0, -90.0], [2.0, 3.0, -4.0, 0.0]], np.float32)
    zeros = np.zeros((2, 5, 3), np.float32)
    began = NormalizedAgentState((), np.zeros(2, np.float32))
    extras = {"return": returns, "value": reward}
    data = SequenceBatch(zeros, step_type, (), reward, np.ones_like(reward), extras, began)
    scaled, statistics = agent.normalized(started(agent)[1].statistics, data)
    deviation = np.std([3.0, 50.0, 2.0, 4.0, 6.0, 8.0])
    np.testing.assert_allclose(np.sqrt(statistics.returns.variance[0]), deviation, rtol=1e-4)
    np.testing.assert_allclose(scaled.reward, np.clip(reward / deviation, -1.5, 1.5), rtol=1e-4)
    assert scaled.observation is data.observation and scaled.agent_state == () and statistics.observation == ()
    assert scaled.extras.keys() == {"value"}


NORMALIZES = {
    "dqn": lambda: DQN(DQNConfig(), VECTOR, DISCRETE, NETWORK),
    "sac": lambda: SAC(SACConfig(), VECTOR, BOX, NETWORK),
    "td3": lambda: TD3(TD3Config(), VECTOR, BOX, NETWORK),
    "impala": lambda: IMPALA(IMPALAConfig(learning_rate=6e-4), VECTOR, DISCRETE, NETWORK),
    "r2d2": lambda: R2D2(R2D2Config(sequence_length=5, burn_in=3), VECTOR, DISCRETE, NETWORK),
    "pqn": lambda: PQN(PQNConfig(unroll_length=8, num_minibatches=1, epsilon=0.1), VECTOR, DISCRETE, NETWORK),
}


@pytest.mark.parametrize(
    "name", ["impala", *(pytest.param(name, marks=pytest.mark.system) for name in ("sac", "dqn", "td3", "r2d2", "pqn"))]
)
def test_transformed_agent_learns_like_the_inner_agent_from_normalized_observations(name):
    plain = NORMALIZES[name]()
    agent = Normalized(plain)
    params, state = started(agent)
    mean, variance = jnp.array([1.0, -2.0, 3.0]), jnp.array([4.0, 0.25, 9.0])
    moments = state.statistics.observation._replace(mean=(mean,), variance=(variance,))
    state = state._replace(statistics=state.statistics._replace(observation=moments))
    is_sequence = isinstance(plain, (IMPALA, R2D2, PQN))
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


@dataclasses.dataclass(frozen=True)
class RecordingConfig:
    learning_rate: float = 0.1


class RecordingAgent(Agent):
    """An agent that records the data that `loss` receives. It has extras, and its config has no discount."""

    config_cls = RecordingConfig

    def initial_params(self, rng):
        return {"w": jax.random.normal(rng, (3,))}

    def initial_state(self, batch_size):
        return {"seen": np.zeros((batch_size,), np.float32)}

    def actor_step(self, rng, params, timestep, state):
        score = timestep.observation @ params["w"]
        return AgentOutput((score > 0).astype(jnp.int32), {"score": score}), {"seen": state["seen"] + 1.0}

    @property
    def replay_spec(self):
        return ReplaySpec("queue", Sequence(8), batch_size=None, capacity=512)

    def check_num_envs(self, num_envs):
        if num_envs < 2:
            raise UsageError("It needs two environments.")

    def loss(self, params, learner_state, batch):
        self.given = batch.data
        return jnp.mean((batch.data.observation[:, :-1] @ params["w"] - batch.data.reward) ** 2), {}


def test_custom_agent_can_be_transformed_without_changes():
    inner = RecordingAgent(RecordingConfig(), VECTOR, DISCRETE)
    agent = Normalized(inner, rewards=True)
    params, state = started(agent)
    assert agent.step_spec.extras.keys() == {"score", "return"}
    batch = batches.sequences(agent, params, state)
    after, state, logs = agent.learner_step(params, state, batch)
    assert inner.given.extras.keys() == {"score"} and inner.given.agent_state.keys() == {"seen"}
    data, _ = agent.normalized(started(agent)[1].statistics, batch.data)
    np.testing.assert_array_equal(inner.given.reward, data.reward)
    expected, _, expected_logs = inner.learner_step(
        params, inner.initial_learner_state(params), batch._replace(data=data)
    )
    batches.assert_trees_equal((after, logs), (expected, expected_logs))
    assert state.statistics.returns.count > 20 and state.agent.steps == 1


def test_discounted_reward_sum_uses_the_given_discount_or_the_discount_of_the_agent():
    def after_two_rewards(agent):
        params, state = started(agent)
        published, agent_state = agent.actor_params(params, state), agent.initial_state(2)
        for _ in range(2):
            _, agent_state = agent.actor_step(
                jax.random.PRNGKey(0), published, batches.timestep(VECTOR, 2), agent_state
            )
        return float(agent_state.return_so_far[0])

    recording = RecordingAgent(RecordingConfig(), VECTOR, DISCRETE)
    assert after_two_rewards(ppo()) == pytest.approx(1.9)
    assert after_two_rewards(ppo(discount=0.5)) == pytest.approx(1.5)
    assert after_two_rewards(Normalized(recording, rewards=True)) == pytest.approx(1.99)


class FixedInitialParams(PPO):
    """A PPO in which the seed changes only the order of the minibatches, not the initial parameters."""

    def initial_params(self, rng):
        return super().initial_params(jax.random.PRNGKey(0))


@pytest.mark.system
def test_two_learner_seeds_give_different_results():
    cfg = dataclasses.replace(CONFIG, num_minibatches=4)
    agent = Normalized(FixedInitialParams(cfg, VECTOR, BOX, NETWORK), rewards=True)
    batch = batches.sequences(agent, *started(agent))._replace(params_version=np.ones(4, np.int64))

    def learned(seed):
        learner = Learner(LearnerConfig(seed=seed), agent, ReplayBuffer(agent))
        assert learner.step(batch) is not None
        return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(learner.get_params()[1].params)])

    assert np.abs(learned(1) - learned(2)).max() > 1e-6


def test_transform_has_the_specs_and_checks_of_the_inner_agent():
    images = PPO(CONFIG, {"image": IMAGE, "vector": VECTOR}, DISCRETE, SMALL_CNN)
    agent, recording = Normalized(images), Normalized(RecordingAgent(RecordingConfig(), VECTOR, DISCRETE))
    assert agent.jit_learner_step is images.jit_learner_step is False and recording.jit_learner_step
    assert agent.replay_spec == images.replay_spec
    assert (recording.learns_from, Normalized(SAC(SACConfig(), VECTOR, BOX)).network_configs) == (
        "steps",
        SAC.network_configs,
    )
    assert agent.cfg is CONFIG
    with pytest.raises(UsageError, match="It needs two environments"):
        recording.check_num_envs(1)
    copied = pickle.loads(pickle.dumps(ppo(discount=0.5, observation_clip=3.0)))
    assert (copied.discount, copied.observation_clip, copied.rewards) == (0.5, 3.0, True)
    batches.assert_trees_equal(started(copied), started(ppo()))


def test_agent_with_an_extra_named_return_is_rejected():
    inner = Normalized(RecordingAgent(RecordingConfig(), VECTOR, DISCRETE), rewards=True)
    assert Normalized(inner).step_spec.extras.keys() == {"score", "return"}  # only observations
    with pytest.raises(UsageError, match=r'Normalized: extras\["return"\] is reserved for normalize_rewards'):
        Normalized(inner, rewards=True).step_spec  # noqa: B018


class WrongActions(PPO):
    def actor_step(self, rng, params, timestep, state):
        output, state = super().actor_step(rng, params, timestep, state)
        return output._replace(action=output.action.astype(jnp.float32)), state


def test_errors_about_shapes_name_the_inner_agent():
    agent = Normalized(WrongActions(CONFIG, VECTOR, DISCRETE, NETWORK))
    with pytest.raises(UsageError, match="WrongActions: action should be"):
        agent.step_spec  # noqa: B018
    with pytest.raises(UsageError, match="WrongActions: observation should be"):
        agent.check_observation(np.zeros((2, 99), np.float32))


def test_invalid_options_are_rejected():
    with pytest.raises(UsageError, match=r"Normalized.observation_clip must be above 0, got nan"):
        ppo(observation_clip=float("nan"))
    with pytest.raises(UsageError, match=r"Normalized.discount must be in \[0, 1\], got 2"):
        ppo(discount=2.0)
    with pytest.raises(UsageError, match=r"PPO: normalize_observations is for vectors of floats, .* have none"):
        Normalized(PPO(CONFIG, IMAGE, DISCRETE, SMALL_CNN))
    with pytest.raises(UsageError, match=r"SAC: normalize_rewards .* learns from Transition\(n_step=1"):
        Normalized(SAC(SACConfig(), VECTOR, BOX), rewards=True)
