"""Tests of DQN: exploration, targets, priorities, and schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlframe.agents import DQN, DQNConfig
from rlframe.agents.dqn import Repetition, munchausen_bonus, soft_value
from rlframe.agents.dqn_heads import Categories, Expectation, Quantiles
from rlframe.agents.networks import MLPConfig
from rlframe.agents.off_policy import importance_weights
from rlframe.agents.q_learning import ActorParams
from rlframe.agents.trees import zero_timestep
from rlframe.errors import UsageError
from rlframe.types import Transition
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, MULTI, VECTOR, assert_trees_equal, started

RNG = jax.random.PRNGKey(0)


def make(dueling=False, **changes) -> DQN:
    cfg = {"batch_size": 16, "min_replay_size": 16, "optimizer": "adam", "learning_rate": 1e-2}
    cfg |= {"total_learner_steps": 100, **changes}
    return DQN(DQNConfig(**cfg), VECTOR, DISCRETE, MLPConfig((8,), "relu", dueling=dueling))


def test_replay_spec_follows_the_config():
    spec = make(n_step=3, discount=0.9, update_period=8, replay_capacity=500).replay_spec
    assert (spec.kind, spec.item, spec.batch_size) == ("uniform", Transition(3, 0.9), 16)
    assert (spec.capacity, spec.min_size, spec.samples_per_insert) == (500, 16, 2.0)
    prioritized = make(prioritized=True, priority_exponent=0.7).replay_spec
    assert (prioritized.kind, prioritized.priority_exponent) == ("prioritized", 0.7)


def actions_at(epsilon, rows=30_000):
    agent = make()
    params = agent.initial_params(jax.random.PRNGKey(0))
    seen = batches.timestep(VECTOR, 1)
    seen = jax.tree.map(lambda leaf: np.repeat(leaf, rows, axis=0), seen)
    actor_params = ActorParams(params, jnp.float32(epsilon))
    output = agent.actor_step(jax.random.PRNGKey(1), actor_params, seen, ())[0]
    greedy = agent.eval_step(jax.random.PRNGKey(1), actor_params, seen, ())[0]
    assert output.action.dtype == np.int32
    return np.asarray(output.action), int(greedy.action[0])


def test_actions_are_greedy_if_epsilon_is_zero():
    actions, greedy = actions_at(0.0)
    assert np.all(actions == greedy)


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_epsilon_is_the_fraction_of_uniformly_random_actions(epsilon):
    actions, greedy = actions_at(epsilon)
    expected = np.full(3, epsilon / 3)
    expected[greedy] += 1.0 - epsilon
    np.testing.assert_allclose(np.bincount(actions, minlength=3) / len(actions), expected, atol=0.01)


def repeated_actions(epsilon, steps=400, rows=64):
    """Return the actions [steps, rows] of an agent that repeats random actions. The greedy action is 0."""
    agent = make(exploration_duration_exponent=2.0, epsilon=epsilon)
    params = agent.initial_params(jax.random.PRNGKey(0))
    params = jax.tree.map(lambda leaf: 0.0 * leaf, params)
    params = agent.actor_params(params, agent.initial_learner_state(params))
    timestep, state, actions = zero_timestep(agent.observation_spec, rows), agent.initial_state(rows), []
    step = jax.jit(agent.actor_step)
    for i in range(steps):
        output, state = step(jax.random.PRNGKey(i), params, timestep, state)
        actions.append(np.asarray(output.action))
    return np.array(actions)


def test_random_actions_are_repeated_and_their_durations_have_the_zeta_distribution():
    changes = np.diff(repeated_actions(1.0), axis=0) != 0
    # The mean duration is sum(n^-1) / sum(n^-2) = 4.55 for n up to 1000.
    # When a repetition ends, the next random action is different with probability (A - 1) / A.
    num_actions = make().action_spec.num_values
    expected = (num_actions - 1) / num_actions / 4.55
    assert abs(changes.mean() - expected) < 0.04


def test_action_is_repeated_until_no_steps_are_left():
    agent = make(exploration_duration_exponent=2.0, epsilon=0.0)
    params = agent.initial_params(jax.random.PRNGKey(0))
    params = jax.tree.map(lambda leaf: 0.0 * leaf, params)
    params = agent.actor_params(params, agent.initial_learner_state(params))
    timestep, state = (
        zero_timestep(agent.observation_spec, 2),
        Repetition(np.array([1, 1], np.int32), np.array([2, 0], np.int32)),
    )
    seen, left = [], []
    for i in range(4):
        output, state = agent.actor_step(jax.random.PRNGKey(i), params, timestep, state)
        seen.append(np.asarray(output.action).tolist())
        left.append(np.asarray(state.steps_left).tolist())
    assert seen == [[1, 0], [1, 0], [0, 0], [0, 0]]
    assert left == [[1, 0], [0, 0], [0, 0], [0, 0]]  # a greedy action sets no steps_left, so it is not repeated


def test_agent_that_does_not_repeat_actions_has_no_state():
    assert make().initial_state(3) == ()


def test_epsilon_that_actors_receive_falls_with_learner_steps():
    agent = make(epsilon="linear:1:0.1@100")
    params, learner_state = started(agent)
    for steps, expected in [(0, 1.0), (50, 0.55), (100, 0.1), (1000, 0.1)]:
        published = agent.actor_params(params, learner_state._replace(steps=jnp.int32(steps)))
        np.testing.assert_allclose(published.epsilon, expected, rtol=1e-5)


def values(agent, params, observation):
    return np.asarray(agent.network.apply(params, observation)[0])


def test_loss_matches_worked_example():
    agent = make(head=Expectation(None))
    params, learner_state = started(agent)
    target = agent.initial_params(jax.random.PRNGKey(9))
    batch = batches.transitions(agent)
    data = batch.data
    best = values(agent, target, data.next_observation).max(axis=1)
    chosen = values(agent, params, data.observation)[np.arange(16), data.action]
    expected = np.mean(0.5 * np.square(data.reward + data.discount * best - chosen))
    loss, _ = agent.loss(params, learner_state._replace(target_params=target), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_double_dqn_selects_actions_with_the_online_network():
    agent = make(double=True, head=Expectation(None))
    params, learner_state = started(agent)
    target = agent.initial_params(jax.random.PRNGKey(9))
    batch = batches.transitions(agent)
    data = batch.data
    choice = values(agent, params, data.next_observation).argmax(axis=1)
    best = values(agent, target, data.next_observation)[np.arange(16), choice]
    chosen = values(agent, params, data.observation)[np.arange(16), data.action]
    expected = np.mean(0.5 * np.square(data.reward + data.discount * best - chosen))
    loss, _ = agent.loss(params, learner_state._replace(target_params=target), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_munchausen_loss_matches_the_definition():
    bonus = {"munchausen_temperature": 0.5, "munchausen_scale": 0.7, "munchausen_clip": -0.6}
    agent = make(munchausen=True, **bonus, head=Expectation(None))
    params, learner_state = started(agent)
    target = agent.initial_params(jax.random.PRNGKey(9))
    batch = batches.transitions(agent)
    data = batch.data
    here, following = (values(agent, target, seen) for seen in (data.observation, data.next_observation))
    log_policy = 0.5 * np.asarray(jax.nn.log_softmax(here / 0.5))[np.arange(16), data.action]
    soft = 0.5 * np.log(np.exp(following / 0.5).sum(axis=1))
    chosen = values(agent, params, data.observation)[np.arange(16), data.action]
    assert (log_policy < -0.6).any() and (log_policy > -0.6).any()
    errors = data.reward + 0.7 * np.maximum(log_policy, -0.6) + data.discount * soft - chosen
    loss, _ = agent.loss(params, learner_state._replace(target_params=target), batch)
    np.testing.assert_allclose(loss, np.mean(0.5 * np.square(errors)), rtol=1e-5)


def test_munchausen_bonus_and_soft_value_match_the_definitions():
    random = np.random.RandomState(0)
    target, following = (random.randn(5, 3).astype(np.float32) for _ in range(2))
    actions = random.randint(0, 3, 5)
    cfg = DQNConfig(munchausen=True, munchausen_temperature=0.5, munchausen_clip=-0.6)
    bonus, soft = munchausen_bonus(target, actions, cfg), soft_value(following, 0.5)
    policy, next_policy = (np.exp(q / 0.5) / np.exp(q / 0.5).sum(axis=1, keepdims=True) for q in (target, following))
    log_policy = 0.5 * np.log(policy[np.arange(5), actions])
    assert 0 < np.sum(log_policy < -0.6) < 5
    np.testing.assert_allclose(bonus, 0.9 * np.maximum(log_policy, -0.6), rtol=1e-4)
    np.testing.assert_allclose(soft, np.sum(next_policy * (following - 0.5 * np.log(next_policy)), axis=1), rtol=1e-4)


@pytest.mark.parametrize("change", [{"double": True}, {"n_step": 3}, {"head": Quantiles(5)}, {"head": Categories(5)}])
def test_munchausen_with_conflicting_options_is_rejected(change):
    with pytest.raises(UsageError, match=r"munchausen defines its own targets.* double=False, n_step=1, head=exp"):
        make(munchausen=True, **change)


@pytest.mark.parametrize("dueling", [False, True])
def test_quantile_loss_matches_the_definition(dueling):
    agent = make(dueling, head=Quantiles(4, 0.5), double=True, prioritized=True)
    params, learner_state = started(agent)
    target = agent.initial_params(jax.random.PRNGKey(9))
    batch = batches.transitions(agent)
    data = batch.data

    def quantiles(params, observation):
        return np.asarray(agent.network.apply(params, observation)[0]).reshape(16, 3, 4)

    here, online, following = (
        quantiles(p, seen)
        for p, seen in ((params, data.observation), (params, data.next_observation), (target, data.next_observation))
    )
    expected = np.zeros(16)
    for row in range(16):
        best = online[row].mean(axis=1).argmax()
        for i in range(4):
            for j in range(4):
                error = data.reward[row] + data.discount[row] * following[row, best, j] - here[row, data.action[row], i]
                size = abs(error)
                huber = 0.5 * size**2 if size <= 0.5 else 0.5 * (size - 0.25)
                expected[row] += abs((i + 0.5) / 4 - (error < 0)) * huber / 0.5 / 4
    loss, logs = agent.loss(params, learner_state._replace(target_params=target), batch)
    weights = np.asarray(importance_weights(jnp.asarray(batch.probabilities), 0.4))
    np.testing.assert_allclose(logs["priorities"], expected + 1e-6, rtol=1e-4)
    np.testing.assert_allclose(loss, np.mean(weights * expected), rtol=1e-4)
    published = agent.actor_params(params, learner_state)
    greedy = agent.eval_step(RNG, published, batches.timestep(VECTOR, 16)._replace(observation=data.observation), ())
    np.testing.assert_array_equal(greedy[0].action, here.mean(axis=2).argmax(axis=1))


def test_quantiles_converge_to_the_reward_distribution_of_a_bandit():
    agent = make(head=Quantiles(4, 0.01), learning_rate=3e-2)
    params, learner_state = started(agent)
    batch, random, step = batches.transitions(agent), np.random.RandomState(0), jax.jit(agent.learner_step)
    data = batch.data._replace(observation=np.ones((16, 3), np.float32), discount=np.zeros(16, np.float32))
    for _ in range(400):
        reward = random.choice([0.0, 1.0, 2.0, 3.0], 16).astype(np.float32)
        action = random.randint(0, 3, 16).astype(np.int32)
        params, learner_state, _ = step(
            params, learner_state, batch._replace(data=data._replace(reward=reward, action=action))
        )
    np.testing.assert_allclose(agent._outputs(params, data.observation)[0], [[0, 1, 2, 3]] * 3, atol=0.5)


@pytest.mark.parametrize("dueling", [False, True])
def test_categorical_loss_matches_the_algorithm_of_the_paper(dueling):
    agent = make(dueling, head=Categories(5, -1.0, 1.0), double=True, prioritized=True)
    support = np.linspace(-1.0, 1.0, 5)
    params, learner_state = started(agent)
    target = agent.initial_params(jax.random.PRNGKey(9))
    batch = batches.transitions(agent)
    data = batch.data

    def chances(params, observation):
        shaped = np.asarray(agent.network.apply(params, observation)[0]).reshape(16, 3, 5)
        return np.exp(shaped) / np.exp(shaped).sum(axis=2, keepdims=True)

    here, online, following = (
        chances(p, seen)
        for p, seen in ((params, data.observation), (params, data.next_observation), (target, data.next_observation))
    )
    expected = np.zeros(16)
    for row in range(16):
        best = (online[row] @ support).argmax()
        m = np.zeros(5)  # the loop of the paper's algorithm; `low` is the index l of the paper
        for j in range(5):
            b = (np.clip(data.reward[row] + data.discount[row] * support[j], -1.0, 1.0) + 1.0) / 0.5
            low = min(int(b), 3)
            m[low] += following[row, best, j] * (low + 1 - b)
            m[low + 1] += following[row, best, j] * (b - low)
        expected[row] = sum(m[i] * np.log(m[i] / here[row, data.action[row], i]) for i in range(5) if m[i] > 0.0)
    loss, logs = agent.loss(params, learner_state._replace(target_params=target), batch)
    weights = np.asarray(importance_weights(jnp.asarray(batch.probabilities), 0.4))
    np.testing.assert_allclose(logs["priorities"], expected + 1e-6, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(loss, np.mean(weights * expected), rtol=1e-4)
    published = agent.actor_params(params, learner_state)
    greedy = agent.eval_step(RNG, published, batches.timestep(VECTOR, 16)._replace(observation=data.observation), ())
    np.testing.assert_array_equal(greedy[0].action, (here @ support).argmax(axis=1))


def test_target_network_is_copied_once_per_target_update_period():
    agent = make(target_update_period=3)
    params, learner_state = started(agent)
    first = params
    batch = batches.transitions(agent)
    learner_step = jax.jit(agent.learner_step)
    for step in range(1, 7):
        params, learner_state, _ = learner_step(params, learner_state, batch)
        expected = params if step % 3 == 0 else first
        first = expected
        assert_trees_equal(learner_state.target_params, expected)


def test_priorities_are_absolute_errors_and_the_loss_is_weighted_by_importance():
    agent = make(prioritized=True, head=Expectation(None), importance_exponent=0.5)
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    loss, logs = agent.loss(params, learner_state, batch)
    priorities = np.asarray(logs["priorities"])
    weights = np.asarray(importance_weights(jnp.asarray(batch.probabilities), 0.5))
    assert priorities.shape == (16,) and np.all(priorities > 0)
    np.testing.assert_allclose(loss, np.mean(weights * 0.5 * np.square(priorities - 1e-6)), rtol=1e-5)


def test_importance_exponent_reaches_one_at_the_end_of_the_run():
    agent = make(prioritized=True, head=Expectation(None), total_learner_steps=100)
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    for steps, expected in [(0, 0.4), (50, 0.7), (100, 1.0), (200, 1.0)]:
        loss, logs = agent.loss(params, learner_state._replace(steps=jnp.int32(steps)), batch)
        weights = np.asarray(importance_weights(jnp.asarray(batch.probabilities), expected))
        errors = np.asarray(logs["priorities"]) - 1e-6
        np.testing.assert_allclose(loss, np.mean(weights * 0.5 * np.square(errors)), rtol=1e-5)


def test_uniform_replay_ignores_sampling_probabilities():
    agent = make()
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    loss, logs = agent.loss(params, learner_state, batch)
    assert loss == agent.loss(params, learner_state, batch._replace(probabilities=batch.probabilities * 3))[0]
    assert "priorities" not in logs


def test_rmsprop_epsilon_is_scaled_for_gradients_of_the_mean():
    agent = make(optimizer="rmsprop", learning_rate=0.1, batch_size=4)
    grads = {"w": jnp.array([3e-3, -1e-4])}
    updates, _ = agent.optimizer.update(grads, agent.optimizer.init(grads))
    summed = 4 * grads["w"]  # the paper's epsilon of 0.01 is for summed gradients
    wanted = -0.1 * summed / jnp.sqrt(0.05 * summed**2 - (0.05 * summed) ** 2 + 0.01)
    np.testing.assert_allclose(updates["w"], wanted, rtol=1e-5)


def test_scheduled_learning_rate_reaches_zero():
    agent = make(learning_rate="linear:1e-2:0", total_learner_steps=2)
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    step = jax.jit(agent.learner_step)
    for _ in range(2):
        params, learner_state, _ = step(params, learner_state, batch)
    after, _, _ = step(params, learner_state, batch)
    assert_trees_equal(after, params)


@pytest.mark.system
def test_adam_uses_clipped_gradients_and_the_configured_epsilon():
    agent = make(optimizer="adam", learning_rate=1e-2, max_grad_norm=0.01, adam_epsilon=0.1)
    params, learner_state = started(agent)
    batch, adam = batches.transitions(agent), optax.adam(1e-2, eps=0.1)
    grads = batches.clip_to_norm(agent.compute_gradients(params, learner_state, batch)[1], 0.01)
    expected = optax.apply_updates(params, adam.update(grads, adam.init(params))[0])
    after, _, _ = jax.jit(agent.learner_step)(params, learner_state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after, expected)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_dqn_learns_the_rewards_of_a_bandit(optimizer):
    agent = make(optimizer=optimizer, learning_rate=3e-3)
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    reward = np.array([1.0, -1.0, 0.5], np.float32)[batch.data.action]
    batch = batch._replace(data=batch.data._replace(reward=reward, discount=np.zeros(16, np.float32)))
    step = jax.jit(agent.learner_step)
    for _ in range(500):
        params, learner_state, logs = step(params, learner_state, batch)
    assert logs["td_error"] < 0.1


@pytest.mark.parametrize("spec", [BOX, MULTI])
def test_actions_that_are_not_discrete_are_rejected(spec):
    with pytest.raises(UsageError, match=r"DQN needs Discrete actions, got .*BoundedArray.*Use SAC, PPO or IMPALA"):
        DQN(DQNConfig(), VECTOR, spec)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"epsilon": 2.0},
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"exploration_duration_exponent": float("nan")},
        {"head": "quantiles"},
        {"max_grad_norm": -1.0},
        {"adam_epsilon": -1.0},
        {"munchausen_clip": 1.0},
        {"priority_exponent": -1.0},
        {"importance_exponent": float("nan")},
        {"total_learner_steps": 0},
        {"optimizer": "sgd"},
        {"n_step": 0},
    ],
)
def test_options_out_of_range_are_rejected_by_name(change):
    with pytest.raises(UsageError, match=f"DQNConfig.{next(iter(change))}"):
        DQNConfig(**change)


def test_min_replay_size_above_capacity_is_rejected():
    with pytest.raises(UsageError, match=r"min_replay_size \(100\) is above replay_capacity \(50\)"):
        DQNConfig(replay_capacity=50, min_replay_size=100)
