"""Tests of distributions: samples follow the probabilities, and actions stay within the action spec."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe.agents.distributions import (
    ActionRange,
    Categorical,
    ClippedGaussian,
    MultiCategorical,
    SquashedGaussian,
    default_distribution,
)
from rlframe.errors import UsageError
from tests.extras import import_or_skip

RNG = jax.random.PRNGKey(0)


@pytest.fixture(scope="module")
def distrax():
    """Import distrax only in tests that use it, because distrax imports TensorFlow, which takes two seconds."""
    return import_or_skip("distrax", "pip install 'rlframe[test]'")


def box(low, high, shape=(1,)):
    return specs.BoundedArray(shape, np.float32, low, high)


def test_samples_of_categorical_follow_the_probabilities():
    logits = jnp.log(jnp.array([0.2, 0.5, 0.3]))
    samples = Categorical(3).sample(RNG, jnp.tile(logits, (20_000, 1)))
    np.testing.assert_allclose(np.bincount(samples) / 20_000, [0.2, 0.5, 0.3], atol=0.015)
    assert samples.dtype == jnp.int32


@pytest.mark.parametrize("excluded", [0, 1, 2])
def test_categorical_never_samples_an_action_with_zero_probability(excluded):
    logits = jnp.zeros((10_000, 3)).at[:, excluded].set(-jnp.inf)
    assert excluded not in np.asarray(Categorical(3).sample(RNG, logits))


@pytest.mark.system
def test_categorical_agrees_with_distrax(distrax):
    logits, actions = jax.random.normal(RNG, (7, 4)), jnp.array([0, 1, 2, 3, 0, 1, 2])
    ours, oracle = Categorical(4), distrax.Categorical(logits)
    np.testing.assert_allclose(ours.log_prob(logits, actions), oracle.log_prob(actions), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(logits), oracle.entropy(), rtol=1e-5)
    np.testing.assert_array_equal(ours.mode(logits), oracle.mode())


@pytest.mark.system
@pytest.mark.system
def test_multi_categorical_is_the_product_of_categorical_distributions(distrax):
    policy, logits = MultiCategorical((2, 3)), jax.random.normal(RNG, (6, 5))
    samples = policy.sample(RNG, logits)
    assert samples.shape == (6, 2) and samples.dtype == jnp.int32
    first, second = distrax.Categorical(logits[:, :2]), distrax.Categorical(logits[:, 2:])
    expected = first.log_prob(samples[:, 0]) + second.log_prob(samples[:, 1])
    np.testing.assert_allclose(policy.log_prob(logits, samples), expected, rtol=1e-5)
    np.testing.assert_allclose(policy.entropy(logits), first.entropy() + second.entropy(), rtol=1e-5)
    np.testing.assert_array_equal(policy.mode(logits), jnp.stack([first.mode(), second.mode()], axis=-1))


def test_multi_categorical_choices_are_independent():
    samples = np.asarray(MultiCategorical((2, 2)).sample(RNG, jnp.zeros((20_000, 4))))
    np.testing.assert_allclose(np.mean(samples[:, 0] == samples[:, 1]), 0.5, atol=0.015)


@pytest.mark.system
def test_gaussian_agrees_with_distrax(distrax):
    policy = ClippedGaussian(box(-1.0, 1.0, (2,)))
    params = jnp.array([[0.3, -0.2, 0.1, -0.7], [1.0, 2.0, 0.0, 0.5]])
    oracle = distrax.MultivariateNormalDiag(params[:, :2], jnp.exp(params[:, 2:]))
    samples = policy.sample(RNG, params)
    np.testing.assert_allclose(policy.log_prob(params, samples), oracle.log_prob(samples), rtol=1e-5)
    np.testing.assert_allclose(policy.entropy(params), oracle.entropy(), rtol=1e-5)
    np.testing.assert_allclose(policy.mode(params), params[:, :2])


def test_gaussian_samples_have_the_given_mean_and_deviation():
    samples = ClippedGaussian(box(-1.0, 1.0)).sample(RNG, jnp.tile(jnp.array([0.5, jnp.log(2.0)]), (20_000, 1)))
    np.testing.assert_allclose([samples.mean(), samples.std()], [0.5, 2.0], atol=0.05)


def test_gaussian_actions_are_scaled_and_clipped_to_the_bounds():
    policy = ClippedGaussian(box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), (2,)))
    actions = policy.to_action(jnp.array([[0.5, 0.0], [-7.0, 7.0]]))
    np.testing.assert_allclose(actions, [[1.0, 5.0], [-2.0, 10.0]])


def test_gaussian_samples_are_not_scaled_if_the_box_is_unbounded():
    policy = ClippedGaussian(box(-np.inf, np.inf))
    np.testing.assert_allclose(policy.to_action(jnp.array([[123.0]])), [[123.0]])


def test_gaussian_actions_may_have_two_axes():
    policy = ClippedGaussian(box(-1.0, 1.0, (2, 3)))
    assert policy.num_params == 12
    assert policy.to_action(policy.sample(RNG, jnp.zeros((4, 12)))).shape == (4, 2, 3)


def test_default_distribution_depends_on_the_action_spec():
    assert isinstance(default_distribution(specs.DiscreteArray(3)), Categorical)
    multi = default_distribution(specs.BoundedArray((2,), np.int32, 0, np.array([1, 4])))
    assert isinstance(multi, MultiCategorical) and multi.num_params == 7
    assert isinstance(default_distribution(box(-1.0, 1.0)), ClippedGaussian)


@pytest.mark.parametrize(
    "spec",
    [specs.Array((3,), np.int32, "move"), {"a": specs.DiscreteArray(2)}, specs.BoundedArray((2,), np.int8, -5, 5)],
)
def test_unsupported_action_specs_are_rejected(spec):
    with pytest.raises(UsageError, match=r"No policy for the action spec .*`start=`.*policy_factory"):
        default_distribution(spec)


@pytest.mark.parametrize("maximum", [1, np.array([[1, 2], [3, 4]])])
def test_error_about_integer_actions_with_several_axes_suggests_a_fix(maximum):
    with pytest.raises(UsageError, match=r"of shape \(2, 2\): expected a MultiDiscrete of one axis.*nvec\.ravel\(\)"):
        default_distribution(specs.BoundedArray((2, 2), np.int32, 0, maximum, "action"))


@pytest.mark.system
def test_squashed_gaussian_agrees_with_distrax(distrax):
    # small values, because distrax loses precision in the inverse of tanh for large values
    params = 0.3 * jax.random.normal(RNG, (6, 4))
    policy = SquashedGaussian(box([-1.0, -1.0], [1.0, 1.0], (2,)))
    samples = policy.sample(RNG, params)
    gaussian = distrax.MultivariateNormalDiag(params[:, :2], jnp.exp(params[:, 2:]))
    oracle = distrax.Transformed(gaussian, distrax.Block(distrax.Tanh(), 1))
    np.testing.assert_allclose(policy.log_prob(params, samples), oracle.log_prob(jnp.tanh(samples)), rtol=1e-4)


def test_squashed_gaussian_matches_worked_example():
    policy = SquashedGaussian(box(0.0, 4.0))
    params, sample = jnp.array([[0.0, 0.0]]), jnp.array([[1.0]])
    slope = 1.0 - np.tanh(1.0) ** 2
    expected = -0.5 - 0.5 * np.log(2 * np.pi) - np.log(slope)
    np.testing.assert_allclose(policy.log_prob(params, sample), [expected], rtol=1e-6)
    np.testing.assert_allclose(policy.to_action(sample), [[2.0 + 2.0 * np.tanh(1.0)]], rtol=1e-6)


def test_squashed_gaussian_has_finite_log_probabilities_and_gradients_where_tanh_rounds_to_one():
    policy = SquashedGaussian(box(-1.0, 1.0))
    assert np.tanh(np.float32(20.0)) == 1.0

    def log_prob(sample):
        return policy.log_prob(jnp.zeros((1, 2)), sample.reshape(1, 1))[0]

    for sample in (20.0, -20.0):
        # this is log N(20) + 2 (20 - log 2), because the slope of tanh at 20 is 4 exp(-40)
        np.testing.assert_allclose(log_prob(jnp.float32(sample)), -200.0 - 0.9189385 + 40.0 - 1.3862944, rtol=1e-5)
        assert np.isfinite(jax.grad(log_prob)(jnp.float32(sample)))


def test_squashed_gaussian_clips_its_standard_deviations():
    policy = SquashedGaussian(box(-1.0, 1.0), min_log_std=-5.0, max_log_std=2.0)
    for given, clipped in ((-9.0, -5.0), (9.0, 2.0)):
        params, clipped_params = jnp.array([[0.3, given]]), jnp.array([[0.3, clipped]])
        np.testing.assert_array_equal(policy.sample(RNG, params), policy.sample(RNG, clipped_params))


def test_conversion_between_actions_and_units_is_invertible():
    actions = ActionRange(box([[-2.0], [0.0]], [[2.0], [1.0]], (2, 1)))
    units = jnp.array([[-1.0, 1.0], [0.5, 0.0]])
    np.testing.assert_allclose(actions.to_action(units)[:, :, 0], [[-2.0, 1.0], [1.0, 0.5]])
    np.testing.assert_allclose(actions.to_units(actions.to_action(units)), units)


@pytest.mark.parametrize("spec", [box(-np.inf, np.inf), box(0.0, np.inf), box(1.0, 1.0), specs.DiscreteArray(3)])
def test_squashed_gaussian_rejects_unbounded_actions(spec):
    with pytest.raises(UsageError, match=r"A SquashedGaussian needs (actions with a lower bound|continuous actions)"):
        SquashedGaussian(spec)
