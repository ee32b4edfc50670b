"""Pure functions that compute losses: losses of several agents, and losses of language models.

The targets of value losses are in the module `returns`. The losses of DQN's heads are in the module `dqn_heads`.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from rlframe.agents.trees import check_shapes

Average = Literal["sequence", "token"]

LARGEST_ADVANTAGE = 1e6  # Within this limit, squared gradients fit into float32 for every probability ratio.
_LARGEST_LOG = 20.0  # larger log ratios give no more information, and `exp` would overflow


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the mean of `x` where `mask` is 1, or 0 if `mask` is 0 everywhere."""
    check_shapes(x=(x, "..."), mask=(mask, "..."))
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def normalize(x: jax.Array, mask: jax.Array, epsilon: float = 1e-8) -> jax.Array:
    """Return `x` minus its mean, divided by its standard deviation. Both statistics only use `x` where `mask` is 1.

    The default epsilon is from OpenAI Baselines (`baselines/ppo2/model.py`).
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
    """Return minus the clipped surrogate objective (Schulman et al. 2017, equation 7), elementwise.

    Args:
        ratio: probability ratio of the policy to the policy that acted.
        advantage: advantages with the same shape.
        clip_low: lower clip range. The ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: upper clip range. With a larger value than `clip_low`, unlikely actions can become more likely
            (Yu et al. 2025, arXiv:2503.14476, "clip-higher"). None uses `clip_low`.
        ratio_cap: upper limit of the ratio, which removes the gradient where the advantage is negative (Ye et al. 2020,
            arXiv:1912.09729, "dual clip"). None means no limit.
    """
    check_shapes(ratio=(ratio, "..."), advantage=(advantage, "..."))
    if ratio_cap is not None:
        ratio = jnp.minimum(ratio, ratio_cap)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + (clip_low if clip_high is None else clip_high))
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def value_error(value: jax.Array, old_value: jax.Array, target: jax.Array, clip: float | None) -> jax.Array:
    """Return half the squared error of a value, elementwise.

    With `clip`, clip the change from the old value to [-clip, clip], compute the error with and without clipping, and
    return the larger error (`baselines/ppo2/model.py`).
    """
    check_shapes(value=(value, "..."), old_value=(old_value, "..."), target=(target, "..."))
    error = jnp.square(value - target)
    if clip is not None:
        clipped = old_value + jnp.clip(value - old_value, -clip, clip)
        error = jnp.maximum(error, jnp.square(clipped - target))
    return 0.5 * error


def huber(error: jax.Array, threshold: float | None) -> jax.Array:
    """Return the Huber loss: quadratic up to the threshold, linear above it. With None, quadratic everywhere."""
    if threshold is None:
        return 0.5 * jnp.square(error)
    size = jnp.abs(error)
    inner = jnp.minimum(size, threshold)
    return 0.5 * jnp.square(inner) + threshold * (size - inner)


def twin_td_error(values: jax.Array, targets: jax.Array) -> jax.Array:
    """Return [B]: half the squared error, summed over two critics.

    See Haarnoja et al. 2018, equation 5, and Fujimoto et al. 2018.

    Args:
        values: [2, B], one row for each critic.
        targets: [B], the same for both critics. No gradient flows through them.
    """
    check_shapes(values=(values, "2 B"), targets=(targets, "B"))
    return 0.5 * jnp.sum(jnp.square(values - jax.lax.stop_gradient(targets)), axis=0)


def soft_policy_loss(values: jax.Array, log_probs: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """Return [B]: the policy loss of soft actor-critic (Haarnoja et al. 2018, equation 7).

    Args:
        values: [2, B], values of both critics for the current policy's action. Gradients flow through the action.
        log_probs: [B], log-probabilities of this action.
        temperature: [], weight of the entropy.
    """
    check_shapes(log_probs=(log_probs, "B"), values=(values, "2 B"))
    return temperature * log_probs - jnp.min(values, axis=0)


def temperature_loss(log_temperature: jax.Array, log_probs: jax.Array, target_entropy: float) -> jax.Array:
    """Return [B]: the loss of the temperature (Haarnoja et al. 2018, equation 18).

    Minimizing this loss lowers the temperature where the entropy is above `target_entropy`. Otherwise the temperature
    rises.
    """
    check_shapes(log_temperature=(log_temperature, ""), log_probs=(log_probs, "B"))
    return -jnp.exp(log_temperature) * jax.lax.stop_gradient(log_probs + target_entropy)


# --- losses of language models that learn from scored sequences. `mask` is 1 for tokens to train on.
# The axes `[S, T]` are S sequences and the T tokens that the model predicts.


def group_advantages(
    scores: jax.Array, group: jax.Array, *, normalize_std: bool = True, epsilon: float = 1e-6
) -> jax.Array:
    """Return the advantage of each sequence relative to its group (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    Args:
        scores: [S] float32, any finite scores.
        group: [S] int32 in [0, S), the group of each sequence.
        normalize_std: divide by the group's (population) standard deviation. If False, questions that are almost always
            or almost never solved get no extra weight (Liu et al. 2025, arXiv:2503.20783, Dr. GRPO).
        epsilon: added to the standard deviation.

    Returns:
        [S] float32, always finite. 0 in a group with equal scores. In a group with one sequence, the advantage is
        the score, because there is nothing to compare it with.
    """
    count = jax.ops.segment_sum(jnp.ones_like(scores), group, len(scores))[group]

    def mean(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, group, len(x))[group] / count

    # First divide each score by the range (max - min) of its group, so that large scores keep their precision.
    # Halve the scores before computing the range, because the range of very large float32 numbers would overflow.
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
    """Return the weight `[S, T]` of each token in a mean.

    The weights sum to 1, or to 0 if there is no token to train on.

    Args:
        mask: [S, T] float32.
        average: "sequence" averages over the tokens of each sequence, and then over sequences (Shao et al. 2024).
            "token" averages over all tokens, which gives long sequences more weight (Yu et al. 2025, arXiv:2503.14476,
            DAPO).
    """
    if average == "token":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    tokens = jnp.sum(mask, axis=1, keepdims=True)
    return mask / jnp.maximum(tokens, 1.0) / jnp.maximum(jnp.sum(tokens > 0), 1)


def log_ratio(log_probs: jax.Array, others: jax.Array, mask: jax.Array) -> jax.Array:
    """Return log(p / q) `[S, T]` from log-probabilities. It is 0 where the mask is 0.

    The result is clipped to a range in which `exp` is finite.
    """
    return jnp.clip(jnp.where(mask > 0, log_probs - others, 0.0), -_LARGEST_LOG, _LARGEST_LOG)


def is_clipped(
    ratio: jax.Array, advantages: jax.Array, clip_low: jax.Array | float, clip_high: jax.Array | float
) -> jax.Array:
    """Return 1.0 where the clipping in `clipped_surrogate` removes the gradient, otherwise 0.0. Elementwise."""
    up = (advantages > 0) & (ratio > 1.0 + clip_high)
    down = (advantages < 0) & (ratio < 1.0 - clip_low)
    return (up | down).astype(jnp.float32)


def importance_weighted_policy_gradient(
    log_probs: jax.Array, ratio: jax.Array, advantages: jax.Array, ratio_cap: float | None = None
) -> jax.Array:
    """Return minus the importance weight times advantage times log-probability, elementwise.

    The importance weight is the ratio of the two policies, limited to `ratio_cap` (Espeholt et al. 2018, without the
    trace). No gradient flows through the weight.
    """
    weight = ratio if ratio_cap is None else jnp.minimum(ratio, ratio_cap)
    return -jax.lax.stop_gradient(weight) * advantages * log_probs


def kl_k3(log_ratio_to_reference: jax.Array) -> jax.Array:
    """Return an estimate of KL(policy || reference) for each token, always at least 0.

    Args:
        log_ratio_to_reference: log(policy / reference). The estimate is unbiased if the policy sampled the tokens
            (Schulman 2020, "k3"; Shao et al. 2024, equation 4).
    """
    return jnp.expm1(-log_ratio_to_reference) + log_ratio_to_reference


def preference_loss(rewards: jax.Array, scores: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the DPO loss over all pairs in a group with different scores.

    See Rafailov et al. 2023, arXiv:2305.18290, equation 7.

    Args:
        rewards: [S] float32, implicit rewards: beta times log(policy / reference) of the sequence.
        scores: [S] float32. The sequence with the higher score is preferred.
        group: [S] int32.

    Returns:
        (loss, accuracy). The loss is the mean over pairs of -log sigmoid(difference of rewards), or 0 if there are no
        pairs. The accuracy is the fraction of pairs that the policy orders correctly.
    """
    pairs = ((group[:, None] == group) & (scores[:, None] > scores)).astype(jnp.float32)
    margins = rewards[:, None] - rewards
    count = jnp.maximum(jnp.sum(pairs), 1.0)
    return -jnp.sum(pairs * jax.nn.log_sigmoid(margins)) / count, jnp.sum(pairs * (margins > 0)) / count
