"""Tests of DQN's heads: the losses match worked examples and rlax. test_dqn.py tests learning with these heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents.dqn_heads import Categories, Expectation, Quantiles
from rlframe.errors import UsageError

HEADS = [Expectation(), Quantiles(3), Categories(3)]


def inputs(size, rows=32):
    """Return (outputs, reward, discount, next outputs) of `rows` actions. Every fifth episode has terminated."""
    random = np.random.RandomState(0)
    outputs, following = (random.randn(rows, size).astype(np.float32) for _ in range(2))
    discount = np.where(np.arange(rows) % 5 == 0, 0.0, 0.9).astype(np.float32)
    return outputs, random.randn(rows).astype(np.float32), discount, following


def test_expectation_agrees_with_rlax_td_learning(rlax):
    outputs, reward, discount, following = inputs(1)
    expected = jax.vmap(rlax.td_learning)(outputs[:, 0], reward, discount, following[:, 0])
    loss, priority = Expectation(0.5).loss(outputs, reward, discount, following)
    np.testing.assert_allclose(priority, np.abs(expected), rtol=1e-5)
    np.testing.assert_allclose(loss, rlax.huber_loss(expected, 0.5), rtol=1e-5)


def test_quantiles_agree_with_rlax(rlax):
    outputs, reward, discount, following = inputs(4)
    fractions = (jnp.arange(4) + 0.5) / 4
    targets = reward[:, None] + discount[:, None] * following
    expected = jax.vmap(rlax.quantile_regression_loss, (0, None, 0, None))(outputs, fractions, targets, 1.0)
    loss, priority = Quantiles(4, 1.0).loss(outputs, reward, discount, following)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_array_equal(priority, loss)


def test_probability_of_a_categorical_target_is_split_between_the_nearest_values():
    head, predicted = Categories(3, -1.0, 1.0), np.log([[0.25, 0.25, 0.5]])
    following = np.log([[0.2, 0.3, 0.5]])
    # The targets 0.25 + 0.5 z are -0.25, 0.25 and 0.75, with probabilities 0.2, 0.3 and 0.5.
    # The probability of each target is split between the two nearest values.
    target = np.array([0.2 * 0.25, 0.2 * 0.75 + 0.3 * 0.75 + 0.5 * 0.25, 0.3 * 0.25 + 0.5 * 0.75])
    expected = np.sum(target * np.log(target / [0.25, 0.25, 0.5]))
    found = head.loss(predicted, np.array([0.25]), np.array([0.5]), following)
    np.testing.assert_allclose(found.loss, [expected], rtol=1e-5)
    # A final reward of 3 is clipped to the highest value, 1. Its predicted probability is 0.5.
    found = head.loss(predicted, np.array([3.0]), np.array([0.0]), following)
    np.testing.assert_allclose(found.loss, [np.log(2.0)], rtol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_no_gradient_flows_through_the_target(head):
    outputs, reward, discount, following = inputs(head.size)
    slope = jax.grad(lambda *each: jnp.sum(head.loss(*each).loss), argnums=(0, 3))(outputs, reward, discount, following)
    assert np.any(slope[0] != 0.0)
    np.testing.assert_array_equal(slope[1], np.zeros_like(following))


@pytest.mark.parametrize("head", HEADS)
def test_error_names_the_array_of_wrong_shape(head):
    outputs, reward, discount, following = inputs(head.size)
    with pytest.raises(ValueError, match=r"discount must be \[B\] with B = 32; got \[31\]"):
        head.loss(outputs, reward, discount[1:], following)
    with pytest.raises(ValueError, match=r"next_outputs must be \[B, (1|N)\] .*got \[32, 7\]"):
        head.loss(outputs, reward, discount, np.ones((32, 7), np.float32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Expectation(0.0), "Expectation.huber_threshold must be above 0, got 0.0"),
        (lambda: Quantiles(0), "Quantiles.num_quantiles must be at least 1, got 0"),
        (lambda: Quantiles(8, -1.0), "Quantiles.huber_threshold must be above 0, got -1.0"),
        (lambda: Quantiles(8, None), "Quantiles.huber_threshold must be a number above 0, got None"),
        (lambda: Categories(1), "Categories.num_atoms must be at least 2, got 1"),
        (lambda: Categories(51, 1.0, 1.0), "Categories.value_min must be below value_max, and both must be finite"),
        (lambda: Categories(51, value_max=np.inf), "value_min must be below value_max, and both must be finite"),
    ],
)
def test_heads_with_invalid_options_are_rejected(make, message):
    with pytest.raises(UsageError, match=message):
        make()
