"""V-trace (Espeholt et al. 2018, arXiv:1802.01561, section 4.1): a policy's returns from the experience of another."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class VTrace(NamedTuple):
    """What is learned from; no gradient flows through it."""

    targets: jax.Array  # [T, ...] float32: v_s, the target of V(x_s)
    advantages: jax.Array  # [T, ...] float32: rho_s (q_s - V(x_s)), what the policy's gradient is multiplied by


def vtrace(
    values: jax.Array,
    rewards: jax.Array,
    discounts: jax.Array,
    rhos: jax.Array,
    mask: jax.Array,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lambda_: float = 1.0,
) -> VTrace:
    """V-trace targets and advantages, time first; what follows the time axis is mapped over.

    With rho_t = min(rho_bar, pi/mu) and c_t = lambda min(c_bar, pi/mu),

        delta_t = rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t))
        v_s     = V(x_s) + sum over t >= s of (gamma_s c_s ... gamma_{t-1} c_{t-1}) delta_t
        q_s     = r_s + gamma_s (lambda v_{s+1} + (1 - lambda) V(x_{s+1}))

    The paper's q_s is that of lambda = 1. Mixed like this (as in rlax), an on-policy advantage is the generalised
    advantage estimate for every lambda.

    A sequence may hold several episodes. At a step that the mask leaves out (its timestep was LAST) delta and c are 0,
    so the return before it bootstraps from V(LAST), as far as its discount says, and sees nothing of the next episode.

    Args:
        values: [T + 1, ...] float32, V of timestep t; the last one bootstraps.
        rewards: [T, ...] float32, of action t.
        discounts: [T, ...] float32, gamma times the discount of timestep t + 1: 0 where the environment terminated.
        rhos: [T, ...] float32, pi(a_t | x_t) / mu(a_t | x_t): the learner's policy over the one that acted.
        mask: [T, ...] float32, 0 where the environment ignored action t, else 1.
        rho_bar: where rho is clipped; decides which policy the values are of (infinite: pi's own).
        c_bar: where c is clipped, at most rho_bar; decides how fast they get there, and the variance.
        lambda_: 1 for returns to the sequence's end, 0 for one step.

    Returns:
        See `VTrace`. Where the mask is 0 the target is the value and the advantage 0.

    Raises:
        AssertionError: the shapes do not match.
    """
    chex.assert_equal_shape([rewards, discounts, rhos, mask])
    chex.assert_shape(values, (rewards.shape[0] + 1, *rewards.shape[1:]))

    values, rewards, discounts, rhos = jax.lax.stop_gradient((values, rewards, discounts, rhos))
    clipped_rhos = mask * jnp.minimum(rho_bar, rhos)
    traces = mask * discounts * lambda_ * jnp.minimum(c_bar, rhos)
    deltas = clipped_rhos * (rewards + discounts * values[1:] - values[:-1])

    def step(correction: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, trace = inputs
        correction = delta + trace * correction
        return correction, correction

    _, corrections = jax.lax.scan(step, jnp.zeros_like(deltas[0]), (deltas, traces), reverse=True)  # v_s - V(x_s)
    next_corrections = jnp.concatenate([corrections[1:], jnp.zeros_like(corrections[:1])])
    q = rewards + discounts * (values[1:] + lambda_ * next_corrections)
    return VTrace(values[:-1] + corrections, clipped_rhos * (q - values[:-1]))
