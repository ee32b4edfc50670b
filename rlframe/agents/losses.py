"""Losses that several agents share: pure functions on arrays. Their targets are in `returns` and `critics`."""

from __future__ import annotations

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
