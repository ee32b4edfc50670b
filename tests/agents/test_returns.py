"""Tests that V-trace, GAE, n-step and Q(lambda) returns match worked examples and rlax, also at ends of episodes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents.returns import generalized_advantages, n_step_returns, q_lambda_returns, rescale, unscale, vtrace


def random_inputs(length=12, batch=(3,), seed=0):
    """Return random (values, rewards, discounts, rhos). Some episodes terminate, and some rhos are above 1."""
    random = np.random.RandomState(seed)
    shape = (length, *batch)
    values, rewards = random.randn(length + 1, *batch), random.randn(*shape)
    discounts = 0.9 * (random.rand(*shape) > 0.15)
    rhos = np.exp(0.8 * random.randn(*shape))
    return tuple(np.asarray(x, np.float32) for x in (values, rewards, discounts, rhos))


def reference_vtrace(values, rewards, discounts, rhos, *, rho_bar, c_bar, lambda_):
    """Compute equation 1 of the paper and the policy gradient for one unroll [T], as sums of products for each s."""
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
    """Call `vtrace` with lists for one unroll."""
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
def test_vtrace_matches_the_sums_in_the_paper(options):
    inputs = random_inputs()
    result = vtrace(*inputs, jnp.ones_like(inputs[1]), **options)
    for row in range(3):
        targets, advantages = reference_vtrace(*(x[:, row] for x in inputs), **options)
        np.testing.assert_allclose(result.targets[:, row], targets, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.advantages[:, row], advantages, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rho_bar", [0.8, 1.0, 3.0])
@pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])
def test_vtrace_agrees_with_rlax(rho_bar, lambda_, rlax):
    values, rewards, discounts, rhos = random_inputs(seed=1)
    c_bar = 1.0  # the only c_bar that rlax supports
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


def test_on_policy_vtrace_targets_are_n_step_returns():
    # With gamma 0.5, from the last step to the first: 4 + 0.5 * 8 = 8, 2 + 0.5 * 8 = 6, 1 + 0.5 * 6 = 4.
    # The targets depend only on the last value.
    result = run([7, -3, 5, 8], [1, 2, 4], [0.5, 0.5, 0.5])
    np.testing.assert_allclose(result.targets, [4, 6, 8])
    np.testing.assert_allclose(result.advantages, [4 - 7, 6 + 3, 8 - 5])


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_on_policy_vtrace_advantages_are_generalized_advantages(lambda_):
    values, rewards, discounts, _ = random_inputs(seed=2)
    mask = (np.random.RandomState(3).rand(*rewards.shape) > 0.2).astype(np.float32)
    result = vtrace(values, rewards, discounts, jnp.ones_like(rewards), mask, lambda_=lambda_)
    expected = generalized_advantages(rewards, discounts, values, mask, lambda_)
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.targets, values[:-1] + expected, rtol=1e-4, atol=1e-5)


def test_importance_weights_of_vtrace_are_clipped():
    # rho_0 = min(2, 4) = 2, rho_1 = 0.5 and c_0 = min(1, 4) = 1.
    # Therefore delta_1 = 0.5 * (1 + 10 - 1) = 5, and delta_0 = 2 * (3 + 1 - 2) = 4.
    result = run([2, 1, 10], [3, 1], [1, 1], rhos=[4, 0.5], rho_bar=2.0, c_bar=1.0)
    np.testing.assert_allclose(result.targets, [2 + 4 + 5, 1 + 5])
    np.testing.assert_allclose(result.advantages, [2 * (3 + 6 - 2), 0.5 * (1 + 10 - 1)])


def test_vtrace_does_not_bootstrap_at_termination():
    np.testing.assert_allclose(run([0, 2, 100], [1, 5], [1, 0]).targets, [1 + 5, 5])


def test_vtrace_bootstraps_at_truncation_and_uses_no_later_steps():
    # Timestep 1 is LAST (truncated) and has the value 10. Step 0 uses this value, and no data of the next episode.
    result = run([2, 10, 3, 50], [1, 0, 7], [1, 1, 1], mask=[1, 0, 1])
    np.testing.assert_allclose(result.targets, [1 + 10, 10, 7 + 50])
    np.testing.assert_allclose(result.advantages, [1 + 10 - 2, 0, 7 + 50 - 3])


@pytest.mark.parametrize("options", OPTIONS)
def test_episodes_in_one_sequence_are_independent(options):
    """The first episode (4 steps) is truncated, the second (3 steps) terminates, and the third (5 steps) continues."""
    values, rewards, discounts, rhos = (x[:, 0] for x in random_inputs(14, seed=4))
    last = np.array([4, 8])
    discounts = np.full_like(discounts, 0.9)
    discounts[7] = 0.0  # timestep 8 terminates the second episode
    rhos[last], rewards[last] = 1e9, -50.0  # extreme values for ignored actions
    mask = np.ones_like(rewards)
    mask[last] = 0.0
    result = run(values, rewards, discounts, rhos, mask, **options)
    for first, end in [(0, 4), (5, 8), (9, 14)]:
        steps = slice(first, end)
        alone = reference_vtrace(values[first : end + 1], rewards[steps], discounts[steps], rhos[steps], **options)
        np.testing.assert_allclose(result.targets[steps], alone[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.advantages[steps], alone[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(result.targets[last], values[last])
    np.testing.assert_array_equal(result.advantages[last], [0.0, 0.0])


def test_vtrace_supports_several_batch_axes():
    inputs = random_inputs(6, (2, 3), seed=5)
    result = vtrace(*inputs, jnp.ones_like(inputs[1]))
    flat = vtrace(*(jnp.reshape(x, (len(x), 6)) for x in (*inputs, np.ones_like(inputs[1]))))
    np.testing.assert_allclose(result.targets.reshape(6, 6), flat.targets, rtol=1e-5)
    np.testing.assert_allclose(result.advantages.reshape(6, 6), flat.advantages, rtol=1e-4, atol=1e-6)


def test_no_gradient_flows_through_vtrace():
    inputs = random_inputs(4)

    def total(*inputs):
        return sum(jnp.sum(x) for x in vtrace(*inputs, jnp.ones_like(inputs[1])))

    for slope in jax.grad(total, argnums=(0, 1, 2, 3))(*map(jnp.asarray, inputs)):
        np.testing.assert_array_equal(slope, np.zeros_like(slope))


def test_values_without_the_bootstrap_value_are_rejected():
    with pytest.raises(ValueError, match=r"values must be \[T\+1, \.\.\.\] with T = 2.*; got \[2"):
        run([1, 2], [1, 2], [1, 1])


# --- GAE, n-step and Q(lambda) returns, rescaling


def advantages(rewards, discounts, values, mask=None, discount=1.0, gae_lambda=1.0):
    columns = [jnp.asarray(x, jnp.float32)[:, None] for x in (rewards, discount * np.asarray(discounts), values)]
    mask = jnp.ones_like(columns[0]) if mask is None else jnp.asarray(mask, jnp.float32)[:, None]
    return generalized_advantages(*columns, mask, gae_lambda)[:, 0]


def test_gae_matches_worked_example():
    # With gamma 0.5 and lambda 0.5, the errors are 1 + 0.5 * 2 - 1 = 1 and 2 + 0.5 * 4 - 2 = 2.
    # The first advantage is 1 + 0.25 * 2 = 1.5.
    result = advantages([1, 2], [1, 1], [1, 2, 4], discount=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(result, [1.5, 2.0])


def test_gae_does_not_bootstrap_at_termination():
    np.testing.assert_allclose(advantages([1, 5], [1, 0], [0, 2, 100]), [1 + 5, 5 - 2])


def test_gae_bootstraps_at_truncation_and_uses_no_later_steps():
    # Timestep 1 is LAST (truncated) and has the value 10. Step 0 uses this value, and no data of the next episode.
    result = advantages([1, 0, 7], [1, 1, 1], [2, 10, 3, 50], mask=[1, 0, 1])
    np.testing.assert_allclose(result, [1 + 10 - 2, 0, 7 + 50 - 3])


def test_gae_agrees_with_rlax(rlax):
    random = np.random.RandomState(0)
    rewards, values = random.randn(20), random.randn(21)
    discounts = (random.rand(20) > 0.2).astype(np.float32)
    oracle = rlax.truncated_generalized_advantage_estimation(
        jnp.asarray(rewards, jnp.float32), jnp.asarray(0.9 * discounts), 0.7, jnp.asarray(values, jnp.float32)
    )
    np.testing.assert_allclose(advantages(rewards, discounts, values, None, 0.9, 0.7), oracle, rtol=1e-5, atol=1e-5)


def test_rescaling_matches_worked_example():
    # sqrt(8 + 1) - 1 + 0.1 * 8 = 2.8, and -2.8 for the negative number
    np.testing.assert_allclose(rescale(jnp.array([8.0, 0.0, -8.0]), 0.1), [2.8, 0.0, -2.8], rtol=1e-6)
    np.testing.assert_allclose(unscale(jnp.array([2.8, 0.0, -2.8]), 0.1), [8.0, 0.0, -8.0], rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 1e-2])
def test_unscale_is_the_inverse_of_rescale(epsilon, rlax):
    values = jnp.concatenate([-jnp.logspace(-3, 4, 50), jnp.logspace(-3, 4, 50)])
    np.testing.assert_allclose(unscale(rescale(values, epsilon), epsilon), values, rtol=1e-3)
    if epsilon:
        pair = rlax.SIGNED_HYPERBOLIC_PAIR
        np.testing.assert_allclose(rescale(values, 1e-3), pair.apply(values), rtol=1e-5)


def test_n_step_returns_match_worked_example():
    # gamma 0.5, n = 2. Timestep 2 is LAST (truncated), and timestep 3 is FIRST of the next episode.
    found = n_step_returns(
        *(jnp.array(x)[:, None] for x in ([1.0, 2.0, 9.0, 4.0, 8.0], [0.5] * 5, [10.0, 20.0, 30.0, 40.0, 50.0])),
        continues=jnp.array([True, False, True, True, True])[:, None],
        n_step=2,
    )
    # 1 + 0.5 (2 + 0.5 * 20); 2 + 0.5 * 20; (ignored); 4 + 0.5 (8 + 0.5 * 50); 8 + 0.5 * 50 (only one reward is left)
    np.testing.assert_allclose(np.delete(found[:, 0], 2), [7.0, 12.0, 20.5, 33.0])


@pytest.mark.parametrize("n_step", [1, 3, 9])
def test_n_step_returns_agree_with_rlax_within_an_episode(n_step, rlax):
    random = np.random.RandomState(0)
    rewards, values, discounts = (random.rand(6, 2).astype(np.float32) for _ in range(3))
    found = n_step_returns(rewards, discounts, values, np.ones((6, 2), bool), n_step)
    for column in range(2):
        expected = rlax.n_step_bootstrapped_returns(*(x[:, column] for x in (rewards, discounts, values)), n_step)
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-5)


def test_lambda_returns_match_worked_example():
    # gamma 0.5, lambda 0.5. Timestep 2 is LAST (truncated).
    found = q_lambda_returns(
        *(jnp.array(x)[:, None] for x in ([1.0, 2.0, 9.0, 4.0], [0.5] * 4, [10.0, 20.0, 30.0, 40.0])),
        continues=jnp.array([True, False, True, True])[:, None],
        lambda_=0.5,
    )
    # 1 + 0.5 (0.5 * 10 + 0.5 * 12) with 12 = 2 + 0.5 * 20; 9 + 0.5 (0.5 * 30 + 0.5 * 24) with 24 = 4 + 0.5 * 40
    np.testing.assert_allclose(found[:, 0], [6.5, 12.0, 22.5, 24.0])


def test_error_names_the_array_of_wrong_shape():
    steps = np.ones((4, 2))
    with pytest.raises(ValueError, match=r"values must be \[T\+1, B\] with T = 4, B = 2; got \[4, 2\]"):
        generalized_advantages(steps, steps, steps, steps, 1.0)
    for returns in (n_step_returns, q_lambda_returns):
        with pytest.raises(ValueError, match=r"continues must be \[T, B\] with T = 4, B = 2; got \[2, 4\]"):
            returns(steps, steps, steps, steps.T > 0, 1)
