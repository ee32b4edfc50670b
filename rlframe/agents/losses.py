"""Losses that several agents share: pure functions on arrays. Their targets are in `returns` and `critics`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlframe.agents.trees import check_shapes


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `x` where `mask` is 1; 0 where it is 1 nowhere."""
    check_shapes(x=(x, "..."), mask=(mask, "..."))
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def normalise(x: jax.Array, mask: jax.Array, epsilon: float = 1e-8) -> jax.Array:
    """`x` less its mean, over its standard deviation, both where `mask` is 1.

    The epsilon is that of OpenAI Baselines (`baselines/ppo2/model.py`).
    """
    centred = x - masked_mean(x, mask)
    return centred / (jnp.sqrt(masked_mean(jnp.square(centred), mask)) + epsilon)


def clipped_surrogate(ratio: jax.Array, advantage: jax.Array, clip_epsilon: jax.Array | float) -> jax.Array:
    """Minus the clipped surrogate objective (Schulman et al. 2017, equation 7), elementwise."""
    check_shapes(ratio=(ratio, "..."), advantage=(advantage, "..."))
    clipped = jnp.clip(ratio, 1.0 - clip_epsilon, 1.0 + clip_epsilon)
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


def td_errors(
    values: jax.Array,
    actions: jax.Array,
    rewards: jax.Array,
    discounts: jax.Array,
    next_values: jax.Array,
    next_selectors: jax.Array,
) -> jax.Array:
    """Errors of one- or n-step Q-learning (Mnih et al. 2015), double where the selectors differ.

    Args:
        values: [B, A], of the observation.
        actions: [B] integers.
        rewards: [B], summed over the n steps.
        discounts: [B], gamma to the n; 0 where the episode terminated.
        next_values: [B, A], of the target network n steps later.
        next_selectors: [B, A], whose largest picks the next action: `next_values` themselves, or
            the online network's (van Hasselt et al. 2016).

    Returns:
        [B]: target minus value. No gradient flows through the target.
    """
    next_actions = jnp.argmax(next_selectors, axis=-1)
    next_value = jnp.take_along_axis(next_values, next_actions[:, None], axis=-1)[:, 0]
    target = jax.lax.stop_gradient(rewards + discounts * next_value)
    return target - jnp.take_along_axis(values, actions[:, None].astype(jnp.int32), axis=-1)[:, 0]


def quantile_errors(
    quantiles: jax.Array,
    actions: jax.Array,
    rewards: jax.Array,
    discounts: jax.Array,
    next_quantiles: jax.Array,
    next_selectors: jax.Array,
    threshold: float,
) -> jax.Array:
    """Losses of quantile regression (Dabney et al. 2018, arXiv:1710.10044, algorithm 1).

    Huber's loss is divided by its threshold, as in IQN (arXiv:1806.06923); at the usual 1 it is the same.

    Args:
        quantiles: [B, A, N], of the return, for the observation.
        actions, rewards, discounts: [B] each, as of `td_errors`.
        next_quantiles: [B, A, N], of the target network n steps later.
        next_selectors: [B, A], whose largest picks the next action.
        threshold: kappa, where the squared error becomes linear; above 0.

    Returns:
        [B]: summed over the quantiles, the mean over their targets. No gradient flows through the targets.
    """

    following = _of_action(next_quantiles, jnp.argmax(next_selectors, axis=-1))
    targets = jax.lax.stop_gradient(rewards[:, None] + discounts[:, None] * following)
    errors = targets[:, None, :] - _of_action(quantiles, actions)[:, :, None]  # [B, N of the values, N of the targets]
    count = quantiles.shape[-1]
    shares = (jnp.arange(count, dtype=jnp.float32) + 0.5) / count
    weights = jnp.abs(shares[:, None] - (errors < 0.0))
    return jnp.sum(jnp.mean(weights * huber(errors, threshold) / threshold, axis=2), axis=1)


def categorical_errors(
    logits: jax.Array,
    actions: jax.Array,
    rewards: jax.Array,
    discounts: jax.Array,
    next_logits: jax.Array,
    next_selectors: jax.Array,
    support: jax.Array,
) -> jax.Array:
    """Losses of a categorical return (Bellemare et al. 2017, arXiv:1707.06887, algorithm 1).

    Args:
        logits: [B, A, N], of the chances of the values in `support`, for the observation.
        actions, rewards, discounts: [B] each, as of `td_errors`.
        next_logits: [B, A, N], of the target network n steps later.
        next_selectors: [B, A], whose largest picks the next action.
        support: [N], values in equal distances, increasing.

    Returns:
        [B]: the divergence KL(target || prediction), which is the algorithm's cross-entropy less what no gradient
        flows through: 0 where they agree. The target's chances beyond the support are at its ends.
    """
    following = jax.nn.softmax(_of_action(next_logits, jnp.argmax(next_selectors, axis=-1)))
    targets = jnp.clip(rewards[:, None] + discounts[:, None] * support, support[0], support[-1])
    # Each target's chance goes to the two values around it, in proportion to how near they are.
    distances = jnp.abs(targets[:, None, :] - support[:, None]) / (support[1] - support[0])  # [B, N values, N targets]
    projected = jnp.sum(jnp.clip(1.0 - distances, 0.0, 1.0) * following[:, None, :], axis=2)
    projected = jax.lax.stop_gradient(projected)
    log_chances = jax.nn.log_softmax(_of_action(logits, actions))
    return jnp.sum(jax.scipy.special.xlogy(projected, projected) - projected * log_chances, axis=1)


def _of_action(values: jax.Array, action: jax.Array) -> jax.Array:
    """[B, N] of values [B, A, N] and actions [B]."""
    return jnp.take_along_axis(values, action[:, None, None].astype(jnp.int32), axis=1)[:, 0]


def munchausen_errors(
    values: jax.Array,
    actions: jax.Array,
    rewards: jax.Array,
    discounts: jax.Array,
    target_values: jax.Array,
    next_target_values: jax.Array,
    *,
    scale: float,
    temperature: float,
    clip: float,
) -> jax.Array:
    """Errors of Munchausen DQN (Vieillard et al. 2020, equation 3), whose policy is softmax(values / temperature).

    Args:
        values: [B, A], of the observation.
        actions: [B] integers.
        rewards: [B], of one step.
        discounts: [B], gamma; 0 where the episode terminated.
        target_values: [B, A], of the target network for the observation.
        next_target_values: [B, A], of the target network for the next one.
        scale: alpha, of the bonus for actions that the policy likes.
        temperature: tau.
        clip: l_0: the lowest temperature * log-probability in the bonus.

    Returns:
        [B]: target minus value. No gradient flows through the target.
    """
    index = actions[:, None].astype(jnp.int32)
    log_policy = temperature * jax.nn.log_softmax(target_values / temperature)
    bonus = jnp.clip(jnp.take_along_axis(log_policy, index, axis=-1)[:, 0], clip, 0.0)
    # The policy's mean of value - temperature * log-probability, in closed form.
    soft_value = temperature * jax.nn.logsumexp(next_target_values / temperature, axis=-1)
    target = jax.lax.stop_gradient(rewards + scale * bonus + discounts * soft_value)
    return target - jnp.take_along_axis(values, index, axis=-1)[:, 0]


def action_values(outputs: Any) -> jax.Array:
    """[..., A] of what a network gives: the values, alone or in a tuple, or (advantages, value), which are dueling."""
    if not isinstance(outputs, (tuple, list)):
        return outputs
    return dueling_values(*outputs) if len(outputs) == 2 else outputs[0]


def dueling_values(advantages: jax.Array, value: jax.Array) -> jax.Array:
    """[..., A] from advantages [..., A] and a value [..., 1] or [...] (Wang et al. 2016, equation 9)."""
    value = value.reshape(*advantages.shape[:-1], 1)
    return value + advantages - jnp.mean(advantages, axis=-1, keepdims=True)


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
