"""Tests of PQN: targets, exploration, and learning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dm_env import specs

from rlframe.agents import PQN, PQNConfig
from rlframe.agents.networks import MLPConfig
from rlframe.agents.q_learning import ActorParams
from rlframe.errors import UsageError
from rlframe.types import LAST, MID, Sequence
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, VECTOR, learn, started


def make(**changes) -> PQN:
    cfg = {"unroll_length": 8, "num_epochs": 1, "num_minibatches": 1, "discount": 0.9, "q_lambda": 0.7}
    cfg |= {"total_learner_steps": 100, **changes}
    return PQN(PQNConfig(**cfg), VECTOR, DISCRETE, MLPConfig((8,), "relu", layer_norm=True))


def test_replay_spec_follows_the_config():
    spec = make().replay_spec
    assert (spec.kind, spec.item, spec.batch_size, spec.max_staleness) == ("queue", Sequence(8), None, 0)


def test_schedules_count_a_smaller_batch_as_a_fraction_of_a_step():
    agent = make(total_learner_steps=10, epsilon="linear:1:0.001@0.5", envs_per_batch=4)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, 2, 8)
    params, learner_state, _ = learn(agent, params, learner_state, batch)
    assert learner_state.steps == 0.5
    np.testing.assert_allclose(agent.actor_params(params, learner_state).epsilon, 1.0 - 0.1 * (1.0 - 0.001), rtol=1e-6)


def unroll(agent, params, learner_state):
    """Return a batch with one terminated and one truncated episode."""
    batch = batches.sequences(agent, params, learner_state, 2, 8)
    step_type, discount = np.full((2, 9), MID, np.uint8), np.ones((2, 8), np.float32)
    step_type[0, 3] = step_type[1, 6] = LAST
    discount[0, 2] = 0.0
    return batch._replace(data=batch.data._replace(step_type=step_type, discount=discount))


def reference_targets(agent, params, data):
    """Compute the targets by their definition: a mixture of n-step returns for all n."""
    cfg, (values,) = agent.cfg, agent.network.apply(params, data.observation.reshape(-1, 3))
    best = np.asarray(values).reshape(2, 9, -1).max(axis=-1)
    targets = np.zeros((2, 8))
    for row in range(2):
        for t in range(8):
            rewards, factor, weight, k = 0.0, 1.0, 1.0, t
            while True:
                rewards += factor * data.reward[row, k]
                factor *= cfg.discount * data.discount[row, k]
                k += 1
                n_step = rewards + factor * best[row, k]
                if k == 8 or data.step_type[row, k] == LAST:
                    targets[row, t] += weight * n_step
                    break
                targets[row, t] += weight * (1.0 - cfg.q_lambda) * n_step
                weight *= cfg.q_lambda
    return targets


def test_targets_and_loss_match_plain_python_implementation():
    agent = make()
    params, learner_state = started(agent)
    batch = unroll(agent, params, learner_state)
    rollout = agent.rollout(params, batch.data)
    expected, mask = reference_targets(agent, params, batch.data), batch.data.step_type[:, :-1] != LAST
    targets = np.asarray(rollout.target).reshape(2, 8)
    np.testing.assert_allclose(targets[mask], expected[mask], rtol=1e-4, atol=1e-5)
    (values,) = agent.network.apply(params, batch.data.observation[:, :-1].reshape(-1, 3))
    chosen = np.asarray(values)[np.arange(16), batch.data.action.ravel()].reshape(2, 8)
    loss, logs = agent.minibatch_loss(params, learner_state, rollout)
    errors = (expected - chosen)[mask]
    np.testing.assert_allclose(loss, 0.5 * np.mean(errors**2), rtol=1e-4)
    np.testing.assert_allclose(logs["td_error"], np.mean(np.abs(errors)), rtol=1e-4)


def test_epsilon_falls_during_a_fraction_of_the_run():
    agent = make(total_learner_steps=100, epsilon="linear:1:0.2@0.5")
    params, learner_state = started(agent)
    for steps, expected in [(0, 1.0), (25, 0.6), (50, 0.2), (90, 0.2)]:
        published = agent.actor_params(params, learner_state._replace(steps=jnp.int32(steps)))
        np.testing.assert_allclose(published.epsilon, expected, rtol=1e-6)
    with pytest.raises(UsageError, match="PQNConfig.epsilon depends on the length of the run.*Set total_learner_steps"):
        make(total_learner_steps=None).actor_params(params, learner_state)


def test_epsilon_is_the_fraction_of_uniformly_random_actions():
    agent, rows = make(), 30_000
    params, _ = started(agent)
    seen = jax.tree.map(lambda leaf: np.repeat(leaf, rows, axis=0), batches.timestep(VECTOR, 1))
    actor_params = ActorParams(params, jnp.float32(0.3))
    output = agent.actor_step(jax.random.PRNGKey(1), actor_params, seen, ())[0]
    greedy = agent.eval_step(jax.random.PRNGKey(1), actor_params, seen, ())[0].action
    expected = np.full(3, 0.1)
    expected[greedy[0]] += 0.7
    np.testing.assert_allclose(np.bincount(output.action, minlength=3) / rows, expected, atol=0.01)
    (values,) = agent.network.apply(params, seen.observation[:1])
    np.testing.assert_allclose(output.extras["value"][0], values.max(), rtol=1e-5)


def test_scheduled_learning_rate_reaches_zero():
    agent = make(total_learner_steps=2, learning_rate="linear:1e-2:0")
    params, learner_state = started(agent)
    batch = unroll(agent, params, learner_state)
    for _ in range(2):
        params, learner_state, _ = learn(agent, params, learner_state, batch)
    batches.assert_trees_equal(learn(agent, params, learner_state, batch)[0], params)


@pytest.mark.system
def test_update_is_a_radam_step_with_a_clipped_gradient():
    agent = make(max_grad_norm=0.1, learning_rate=3e-3)
    params, learner_state = started(agent)
    radam = optax.radam(3e-3)
    opt_state = radam.init(params)
    slope = jax.jit(jax.grad(lambda params, rows: agent.minibatch_loss(params, learner_state, rows)[0]))
    for _ in range(8):  # RAdam ignores the variance in its first five steps
        batch = unroll(agent, params, learner_state)
        grads = slope(params, agent.rollout(params, batch.data))
        updates, opt_state = radam.update(batches.clip_to_norm(grads, 0.1), opt_state)
        expected = optax.apply_updates(params, updates)
        params, learner_state, _ = learn(agent, params, learner_state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), params, expected)


@pytest.mark.parametrize("spec", [VECTOR, specs.BoundedArray((4, 36, 36), np.uint8, 0, 255)])
def test_default_network_has_layer_norm(spec):
    params = jax.eval_shape(PQN(PQNConfig(), spec, DISCRETE).initial_params, jax.random.PRNGKey(0))
    assert sum("norm" in name for name in params) == (2 if spec is VECTOR else 4)


def test_pqn_learns_the_rewards_of_a_bandit():
    agent = make(num_epochs=50, num_minibatches=2, learning_rate=1e-2)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, 8, 8)
    reward = np.array([1.0, -1.0, 0.5], np.float32)[batch.data.action]
    batch = batch._replace(data=batch.data._replace(reward=reward, discount=np.zeros((8, 8), np.float32)))
    for _ in range(4):
        params, learner_state, logs = learn(agent, params, learner_state, batch)
    assert logs["td_error"] < 0.15


def test_actions_that_are_not_discrete_are_rejected():
    with pytest.raises(UsageError, match=r"PQN needs Discrete actions, got .*BoundedArray.*Use SAC, PPO or IMPALA"):
        PQN(PQNConfig(), VECTOR, BOX)


@pytest.mark.parametrize(
    "change",
    [
        {"num_epochs": 0},
        {"q_lambda": 1.5},
        {"learning_rate": float("nan")},
        {"max_grad_norm": -1.0},
        {"total_learner_steps": 0},
    ],
)
def test_options_out_of_range_are_rejected_by_name(change):
    with pytest.raises(UsageError, match=f"PQNConfig.{next(iter(change))}"):
        PQNConfig(**change)
