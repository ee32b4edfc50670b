"""Tests of TD3: exploration, target smoothing, and delayed policy updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlframe.agents import TD3, TD3Config
from rlframe.agents.networks import MLPConfig
from rlframe.errors import UsageError
from rlframe.types import Transition
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, VECTOR, assert_trees_equal, started
from tests.agents.test_sac import mlp


def make(**changes) -> TD3:
    cfg = {"batch_size": 16, "min_replay_size": 16, "learning_rate": 1e-2, **changes}
    return TD3(TD3Config(**cfg), VECTOR, BOX, MLPConfig((8,), "relu"))


def test_replay_spec_follows_the_config():
    spec = make(discount=0.9, update_period=4, replay_capacity=500).replay_spec
    assert (spec.kind, spec.item, spec.batch_size) == ("uniform", Transition(1, 0.9), 16)
    assert (spec.capacity, spec.min_size, spec.samples_per_insert) == (500, 16, 4.0)


def actions_after(steps, **changes):
    agent = make(**changes)
    params, learner_state = started(agent)
    published = agent.actor_params(params, learner_state._replace(steps=jnp.int32(steps)))
    seen = batches.timestep(VECTOR, 1)
    seen = jax.tree.map(lambda leaf: np.repeat(leaf, 20_000, axis=0), seen)
    explored = agent.actor_step(jax.random.PRNGKey(1), published, seen, ())[0].action
    greedy = agent.eval_step(jax.random.PRNGKey(1), published, seen, ())[0].action
    return np.asarray(explored), np.asarray(greedy)


def test_actions_are_uniform_until_the_first_update():
    actions, _ = actions_after(0)
    for column, low, high in ((0, -2.0, 2.0), (1, 0.0, 1.0)):
        shares = np.histogram(actions[:, column], bins=4, range=(low, high))[0] / len(actions)
        np.testing.assert_allclose(shares, 0.25, atol=0.015)


def test_exploration_noise_is_proportional_to_the_action_range_and_clipped():
    explored, greedy = actions_after(1, exploration_noise=0.02)
    np.testing.assert_allclose(np.std(explored - greedy, axis=0), [0.02 * 2.0, 0.02 * 0.5], rtol=0.03)
    loud, _ = actions_after(1, exploration_noise=5.0)
    assert loud[:, 0].min() == -2.0 and loud[:, 0].max() == 2.0 and loud[:, 1].min() == 0.0 and loud[:, 1].max() == 1.0


def test_loss_matches_a_loop_over_rows():
    agent = make(smoothing_noise=0.4, smoothing_clip=0.3)
    params, learner_state = started(agent)
    target = agent.initial_params(jax.random.PRNGKey(9))
    learner_state = learner_state._replace(target_params=target, steps=jnp.int32(3))
    batch = batches.transitions(agent)
    data, expected, clipped = batch.data, 0.0, 0
    noise = 0.4 * np.asarray(jax.random.normal(jax.random.fold_in(learner_state.rng, 3), (16, 2)), np.float64)
    for i in range(16):

        def values(critics, observation, action):
            return [mlp(critics, np.concatenate([action, observation]), head)[0] for head in (0, 1)]

        moved = np.tanh(mlp(target.policy, data.next_observation[i], 0)) + np.clip(noise[i], -0.3, 0.3)
        clipped += np.any(np.abs(moved) > 1.0)
        bootstrap = min(values(target.critics, data.next_observation[i], np.clip(moved, -1.0, 1.0)))
        target_value = data.reward[i] + data.discount[i] * bootstrap
        given = (data.action[i] - [0.0, 0.5]) / [2.0, 0.5]
        expected += sum(
            0.5 * (value - target_value) ** 2 for value in values(params.critics, data.observation[i], given)
        )
    assert clipped > 0 and np.any(np.abs(noise) > 0.3)
    np.testing.assert_allclose(agent.loss(params, learner_state, batch)[0], expected / 16, rtol=1e-4)


def test_policy_loss_uses_the_first_critic():
    agent = make()
    params, _ = started(agent)
    batch = batches.transitions(agent)
    actions = [np.tanh(mlp(params.policy, row, 0)) for row in batch.data.observation]
    values = [mlp(params.critics, np.concatenate(pair), 0)[0] for pair in zip(actions, batch.data.observation)]
    loss = agent.policy_loss(params.policy, params.critics, batch.data.observation)
    np.testing.assert_allclose(loss, -np.mean(values), rtol=1e-4)


def test_policy_update_uses_the_updated_critics():
    agent = make()
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    after, _, _ = jax.jit(agent.learner_step)(params, learner_state, batch)
    slope = jax.jit(jax.grad(agent.policy_loss))
    new, old = (slope(params.policy, critics, batch.data.observation) for critics in (after.critics, params.critics))
    adam = optax.adam(1e-2)
    expected, with_old = (
        optax.apply_updates(params.policy, adam.update(grads, adam.init(params.policy))[0]) for grads in (new, old)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.policy, expected)
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), with_old, expected))) > 1e-5


def test_policy_and_target_networks_are_updated_every_second_step():
    agent = make(policy_period=2, target_update_rate=0.25)
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    step = jax.jit(agent.learner_step)
    for number in range(4):
        before, old = params, learner_state
        params, learner_state, _ = step(params, learner_state, batch)
        moved = any(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.any(a != b)), params.policy, before.policy)))
        assert moved == (number % 2 == 0)
        if not moved:
            assert_trees_equal(learner_state.target_params, old.target_params)
            assert_trees_equal(learner_state.opt_state.policy, old.opt_state.policy)
            continue
        expected = jax.tree.map(lambda new, was: 0.25 * new + 0.75 * was, params, old.target_params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), learner_state.target_params, expected)
    assert learner_state.steps == 4


@pytest.mark.system
def test_td3_learns_the_best_action_of_a_bandit():
    agent = TD3(TD3Config(learning_rate=1e-2, target_update_rate=1.0), VECTOR, BOX, MLPConfig((32,), "relu"))
    params, learner_state = started(agent)
    random = np.random.RandomState(0)
    step = jax.jit(agent.learner_step)
    batch = batches.transitions(agent, 64)
    for _ in range(1200):
        action = random.uniform([-2.0, 0.0], [2.0, 1.0], (64, 2)).astype(np.float32)
        reward = -np.square((action - [1.0, 0.25]) * [1.0, 4.0]).sum(axis=1).astype(np.float32)
        data = batch.data._replace(action=action, reward=reward, discount=np.zeros(64, np.float32))
        params, learner_state, _ = step(params, learner_state, batch._replace(data=data))
    seen = batches.timestep(VECTOR, 64)._replace(observation=batch.data.observation)
    greedy = agent.eval_step(jax.random.PRNGKey(0), agent.actor_params(params, learner_state), seen, ())[0].action
    np.testing.assert_allclose(np.mean(greedy, axis=0) * np.array([1.0, 4.0]), [1.0, 1.0], atol=0.35)


def test_actions_that_are_not_continuous_are_rejected():
    with pytest.raises(UsageError, match="TD3 needs continuous actions"):
        TD3(TD3Config(), VECTOR, DISCRETE)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"policy_period": 0},
        {"target_update_rate": 2.0},
        {"exploration_noise": -0.1},
        {"smoothing_clip": float("nan")},
        {"learning_rate": 0.0},
        {"min_replay_size": 2_000_000},
    ],
)
def test_options_out_of_range_are_rejected_by_name(change):
    with pytest.raises(UsageError, match=f"TD3Config.{next(iter(change))}"):
        TD3Config(**change)
