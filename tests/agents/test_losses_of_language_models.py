"""Tests that the losses of language models match worked examples and brute-force computations."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import losses

SCORES = np.float32([1, 0, 0, 1, 5, 2, 2, 7])
GROUP = np.int32([0, 0, 0, 0, 1, 1, 1, 2])


def test_advantages_are_normalized_within_the_group():
    """The groups have means 0.5 and 3, and standard deviations 0.5 and sqrt(2). A single sequence keeps its score."""
    root = np.sqrt(2)
    expected = [1, -1, -1, 1, root, -1 / root, -1 / root, 7]
    np.testing.assert_allclose(losses.group_advantages(SCORES, GROUP), expected, rtol=1e-4)


def test_advantages_without_normalization_are_scores_minus_their_mean():
    found = losses.group_advantages(SCORES, GROUP, normalize_std=False)
    np.testing.assert_allclose(found, [0.5, -0.5, -0.5, 0.5, 2, -1, -1, 7], rtol=1e-6)


@pytest.mark.parametrize("size", [3, 7, 8, 16])
def test_equal_scores_have_exactly_zero_advantage(size):
    scores = np.repeat(np.float32([0.1, 100.1, -12345.678]), size)
    found = losses.group_advantages(scores, np.repeat(np.arange(3, dtype=np.int32), size))
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e6, 1e30, 3e38])
def test_advantages_are_finite_for_scores_of_any_size(scale):
    """One group has the scores -1, 0 and 1, with mean 0 and deviation sqrt(2 / 3). Another group has one score."""
    scores, group = np.float32([-scale, 0, scale, scale]), np.int32([0, 0, 0, 1])
    spread = scale * np.sqrt(2 / 3)
    alone = min(scale, 1e6)
    expected = [*np.array([-scale, 0, scale]) / (spread + 1e-6), alone]
    np.testing.assert_allclose(losses.group_advantages(scores, group), expected, rtol=1e-5)
    plain = losses.group_advantages(scores, group, normalize_std=False)
    np.testing.assert_allclose(plain, [*np.clip([-scale, 0, scale], -2e6, 2e6), alone], rtol=1e-5)


def test_order_of_sequences_does_not_change_advantages():
    order = np.random.RandomState(0).permutation(len(SCORES))
    found = losses.group_advantages(SCORES[order], GROUP[order])
    np.testing.assert_allclose(found, losses.group_advantages(SCORES, GROUP)[order], rtol=1e-5)


def test_token_weights_give_the_average_over_sequences_or_over_tokens():
    mask = np.float32([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    by_sequence = losses.token_weights(mask, "sequence")
    np.testing.assert_allclose(by_sequence, [[0.25, 0, 0.25], [0.5, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(losses.token_weights(mask, "token"), mask / 3)
    for average in ("sequence", "token"):
        np.testing.assert_array_equal(losses.token_weights(0 * mask, average), 0)


def test_log_ratio_is_zero_for_masked_tokens_and_clipped_for_others():
    found = losses.log_ratio(np.float32([-1, -500, -1, -500]), np.float32([-3, 0, -500, -1]), np.array([1, 0, 1, 1]))
    np.testing.assert_allclose(found, [2, 0, 20, -20])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.0),  # within clip_high
        (1.5, 2.0, -2.6, 0.0),  # clipped to 1.3
        (0.5, 2.0, -1.0, -2.0),  # not clipped, because the objective is lower without clipping
        (0.5, -2.0, 1.6, 0.0),  # clipped to 0.8
        (1.5, -2.0, 3.0, 2.0),
        (4.0, -2.0, 6.0, 0.0),  # above ratio_cap
    ],
)
def test_clipped_surrogate_matches_worked_examples(ratio, advantage, loss, slope):
    found, gradient = jax.value_and_grad(losses.clipped_surrogate)(ratio, advantage, 0.2, 0.3, 3.0)
    np.testing.assert_allclose((found, gradient), (loss, slope), rtol=1e-6)
    is_clipped = losses.is_clipped(jnp.float32(ratio), jnp.float32(advantage), 0.2, 0.3)
    assert is_clipped == (slope == 0 and ratio < 3)


def test_policy_gradient_is_weighted_by_the_ratio_up_to_its_cap():
    def loss(log_prob, sampled):
        ratio = jnp.exp(log_prob - sampled)
        return losses.importance_weighted_policy_gradient(log_prob, ratio, 2.0, ratio_cap=3.0)

    np.testing.assert_allclose(jax.grad(loss)(-1.0, -1.5), -2 * np.exp(0.5), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(-1.0, -4.0), -2 * 3.0, rtol=1e-6)


def test_mean_of_the_k3_estimate_is_the_kl_divergence():
    p, q = np.float32([0.5, 0.3, 0.2]), np.float32([0.1, 0.6, 0.3])
    each = losses.kl_k3(np.log(p / q))
    assert (np.asarray(each) >= 0).all()
    np.testing.assert_allclose(np.sum(p * each), np.sum(p * np.log(p / q)), rtol=1e-5)
    np.testing.assert_allclose(losses.kl_k3(jnp.log(2.0)), 0.5 - 1 + np.log(2), rtol=1e-5)


def test_preference_loss_is_the_mean_over_pairs_in_a_group_with_different_scores():
    rewards = np.random.RandomState(1).randn(len(SCORES)).astype(np.float32)
    margins = [
        rewards[i] - rewards[j]
        for i, j in itertools.product(range(len(SCORES)), repeat=2)
        if GROUP[i] == GROUP[j] and SCORES[i] > SCORES[j]
    ]
    assert len(margins) == 4 + 2
    loss, accuracy = losses.preference_loss(rewards, SCORES, GROUP)
    np.testing.assert_allclose(loss, np.mean([np.log(1 + np.exp(-margin)) for margin in margins]), rtol=1e-5)
    np.testing.assert_allclose(accuracy, np.mean(np.array(margins) > 0), rtol=1e-6)


def test_preference_loss_without_pairs_is_zero():
    loss, accuracy = losses.preference_loss(np.float32([1, 2]), np.float32([3, 3]), np.int32([0, 0]))
    assert (loss, accuracy) == (0, 0)
