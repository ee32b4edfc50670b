"""Targets of values, and advantages for policies: GAE, V-trace, n-step and Q(lambda) returns.

Time is the first axis of all arrays, except in `soft_targets`, whose arrays have no time axis. No function uses rewards
or values of the next episode.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlframe.agents.trees import check_shapes


def generalized_advantages(
    rewards: jax.Array, discounts: jax.Array, values: jax.Array, mask: jax.Array, gae_lambda: float
) -> jax.Array:
    """Return generalized advantage estimates, GAE (Schulman et al. 2016, equation 16). Time is the first axis.

    Args:
        rewards: [T, B] float32, rewards of action t.
        discounts: [T, B] float32, gamma times the discount of timestep t + 1, which is 0 after termination.
        values: [T + 1, B] float32, values of timestep t. The last value is used for bootstrapping.
        mask: [T, B] float32, 0 where the environment ignored action t (its timestep was LAST).
        gae_lambda: 0 for one-step advantages, 1 for Monte Carlo advantages.

    Returns:
        [T, B] float32, 0 where the mask is 0. No advantage depends on steps after a masked step.
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
    """Return y with y_t = terms_t + decays_t y_{t+1}. Time is the first axis. After the last step, y is 0."""

    def step(following: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        term, decay = inputs
        following = term + decay * following
        return following, following

    return jax.lax.scan(step, jnp.zeros_like(terms[0]), (terms, decays), reverse=True)[1]


class VTrace(NamedTuple):
    """The results of V-trace. No gradient flows through them."""

    targets: jax.Array  # [T, ...] float32: v_s, the targets of V(x_s)
    advantages: jax.Array  # [T, ...] float32: rho_s (q_s - V(x_s)), factors of the policy gradient


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
    """Return V-trace targets and advantages. Time is the first axis. Other axes are batch axes.

    With rho_t = min(rho_bar, pi/mu) and c_t = lambda min(c_bar, pi/mu),

        delta_t = rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t))
        v_s     = V(x_s) + sum over t >= s of (gamma_s c_s ... gamma_{t-1} c_{t-1}) delta_t
        q_s     = r_s + gamma_s (lambda v_{s+1} + (1 - lambda) V(x_{s+1}))

    The paper's q_s corresponds to lambda = 1. With this mixture (as in rlax), on-policy advantages are equal to GAE for
    every lambda.

    A sequence may contain several episodes. At a masked step (its timestep was LAST), delta and c are 0. The return
    before this step therefore bootstraps from V(LAST) times its discount, and uses nothing from the next episode.

    Args:
        values: [T + 1, ...] float32, V of timestep t. The last value is used for bootstrapping.
        rewards: [T, ...] float32, rewards of action t.
        discounts: [T, ...] float32, gamma times the discount of timestep t + 1, which is 0 after termination.
        rhos: [T, ...] float32, importance weights pi(a_t | x_t) / mu(a_t | x_t) of the learner's policy over the acting
            policy.
        mask: [T, ...] float32, 0 where the environment ignored action t, otherwise 1.
        rho_bar: upper limit of rho. It determines the policy whose values are learned (with infinity, pi itself).
        c_bar: upper limit of c, at most rho_bar. It determines the speed of convergence and the variance.
        lambda_: 1 for returns to the end of the sequence, 0 for one-step returns.

    Returns:
        See `VTrace`. Where the mask is 0, the target is the value and the advantage is 0.

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
    """Return n-step returns within sequences: up to n rewards plus the bootstrapped value. Time is the first axis.

    Args:
        rewards: [T, B] float32, rewards of action t.
        discounts: [T, B] float32, gamma, or 0 if the environment terminated at timestep t + 1.
        next_values: [T, B] float32, values of timestep t + 1.
        continues: [T, B] bool, False if timestep t + 1 is LAST. The sum then ends with the value of this timestep.
        n_step: number of rewards, at least 1. Near the end of the sequence, fewer rewards are summed.

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
    """Return the targets of on-policy Q(lambda) (Gallici et al. 2024, section 4). Time is the first axis.

    Args:
        rewards: [T, B] float32, rewards of action t.
        discounts: [T, B] float32, gamma, or 0 if the environment terminated at timestep t + 1.
        next_values: [T, B] float32, the largest action value of timestep t + 1.
        continues: [T, B] bool, False if timestep t + 1 is LAST. The return then ends with the value of this timestep.
        lambda_: 0 for one-step targets, 1 for the rewards of all following steps.

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
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, which compresses large returns (Pohlen et al. 2018)."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + epsilon * x


def unscale(x: jax.Array, epsilon: float) -> jax.Array:
    """Return the inverse of `rescale` (Pohlen et al. 2018, proposition A.2).

    The formula avoids subtracting nearly equal numbers.
    """
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
    """Return [B]: the reward plus the discounted soft value, which uses the lower value of two critics.

    See Haarnoja et al. 2018, equation 3.

    Args:
        rewards: [B].
        discounts: [B], gamma, or 0 if the episode terminated.
        next_values: [2, B], values of the target critics for the policy's next action.
        next_log_probs: [B], log-probabilities of this action.
        temperature: [], weight of the entropy. With 0, the result is the target of TD3.
    """
    check_shapes(rewards=(rewards, "B"), discounts=(discounts, "B"), next_values=(next_values, "2 B"))
    return rewards + discounts * (jnp.min(next_values, axis=0) - temperature * next_log_probs)
