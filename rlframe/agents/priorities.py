"""Prioritized replay: the priority of a sequence, and weights that correct for how a batch was drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlframe.agents.trees import check_shapes


def importance_weights(probabilities: jax.Array, exponent: jax.Array | float) -> jax.Array:
    """[B]: corrections for prioritised sampling, the largest being 1 (Schaul et al. 2016, section 3.4).

    The size of the buffer cancels in the division by the largest.
    """
    check_shapes(probabilities=(probabilities, "B"))
    weights = jnp.power(probabilities, -exponent)
    return weights / jnp.max(weights)


def sequence_priorities(errors: jax.Array, mask: jax.Array, max_share: float) -> jax.Array:
    """[B]: of each sequence the largest error and the mean, mixed (Kapturowski et al. 2019, section 2.3).

    Args:
        errors: [T, B], differences to the targets.
        mask: [T, B] float32, 0 where the environment ignored action t.
        max_share: eta, the share of the largest.
    """
    check_shapes(errors=(errors, "T B"), mask=(mask, "T B"))
    sizes = jnp.abs(errors) * mask
    means = jnp.sum(sizes, axis=0) / jnp.maximum(jnp.sum(mask, axis=0), 1.0)
    return max_share * jnp.max(sizes, axis=0) + (1.0 - max_share) * means
