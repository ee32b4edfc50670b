"""Tests of IMPALA: the loss, off-policy corrections, and schedules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import IMPALA, IMPALAConfig
from rlframe.agents.networks import MLPConfig
from rlframe.errors import UsageError
from rlframe.types import LAST, Sequence
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, VECTOR, learn, started

CONFIG = IMPALAConfig(unroll_length=8, batch_size=4, optimizer="adam", learning_rate=1e-2)


def make(action_spec=DISCRETE, **changes) -> IMPALA:
    return IMPALA(dataclasses.replace(CONFIG, **changes), VECTOR, action_spec, MLPConfig(hidden=(8,)))


def learned(agent, change=lambda data: data):
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state)
    return learn(agent, params, learner_state, batch._replace(data=change(batch.data)))


def with_ratio(ratio):
    """Return a function that changes a batch so that pi(a) / mu(a) is `ratio` (learner's policy / acting policy)."""

    def change(data):
        log_prob = (data.extras["log_prob"] - np.log(ratio)).astype(np.float32)
        return data._replace(extras={**data.extras, "log_prob": log_prob})

    return change


def test_replay_spec_follows_the_config():
    spec = make(unroll_length=16, batch_size=6).replay_spec
    assert (spec.kind, spec.item, spec.batch_size) == ("queue", Sequence(16), 6)
    assert spec.capacity == 2 * 6 * 16


@pytest.mark.system
def test_loss_is_the_weighted_sum_of_its_terms():
    logs = learned(make(value_cost=0.7, entropy_cost=0.3))[2]
    expected = logs["policy_loss"] + 0.7 * logs["value_loss"] - 0.3 * logs["entropy"]
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)


def test_terms_of_the_loss_match_worked_example():
    """The example is one unroll of two steps. Its importance weights are 4 and 0.5, and are clipped at 1."""
    agent = make(discount=0.9, entropy_cost=0.0)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, batch_size=1, length=2)
    data = batch.data._replace(step_type=np.ones((1, 3), np.uint8), reward=np.array([[1.0, 2.0]], np.float32))
    data = with_ratio(np.array([[4.0, 0.5]]))(data)
    logits, values = agent.network.apply(params, data.observation[0])
    values = np.asarray(values)[:, 0]
    log_probs = np.asarray(jax.nn.log_softmax(logits))[np.arange(2), data.action[0]]
    delta = np.array([1.0, 0.5]) * (np.array([1.0, 2.0]) + 0.9 * values[1:] - values[:-1])
    targets = values[:-1] + np.array([delta[0] + 0.9 * delta[1], delta[1]])
    advantages = np.array([1.0 + 0.9 * targets[1] - values[0], 0.5 * (2.0 + 0.9 * values[2] - values[1])])
    total, logs = agent.loss(params, learner_state, batch._replace(data=data))
    np.testing.assert_allclose(logs["policy_loss"], -np.mean(log_probs * advantages), rtol=1e-4)
    np.testing.assert_allclose(logs["value_loss"], 0.5 * np.mean((targets - values[:-1]) ** 2), rtol=1e-4)
    np.testing.assert_allclose(logs["clipped_rho"], 0.75, rtol=1e-5)
    np.testing.assert_allclose(total, 2 * (logs["policy_loss"] + 0.5 * logs["value_loss"]), rtol=1e-5)


@pytest.mark.system
def test_loss_is_summed_over_unmasked_steps():
    agent = make()
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state)
    total, logs = agent.loss(params, learner_state, batch)
    steps = np.sum(batch.data.step_type[:, :-1] != LAST)
    assert 0 < steps < batch.data.reward.size
    np.testing.assert_allclose(total, steps * logs["loss"], rtol=1e-5)


@pytest.mark.system
def test_ignored_actions_do_not_change_the_update():
    def disturbed(data):
        ignored = data.step_type[:, :-1] == LAST
        assert ignored.any()
        action = np.where(ignored, (data.action + 1) % 3, data.action)
        reward = np.where(ignored, 1e3, data.reward).astype(np.float32)
        log_prob = np.where(ignored, -200.0, data.extras["log_prob"]).astype(np.float32)
        return data._replace(action=action, reward=reward, extras={**data.extras, "log_prob": log_prob})

    left, right = learned(make()), learned(make(), disturbed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), left[0], right[0])
    np.testing.assert_allclose(left[2]["clipped_rho"], right[2]["clipped_rho"], rtol=1e-5)


@pytest.mark.parametrize(
    ("action_spec", "ratio", "clipped"),
    [(DISCRETE, 1.0, 1.0), (BOX, 1.0, 1.0), (BOX, 0.25, 0.25), (DISCRETE, 3.0, 1.0)],
)
def test_logged_clipped_rho_is_lower_for_data_that_is_more_off_policy(action_spec, ratio, clipped):
    logs = learned(make(action_spec), with_ratio(ratio))[2]
    np.testing.assert_allclose(logs["clipped_rho"], clipped, rtol=1e-4)


def test_truncated_episode_bootstraps_and_terminated_episode_does_not():
    agent = make(discount=1.0)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, batch_size=1, length=2)
    data = batch.data._replace(step_type=np.array([[1, 2, 0]], np.uint8), reward=np.array([[3.0, 9.0]], np.float32))
    values = np.asarray(agent.network.apply(params, data.observation[0])[1])[:, 0]

    def value_loss(discounts):
        changed = batch._replace(data=data._replace(discount=np.array([discounts], np.float32)))
        return agent.loss(params, learner_state, changed)[1]["value_loss"]

    np.testing.assert_allclose(value_loss([1.0, 1.0]), 0.5 * (3.0 + values[1] - values[0]) ** 2, rtol=1e-4)
    np.testing.assert_allclose(value_loss([0.0, 1.0]), 0.5 * (3.0 - values[0]) ** 2, rtol=1e-4)


def test_continuous_action_is_clipped_to_the_bounds_and_the_unclipped_sample_is_stored():
    agent = make(BOX)
    params, learner_state = started(agent)
    output = batches.act(agent, params, learner_state, batch_size=200)
    assert np.all(output.action >= BOX.minimum) and np.all(output.action <= BOX.maximum)
    np.testing.assert_allclose(output.action, agent.distribution.to_action(output.extras["sample"]))
    assert np.any(np.abs(output.extras["sample"]) > 1.0)


def learns(action_spec, reward, measure):
    """Return `measure` before and after several updates on one batch with the rewards `reward(data)`."""
    agent = make(action_spec, discount=0.0, batch_size=16, learning_rate=3e-2, entropy_cost=0.0)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, batch_size=16)
    batch = batch._replace(data=batch.data._replace(reward=reward(batch.data).astype(np.float32)))
    observation = batch.data.observation[:, 0]
    before = measure(agent.network.apply(params, observation)[0])
    step = jax.jit(agent.learner_step)
    for _ in range(30):  # all updates use the same data, so it is off-policy after the first update
        params, learner_state, logs = step(params, learner_state, batch)
    assert logs["clipped_rho"] < 1.0
    return float(before), float(measure(agent.network.apply(params, observation)[0]))


@pytest.mark.system
def test_probability_of_the_rewarded_action_increases():
    before, after = learns(
        DISCRETE, lambda data: data.action == 1, lambda logits: jnp.mean(jax.nn.softmax(logits)[:, 1])
    )
    assert after > before + 0.2


def test_mean_of_a_continuous_action_moves_toward_reward():
    before, after = learns(BOX, lambda data: data.extras["sample"][..., 0], lambda logits: jnp.mean(logits[:, 0]))
    assert after > before + 0.2


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_size_of_the_update_is_proportional_to_the_scheduled_learning_rate(optimizer):
    agent = make(optimizer=optimizer, learning_rate="linear:1e-2:0", total_learner_steps=2)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state)
    step = jax.jit(agent.learner_step)
    rates, changes = [], []
    for _ in range(3):
        before = params
        params, learner_state, logs = step(params, learner_state, batch)
        rates.append(float(logs["learning_rate"]))
        changes.append(max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), before, params))))
    np.testing.assert_allclose(rates, [1e-2, 5e-3, 0.0])
    assert changes[0] > 0.0 and changes[1] > 0.0 and changes[2] == 0.0


def test_rmsprop_with_clipped_gradients_matches_tensorflow():
    agent = make(optimizer="rmsprop", learning_rate=0.1, max_grad_norm=5.0, rmsprop_epsilon=0.01)
    updates, _ = agent.optimizer.update(jnp.array([30.0, 40.0]), agent.optimizer.init(jnp.zeros(2)))
    clipped = np.array([3.0, 4.0])
    np.testing.assert_allclose(updates, -0.1 * clipped / np.sqrt(0.99 + 0.01 * clipped**2 + 0.01), rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"unroll_length": 0},
        {"batch_size": 0},
        {"discount": 1.5},
        {"vtrace_lambda": -0.1},
        {"rmsprop_decay": 2.0},
        {"rho_bar": 0.0},
        {"c_bar": 2.0},
        {"learning_rate": float("nan")},
        {"optimizer": "sgd"},
    ],
)
def test_options_out_of_range_are_rejected_by_name(change):
    with pytest.raises(UsageError, match=f"IMPALAConfig.{next(iter(change))}"):
        IMPALAConfig(**change)
