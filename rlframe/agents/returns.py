"""Returns and advantages, of which values and policies learn: GAE, V-trace, n-step and Q(lambda) returns.

Arrays have time first, but for `soft_targets`, which are of single steps. No estimate reaches into the next episode.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlframe.agents.trees import check_shapes


def generalized_advantages(
    rewards: jax.Array, discounts: jax.Array, values: jax.Array, mask: jax.Array, gae_lambda: float
) -> jax.Array:
    """Generalized advantage estimates, GAE (Schulman et al. 2016, equation 16), time first.

    Args:
        rewards: [T, B] float32, of action t.
        discounts: [T, B] float32, gamma times the discount of timestep t + 1: 0 where the environment terminated.
        values: [T + 1, B] float32, of timestep t; the last one bootstraps.
        mask: [T, B] float32, 0 where the environment ignored action t (its timestep was LAST).
        gae_lambda: 0 for one-step advantages, 1 for Monte Carlo.

    Returns:
        [T, B] float32, 0 where the mask is. An estimate never reaches over a masked step.
    """
    check_shapes(
        rewards=(rewards, "T B"),
        discounts=(discounts, "T B"),
        mask=(mask, "T B"),
        values=(values, "T+1 B"),
    )
    errors = mask * (rewards + discounts * values[1:] - values[:-1])
    return discounted_sums(errors, mask * discounts * gae_lambda)


def discounted_sums(terms: jax.Array, decays: jax.Array) -> jax.Array:
    """Return y_t = terms_t + decays_t y_{t+1}, time first; y is 0 after the last step."""

    def step(following: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        term, decay = inputs
        following = term + decay * following
        return following, following

    return jax.lax.scan(step, jnp.zeros_like(terms[0]), (terms, decays), reverse=True)[1]


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

    The paper's q_s is that of lambda = 1. Mixed like this (as in rlax), an on-policy advantage is the generalized
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
        ValueError: a shape does not match.
    """
    check_shapes(
        rewards=(rewards, "T ..."),
        discounts=(discounts, "T ..."),
        rhos=(rhos, "T ..."),
        mask=(mask, "T ..."),
        values=(values, "T+1 ..."),
    )

    values, rewards, discounts, rhos = jax.lax.stop_gradient((values, rewards, discounts, rhos))
    clipped_rhos = mask * jnp.minimum(rho_bar, rhos)
    traces = mask * discounts * lambda_ * jnp.minimum(c_bar, rhos)
    deltas = clipped_rhos * (rewards + discounts * values[1:] - values[:-1])
    corrections = discounted_sums(deltas, traces)  # v_s - V(x_s)
    next_corrections = jnp.concatenate([corrections[1:], jnp.zeros_like(corrections[:1])])
    q = rewards + discounts * (values[1:] + lambda_ * next_corrections)
    return VTrace(values[:-1] + corrections, clipped_rhos * (q - values[:-1]))


def n_step_returns(
    rewards: jax.Array, discounts: jax.Array, next_values: jax.Array, continues: jax.Array, n_step: int
) -> jax.Array:
    """Rewards of up to n steps and the value of what follows, within sequences, time first.

    Args:
        rewards: [T, B] float32, of action t.
        discounts: [T, B] float32, gamma; 0 where the environment terminated at timestep t + 1.
        next_values: [T, B] float32, of timestep t + 1.
        goes_on: [T, B] bool, whether timestep t + 1 is not LAST; where it is, its value ends the sum.
        n_step: at least 1. Near the end of the sequence there are fewer.

    Returns:
        [T, B] float32.
    """
    check_shapes(
        rewards=(rewards, "T B"),
        discounts=(discounts, "T B"),
        next_values=(next_values, "T B"),
        continues=(continues, "T B"),
    )
    continues = jnp.concatenate([continues[:-1], jnp.zeros_like(continues[-1:])])
    returns = rewards + discounts * next_values
    for _ in range(n_step - 1):
        following = jnp.where(continues, jnp.roll(returns, -1, axis=0), next_values)
        returns = rewards + discounts * following
    return returns


def q_lambda_returns(
    rewards: jax.Array, discounts: jax.Array, next_values: jax.Array, continues: jax.Array, lambda_: float
) -> jax.Array:
    """Targets of Q(lambda) on-policy (Gallici et al. 2024, section 4), time first.

    Args:
        rewards: [T, B] float32, of action t.
        discounts: [T, B] float32, gamma; 0 where the environment terminated at timestep t + 1.
        next_values: [T, B] float32, the largest action value of timestep t + 1.
        goes_on: [T, B] bool, whether timestep t + 1 is not LAST; where it is, its value ends the return.
        lambda_: 0 for one-step targets, 1 for the rewards of all steps that follow.

    Returns:
        [T, B] float32.
    """
    check_shapes(
        rewards=(rewards, "T B"),
        discounts=(discounts, "T B"),
        next_values=(next_values, "T B"),
        continues=(continues, "T B"),
    )

    def step(following: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, discount, value, is_inside = inputs
        mixed = value + lambda_ * jnp.where(is_inside, following - value, 0.0)
        following = reward + discount * mixed
        return following, following

    inputs = (rewards, discounts, next_values, continues)
    return jax.lax.scan(step, next_values[-1], inputs, reverse=True)[1]


def rescale(x: jax.Array, epsilon: float) -> jax.Array:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x: small values for large returns (Pohlen et al. 2018)."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + epsilon * x


def unscale(x: jax.Array, epsilon: float) -> jax.Array:
    """The inverse of `rescale` (Pohlen et al. 2018, proposition A.2), without differences of nearly equal numbers."""
    size = jnp.abs(x) + 1.0 + epsilon
    root = 2.0 * size / (1.0 + jnp.sqrt(1.0 + 4.0 * epsilon * size))  # sqrt(|h^-1(x)| + 1)
    return jnp.sign(x) * (jnp.square(root) - 1.0)


def soft_targets(
    rewards: jax.Array,
    discounts: jax.Array,
    next_values: jax.Array,
    next_log_probs: jax.Array | float,
    temperature: jax.Array | float,
) -> jax.Array:
    """[B]: rewards and the soft value of what follows, by the lower of two critics (Haarnoja et al. 2018, equation 3).

    Args:
        rewards: [B].
        discounts: [B], gamma; 0 where the episode terminated.
        next_values: [2, B], of the target critics for the policy's next action.
        next_log_probs: [B], of that action; with a temperature of 0 these are the targets of TD3.
        temperature: [], what entropy is worth.
    """
    check_shapes(rewards=(rewards, "B"), discounts=(discounts, "B"), next_values=(next_values, "2 B"))
    return rewards + discounts * (jnp.min(next_values, axis=0) - temperature * next_log_probs)
