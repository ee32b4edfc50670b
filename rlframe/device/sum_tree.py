"""A sum tree in device memory, for prioritized replay. See `rlframe.replay.sum_tree` for the same tree on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_FANOUT = 16

Levels = list[jax.Array]  # float32 arrays: the leaves, then the sums of 16 nodes each, up to at most 16 nodes


class DeviceSumTree:
    """Draws leaves with probabilities proportional to their values.

    Each sum is computed from the node's children, so rounding errors do not accumulate, and a restored tree continues
    exactly.

    Args:
        size: number of leaves.
    """

    def __init__(self, size: int) -> None:
        self._sizes = [-(-size // _FANOUT) * _FANOUT]
        while self._sizes[-1] > _FANOUT:
            self._sizes.append(-(-(self._sizes[-1] // _FANOUT) // _FANOUT) * _FANOUT)

    def init(self) -> Levels:
        """Return a tree of zeros."""
        return [jnp.zeros(size, jnp.float32) for size in self._sizes]

    def set(self, levels: Levels, leaves: jax.Array, values: jax.Array) -> Levels:
        """Set the leaves ([n] int) to `values` [n], and compute their sums.

        Make one call for all leaves: XLA copies the whole tree if it is read between two calls.
        """
        levels = [levels[0].at[leaves].set(values), *levels[1:]]
        nodes = leaves
        for depth in range(1, len(levels)):
            nodes = nodes // _FANOUT
            sums = levels[depth - 1].reshape(-1, _FANOUT)[nodes].sum(axis=1)
            levels[depth] = levels[depth].at[nodes].set(sums)
        return levels

    def draw(self, rng: jax.Array, levels: Levels, count: int) -> tuple[jax.Array, jax.Array]:
        """Return (leaves [count] int32, probabilities [count] float32). The sum must be positive.

        The draws are stratified, as in Schaul et al. 2016, B.2.1.
        """
        total = levels[-1].sum()
        mass = (jax.random.uniform(rng, (count,)) + jnp.arange(count)) * (total / count)
        nodes = jnp.zeros(count, jnp.int32)
        for level in reversed(levels):
            values = level.reshape(-1, _FANOUT)[nodes]
            sums = jnp.cumsum(values, axis=1)
            # Rounding can leave a mass that is at least the sum. Then take the last child that is not 0.
            is_beyond = sums <= jnp.minimum(mass[:, None], jnp.nextafter(sums[:, -1:], jnp.float32(0.0)))
            child = jnp.count_nonzero(is_beyond, axis=1).astype(jnp.int32)
            value, before = (
                jnp.take_along_axis(each, child[:, None], axis=1)[:, 0] for each in (values, sums - values)
            )
            mass = jnp.maximum(mass - before, 0.0)
            nodes = nodes * _FANOUT + child
        return nodes, value / total
