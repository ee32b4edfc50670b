"""V-trace against the paper's sums, against rlax, and at the ends of episodes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import losses
from rlframe.agents.vtrace import vtrace
from tests.extras import import_or_skip

rlax = import_or_skip("rlax", "pip install 'rlframe[test]'")


def random_inputs(length=12, batch=(3,), seed=0):
    """(values, rewards, discounts, rhos), with terminations, and rhos on both sides of 1."""
    random = np.random.RandomState(seed)
    shape = (length, *batch)
    values, rewards = random.randn(length + 1, *batch), random.randn(*shape)
    discounts = 0.9 * (random.rand(*shape) > 0.15)
    rhos = np.exp(0.8 * random.randn(*shape))
    return tuple(np.asarray(x, np.float32) for x in (values, rewards, discounts, rhos))


def by_the_paper(values, rewards, discounts, rhos, *, rho_bar, c_bar, lambda_):
    """Equation 1 of the paper and its policy gradient, for one unroll [T]: a sum of products for each s."""
    length = len(rewards)
    rho, c = np.minimum(rho_bar, rhos), lambda_ * np.minimum(c_bar, rhos)
    v = np.array(values, np.float64)
    for s in range(length):
        for t in range(s, length):
            product = np.prod([discounts[i] * c[i] for i in range(s, t)])
            v[s] += product * rho[t] * (rewards[t] + discounts[t] * values[t + 1] - values[t])
    q = rewards + discounts * (lambda_ * v[1:] + (1 - lambda_) * values[1:])
    return v[:-1], rho * (q - values[:-1])


def run(values, rewards, discounts, rhos=None, mask=None, **options):
    """`vtrace` of lists, one unroll."""
    inputs = [jnp.asarray(x, jnp.float32) for x in (values, rewards, discounts)]
    rhos, mask = (jnp.ones_like(inputs[1]) if x is None else jnp.asarray(x, jnp.float32) for x in (rhos, mask))
    return vtrace(*inputs, rhos, mask, **options)


OPTIONS = [
    {"rho_bar": 1.0, "c_bar": 1.0, "lambda_": 1.0},
    {"rho_bar": 2.5, "c_bar": 0.7, "lambda_": 1.0},
    {"rho_bar": float("inf"), "c_bar": 1.5, "lambda_": 0.6},
    {"rho_bar": 1.0, "c_bar": 1.0, "lambda_": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_the_sum_of_the_paper(options):
    inputs = random_inputs()
    result = vtrace(*inputs, jnp.ones_like(inputs[1]), **options)
    for row in range(3):
        targets, advantages = by_the_paper(*(x[:, row] for x in inputs), **options)
        np.testing.assert_allclose(result.targets[:, row], targets, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.advantages[:, row], advantages, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rho_bar", [0.8, 1.0, 3.0])
@pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])
def test_it_agrees_with_rlax(rho_bar, lambda_):
    values, rewards, discounts, rhos = random_inputs(seed=1)
    c_bar = 1.0  # rlax has no other
    result = vtrace(
        values, rewards, discounts, rhos, jnp.ones_like(rewards), rho_bar=rho_bar, c_bar=c_bar, lambda_=lambda_
    )
    oracle = jax.vmap(
        lambda *inputs: rlax.vtrace_td_error_and_advantage(
            *inputs, lambda_=lambda_, clip_rho_threshold=rho_bar, clip_pg_rho_threshold=rho_bar
        ),
        in_axes=1,
        out_axes=1,
    )(values[:-1], values[1:], rewards, discounts, rhos)
    np.testing.assert_allclose(result.targets, oracle.errors + values[:-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.advantages, oracle.pg_advantage, rtol=1e-4, atol=1e-5)


def test_on_policy_targets_are_n_step_returns():
    # gamma 0.5, from the back: 4 + 0.5 * 8 = 8, 2 + 0.5 * 8 = 6, 1 + 0.5 * 6 = 4; the values between do not matter.
    result = run([7, -3, 5, 8], [1, 2, 4], [0.5, 0.5, 0.5])
    np.testing.assert_allclose(result.targets, [4, 6, 8])
    np.testing.assert_allclose(result.advantages, [4 - 7, 6 + 3, 8 - 5])


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_on_policy_advantages_are_generalised_advantages(lambda_):
    values, rewards, discounts, _ = random_inputs(seed=2)
    mask = (np.random.RandomState(3).rand(*rewards.shape) > 0.2).astype(np.float32)
    result = vtrace(values, rewards, discounts, jnp.ones_like(rewards), mask, lambda_=lambda_)
    expected = losses.generalised_advantages(rewards, discounts, values, mask, discount=1.0, gae_lambda=lambda_)
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.targets, values[:-1] + expected, rtol=1e-4, atol=1e-5)


def test_weights_are_clipped_by_hand():
    # rho = min(2, 4) and 0.5, c = min(1, 4): delta_1 = 0.5 * (1 + 10 - 1) = 5, delta_0 = 2 * (3 + 1 - 2) = 4.
    result = run([2, 1, 10], [3, 1], [1, 1], rhos=[4, 0.5], rho_bar=2.0, c_bar=1.0)
    np.testing.assert_allclose(result.targets, [2 + 4 + 5, 1 + 5])
    np.testing.assert_allclose(result.advantages, [2 * (3 + 6 - 2), 0.5 * (1 + 10 - 1)])


def test_a_terminated_episode_does_not_bootstrap():
    np.testing.assert_allclose(run([0, 2, 100], [1, 5], [1, 0]).targets, [1 + 5, 5])


def test_a_time_limit_bootstraps_from_the_last_value_and_the_trace_stops_there():
    # Timestep 1 is LAST, cut at value 10: step 0 sees it, and nothing of the next episode.
    result = run([2, 10, 3, 50], [1, 0, 7], [1, 1, 1], mask=[1, 0, 1])
    np.testing.assert_allclose(result.targets, [1 + 10, 10, 7 + 50])
    np.testing.assert_allclose(result.advantages, [1 + 10 - 2, 0, 7 + 50 - 3])


@pytest.mark.parametrize("options", OPTIONS)
def test_episodes_in_one_sequence_are_as_each_alone(options):
    """Three episodes, the first cut, the second terminated, the third going on: [T] = 4 + LAST, 3 + LAST, 5."""
    values, rewards, discounts, rhos = (x[:, 0] for x in random_inputs(14, seed=4))
    last = np.array([4, 8])
    discounts = np.full_like(discounts, 0.9)
    discounts[7] = 0.0  # of timestep 8
    rhos[last], rewards[last] = 1e9, -50.0  # of actions that the environment ignored
    mask = np.ones_like(rewards)
    mask[last] = 0.0
    result = run(values, rewards, discounts, rhos, mask, **options)
    for first, end in [(0, 4), (5, 8), (9, 14)]:
        steps = slice(first, end)
        alone = by_the_paper(values[first : end + 1], rewards[steps], discounts[steps], rhos[steps], **options)
        np.testing.assert_allclose(result.targets[steps], alone[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.advantages[steps], alone[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(result.targets[last], values[last])
    np.testing.assert_array_equal(result.advantages[last], [0.0, 0.0])


def test_what_follows_the_time_axis_is_mapped_over():
    inputs = random_inputs(6, (2, 3), seed=5)
    result = vtrace(*inputs, jnp.ones_like(inputs[1]))
    flat = vtrace(*(jnp.reshape(x, (len(x), 6)) for x in (*inputs, np.ones_like(inputs[1]))))
    np.testing.assert_allclose(result.targets.reshape(6, 6), flat.targets, rtol=1e-5)
    np.testing.assert_allclose(result.advantages.reshape(6, 6), flat.advantages, rtol=1e-4, atol=1e-6)


def test_no_gradient_flows_through_it():
    inputs = random_inputs(4)

    def total(*inputs):
        return sum(jnp.sum(x) for x in vtrace(*inputs, jnp.ones_like(inputs[1])))

    for slope in jax.grad(total, argnums=(0, 1, 2, 3))(*map(jnp.asarray, inputs)):
        np.testing.assert_array_equal(slope, np.zeros_like(slope))


def test_values_without_the_one_that_bootstraps_are_refused():
    with pytest.raises(AssertionError, match="shape"):
        run([1, 2], [1, 2], [1, 1])
