"""Tests that the losses match worked examples and rlax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import losses, off_policy, returns, td3


def test_clipped_surrogate_matches_worked_example():
    ratio, advantage = jnp.array([1.5, 1.5, 0.5, 0.5, 1.1]), jnp.array([1.0, -1.0, 1.0, -1.0, 2.0])
    result = losses.clipped_surrogate(ratio, advantage, 0.2)
    np.testing.assert_allclose(result, [-1.2, 1.5, -0.5, 0.8, -2.2], rtol=1e-6)


def test_clipped_surrogate_and_its_gradient_agree_with_rlax(rlax):
    random = np.random.RandomState(1)
    ratio, advantage = jnp.exp(jnp.asarray(random.randn(50) * 0.3)), jnp.asarray(random.randn(50))
    ours = jax.value_and_grad(lambda r: jnp.mean(losses.clipped_surrogate(r, advantage, 0.2)))(ratio)
    oracle = jax.value_and_grad(lambda r: rlax.clipped_surrogate_pg_loss(r, advantage, 0.2))(ratio)
    np.testing.assert_allclose(ours[0], oracle[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], oracle[1], atol=1e-7)


def test_value_error_is_half_the_squared_error():
    np.testing.assert_allclose(losses.value_error(jnp.array(3.0), jnp.array(0.0), jnp.array(1.0), None), 2.0)


def test_value_error_with_clipping_is_the_larger_error():
    # The old value is 0, so a value of 3 is clipped to 0.5.
    # For the target 1, the error of 3 is larger. For the target 5, the error of 0.5 is larger.
    value, old, target = jnp.array([3.0, 3.0]), jnp.zeros(2), jnp.array([1.0, 5.0])
    np.testing.assert_allclose(losses.value_error(value, old, target, 0.5), [2.0, 0.5 * 4.5**2])


def test_normalize_uses_only_unmasked_entries():
    result = losses.normalize(jnp.array([1.0, 3.0, 100.0]), jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(result[:2], [-1.0, 1.0], rtol=1e-6)


def test_masked_mean_is_zero_if_all_entries_are_masked():
    assert losses.masked_mean(jnp.array([5.0]), jnp.array([0.0])) == 0.0


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0])
def test_huber_and_its_gradient_agree_with_rlax(threshold, rlax):
    errors = jnp.linspace(-4.0, 4.0, 33)
    np.testing.assert_allclose(losses.huber(errors, threshold), rlax.huber_loss(errors, threshold), rtol=1e-6)
    slope = jax.vmap(jax.grad(lambda x: losses.huber(x, threshold)))(errors)
    inside = jnp.clip(errors, -threshold, threshold)
    off_kink = jnp.abs(jnp.abs(errors) - threshold) > 1e-6
    np.testing.assert_allclose(slope[off_kink], inside[off_kink], rtol=1e-6)


def test_huber_without_a_threshold_is_half_the_squared_error():
    np.testing.assert_allclose(losses.huber(jnp.array([3.0, -4.0]), None), [4.5, 8.0])


def test_importance_weights_match_worked_example():
    weights = off_policy.importance_weights(jnp.array([0.1, 0.4]), 0.5)
    np.testing.assert_allclose(weights, [1.0, 0.5], rtol=1e-6)


def test_importance_weights_with_exponent_zero_are_one():
    np.testing.assert_allclose(off_policy.importance_weights(jnp.array([0.1, 0.4]), 0.0), [1.0, 1.0])


def test_sequence_priorities_match_worked_example():
    errors = jnp.array([[1.0, -4.0], [-3.0, 7.0], [5.0, 2.0]])
    mask = jnp.array([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    # The absolute errors are 1 and 3 in one sequence, and 4 and 2 in the other.
    # The priority is 0.9 times the largest error plus 0.1 times the mean error.
    np.testing.assert_allclose(off_policy.sequence_priorities(errors, mask, 0.9), [2.9, 3.9], rtol=1e-6)


def test_soft_targets_match_worked_example():
    rewards, discounts = jnp.array([1.0, 2.0]), jnp.array([0.9, 0.0])
    next_values, next_log_probs = jnp.array([[3.0, 5.0], [4.0, 6.0]]), jnp.array([-2.0, 7.0])
    targets = returns.soft_targets(rewards, discounts, next_values, next_log_probs, temperature=0.5)
    np.testing.assert_allclose(targets, [1.0 + 0.9 * (3.0 + 0.5 * 2.0), 2.0])


def test_twin_td_error_is_the_sum_of_half_the_squared_errors_of_both_critics():
    values = jnp.array([[1.0, 2.0], [3.0, 2.0]])
    np.testing.assert_allclose(losses.twin_td_error(values, jnp.array([2.0, 5.0])), [0.5 + 0.5, 4.5 + 4.5])


def test_no_gradient_flows_through_the_targets_of_twin_critics():
    grads = jax.grad(lambda targets: losses.twin_td_error(jnp.ones((2, 3)), targets).sum())(jnp.zeros(3))
    np.testing.assert_array_equal(grads, np.zeros(3))


def test_soft_policy_loss_matches_worked_example():
    loss = losses.soft_policy_loss(jnp.array([[3.0], [4.0]]), jnp.array([-2.0]), 0.5)
    np.testing.assert_allclose(loss, [0.5 * -2.0 - 3.0])


@pytest.mark.parametrize(("log_prob", "sign"), [(3.0, -1.0), (1.0, 1.0)])
def test_temperature_rises_if_the_entropy_is_too_low(log_prob, sign):
    def loss(log_temperature):
        return losses.temperature_loss(log_temperature, jnp.array([log_prob]), -2.0).sum()

    np.testing.assert_allclose(loss(jnp.log(0.5)), -0.5 * (log_prob - 2.0), rtol=1e-6)
    # an entropy of -3 nats is below -2, so gradient descent raises the temperature
    assert np.sign(jax.grad(loss)(jnp.float32(0.0))) == sign


def test_target_smoothing_clips_the_noise_and_then_the_action():
    action, noise = jnp.array([0.9, 0.0, -0.8]), jnp.array([0.3, -0.9, 0.1])
    np.testing.assert_allclose(td3.smoothed_action(action, noise, clip=0.5), [1.0, -0.5, -0.7], rtol=1e-6)


def test_error_names_the_array_of_wrong_shape():
    two, three = np.ones(2), np.ones(3)
    for name, call in {
        r"mask must be \[...\] with ... = 2; got \[3\]": lambda: losses.masked_mean(two, three),
        r"advantage must be \[...\]": lambda: losses.clipped_surrogate(two, three, 0.2),
        r"target must be \[...\]": lambda: losses.value_error(two, two, three, None),
        r"values must be \[2, B\] with B = 3; got \[3\]": lambda: losses.soft_policy_loss(three, three, 1.0),
        r"log_probs must be \[B\].*; got \[2, 2\]": lambda: losses.temperature_loss(0.0, np.ones((2, 2)), 1.0),
        r"next_values must be \[2, B\] with B = 3": lambda: returns.soft_targets(three, three, three, three, 1.0),
        r"targets must be \[B\] with B = 3; got \[2\]": lambda: losses.twin_td_error(np.ones((2, 3)), two),
        r"probabilities must be \[B\].*; got \[2, 2\]": lambda: off_policy.importance_weights(np.ones((2, 2)), 1.0),
        r"mask must be \[T, B\]": lambda: off_policy.sequence_priorities(np.ones((4, 2)), np.ones((2, 4)), 0.9),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
