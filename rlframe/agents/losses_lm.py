"""The mathematics of training language models on scored sequences: pure functions on arrays, without networks.

Everything `[S, T]` is of S sequences and of the T tokens that a model predicts; `mask` is 1 where one is trained on.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

Average = Literal["sequence", "token"]

LARGEST_ADVANTAGE = 1e6  # with it the squares of gradients fit float32 for every ratio
_LARGEST_LOG = 20.0  # exp of more says nothing, and overflows


def group_advantages(
    scores: jax.Array, group: jax.Array, *, normalise_std: bool = True, epsilon: float = 1e-6
) -> jax.Array:
    """How much better than its group each sequence is (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    Args:
        scores: [S] float32, any finite ones.
        group: [S] int32, in [0, S): the group of each.
        normalise_std: divide by the group's standard deviation (of the population). Without, questions that are all
            but solved, or hardly ever, weigh no more than others (Liu et al. 2025, arXiv:2503.20783, Dr. GRPO).
        epsilon: added to the standard deviation.

    Returns:
        [S] float32: 0 in a group whose scores are equal. A group of one keeps its score, which has nothing to be
        compared with. All are finite.
    """
    count = jax.ops.segment_sum(jnp.ones_like(scores), group, len(scores))[group]

    def mean(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, group, len(x))[group] / count

    # Divide each score by its group's spread first: so large scores keep their precision. Halve the scores, because the
    # spread of the largest float32 numbers would overflow.
    half = 0.5 * scores
    lowest = jax.ops.segment_min(half, group, len(half))[group]
    spread = jax.ops.segment_max(half, group, len(half))[group] - lowest
    divisor = jnp.where(spread > 0, spread, 1.0)
    parts = (half - lowest) / divisor
    centred = parts - mean(parts)
    if normalise_std:
        advantages = centred / (jnp.sqrt(mean(jnp.square(centred))) + 0.5 * epsilon / divisor)
    else:
        advantages = 2.0 * jnp.clip(centred * spread, -LARGEST_ADVANTAGE, LARGEST_ADVANTAGE)
    return jnp.where(count > 1, advantages, jnp.clip(scores, -LARGEST_ADVANTAGE, LARGEST_ADVANTAGE))


def token_weights(mask: jax.Array, average: Average) -> jax.Array:
    """The weight `[S, T]` of each token in a mean: they sum to 1 (to 0 where nothing is trained on).

    Args:
        mask: [S, T] float32.
        average: "sequence" is the mean over sequences of each one's mean over its tokens (Shao et al. 2024), "token"
            the mean over all tokens, in which long sequences count more (Yu et al. 2025, arXiv:2503.14476, DAPO).
    """
    if average == "token":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    tokens = jnp.sum(mask, axis=1, keepdims=True)
    return mask / jnp.maximum(tokens, 1.0) / jnp.maximum(jnp.sum(tokens > 0), 1)


def log_ratio(log_probs: jax.Array, others: jax.Array, mask: jax.Array) -> jax.Array:
    """log(p / q) `[S, T]` of log-probabilities, 0 where the mask is, and within what `exp` can take."""
    return jnp.clip(jnp.where(mask > 0, log_probs - others, 0.0), -_LARGEST_LOG, _LARGEST_LOG)


def is_clipped(ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float) -> jax.Array:
    """Whether `clipped_surrogate` has no gradient for the clip, elementwise: 1 or 0, float32."""
    up = (advantages > 0) & (ratio > 1.0 + clip_high)
    down = (advantages < 0) & (ratio < 1.0 - clip_low)
    return (up | down).astype(jnp.float32)


def corrected_policy_gradient(
    log_probs: jax.Array, ratio: jax.Array, advantages: jax.Array, ratio_cap: float | None = None
) -> jax.Array:
    """Minus advantage times log-probability, elementwise, weighted for what another policy sampled.

    The importance weight is the ratio of the two policies, at most `ratio_cap` (Espeholt et al. 2018, without the
    trace); no gradient flows through it.
    """
    weight = ratio if ratio_cap is None else jnp.minimum(ratio, ratio_cap)
    return -jax.lax.stop_gradient(weight) * advantages * log_probs


def kl_k3(log_ratio_to_reference: jax.Array) -> jax.Array:
    """Each token's estimate of KL(policy || reference), at least 0 (Schulman 2020, "k3"; Shao et al. 2024, equation 4).

    Takes log(policy / reference); unbiased where the policy sampled.
    """
    return jnp.expm1(-log_ratio_to_reference) + log_ratio_to_reference


def preference_loss(rewards: jax.Array, scores: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
    """DPO over all pairs of a group whose scores differ (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    Args:
        rewards: [S] float32, implicit: beta times log(policy / reference) of the sequence.
        scores: [S] float32: the higher of a pair is preferred.
        group: [S] int32.

    Returns:
        (the mean over the pairs of -log sigmoid(difference of rewards), 0 where there is no pair; the share of pairs
        that the policy has in the right order).
    """
    pairs = ((group[:, None] == group) & (scores[:, None] > scores)).astype(jnp.float32)
    margins = rewards[:, None] - rewards
    count = jnp.maximum(jnp.sum(pairs), 1.0)
    return -jnp.sum(pairs * jax.nn.log_sigmoid(margins)) / count, jnp.sum(pairs * (margins > 0)) / count
