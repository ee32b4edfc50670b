"""Losses that several agents share, and those of language models: pure functions on arrays.

The targets of values are in `returns`, the losses of DQN's heads in `dqn_heads`.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rlframe.agents.trees import check_shapes

Average = Literal["sequence", "token"]

LARGEST_ADVANTAGE = 1e6  # with it the squares of gradients fit float32 for every ratio
_LARGEST_LOG = 20.0  # exp of more says nothing, and overflows


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `x` where `mask` is 1; 0 where it is 1 nowhere."""
    check_shapes(x=(x, "..."), mask=(mask, "..."))
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def normalize(x: jax.Array, mask: jax.Array, epsilon: float = 1e-8) -> jax.Array:
    """`x` less its mean, over its standard deviation, both where `mask` is 1.

    The epsilon is that of OpenAI Baselines (`baselines/ppo2/model.py`).
    """
    centered = x - masked_mean(x, mask)
    return centered / (jnp.sqrt(masked_mean(jnp.square(centered), mask)) + epsilon)


def clipped_surrogate(
    ratio: jax.Array,
    advantage: jax.Array,
    clip_low: jax.Array | float,
    clip_high: jax.Array | float | None = None,
    ratio_cap: float | None = None,
) -> jax.Array:
    """Minus the clipped surrogate objective (Schulman et al. 2017, equation 7), elementwise.

    Args:
        ratio: of the policy to the one that acted.
        advantage: of the same shape.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; a larger `clip_high` lets unlikely
            actions grow (Yu et al. 2025, arXiv:2503.14476, "clip-higher"). None: as `clip_low`.
        ratio_cap: an action with a negative advantage whose ratio is larger teaches nothing (Ye et al. 2020,
            arXiv:1912.09729, "dual clip"); None: there is no such ratio.
    """
    check_shapes(ratio=(ratio, "..."), advantage=(advantage, "..."))
    if ratio_cap is not None:
        ratio = jnp.minimum(ratio, ratio_cap)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + (clip_low if clip_high is None else clip_high))
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def value_error(value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float | None) -> jax.Array:
    """Half the squared error of a value, elementwise.

    With `clip`, the larger of that and the error of the value held within `clip` of the old one
    (`baselines/ppo2/model.py`).
    """
    check_shapes(value=(value, "..."), old_value=(old_value, "..."), target=(target, "..."))
    error = jnp.square(value - target)
    if clip is not None:
        clipped = old_value + jnp.clip(value - old_value, -clip, clip)
        error = jnp.maximum(error, jnp.square(clipped - target))
    return 0.5 * error


def huber(error: jax.Array, threshold: float | None) -> jax.Array:
    """Half the square of `error` up to the threshold, linear beyond it; None: the square alone."""
    if threshold is None:
        return 0.5 * jnp.square(error)
    size = jnp.abs(error)
    inner = jnp.minimum(size, threshold)
    return 0.5 * jnp.square(inner) + threshold * (size - inner)


def twin_td_error(values: jax.Array, targets: jax.Array) -> jax.Array:
    """[B]: half the squared errors of both critics, added (Haarnoja et al. 2018, equation 5; Fujimoto et al. 2018).

    Args:
        values: [2, B], one row for each critic.
        targets: [B], the same for both; no gradient flows through them.
    """
    check_shapes(values=(values, "2 B"), targets=(targets, "B"))
    return 0.5 * jnp.sum(jnp.square(values - jax.lax.stop_gradient(targets)), axis=0)


def soft_policy_loss(values: jax.Array, log_probs: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """[B]: what the policy is to lower (Haarnoja et al. 2018, equation 7).

    Args:
        values: [2, B], of the critics for the policy's own action; gradients flow through the action.
        log_probs: [B], of that action.
        temperature: [], what entropy is worth.
    """
    check_shapes(log_probs=(log_probs, "B"), values=(values, "2 B"))
    return temperature * log_probs - jnp.min(values, axis=0)


def temperature_loss(log_temperature: jax.Array, log_probs: jax.Array, target_entropy: float) -> jax.Array:
    """[B]: it rises with the temperature where the entropy is above its target (Haarnoja et al. 2018, equation 18)."""
    check_shapes(log_temperature=(log_temperature, ""), log_probs=(log_probs, "B"))
    return -jnp.exp(log_temperature) * jax.lax.stop_gradient(log_probs + target_entropy)


# --- language models that learn from scored sequences. Everything `[S, T]` is of S sequences and of the T tokens that a
# model predicts; `mask` is 1 where one is trained on.


def group_advantages(
    scores: jax.Array, group: jax.Array, *, normalize_std: bool = True, epsilon: float = 1e-6
) -> jax.Array:
    """How much better than its group each sequence is (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    Args:
        scores: [S] float32, any finite ones.
        group: [S] int32, in [0, S): the group of each.
        normalize_std: divide by the group's standard deviation (of the population). Without, questions that are all
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
    centered = parts - mean(parts)
    if normalize_std:
        advantages = centered / (jnp.sqrt(mean(jnp.square(centered))) + 0.5 * epsilon / divisor)
    else:
        advantages = 2.0 * jnp.clip(centered * spread, -LARGEST_ADVANTAGE, LARGEST_ADVANTAGE)
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
    """Return 1.0 where the clip of `clipped_surrogate` removes the gradient, else 0.0, elementwise."""
    up = (advantages > 0) & (ratio > 1.0 + clip_high)
    down = (advantages < 0) & (ratio < 1.0 - clip_low)
    return (up | down).astype(jnp.float32)


def importance_weighted_policy_gradient(
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
