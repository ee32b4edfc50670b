"""One update of a learner: new parameters, and the version that actors get after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlframe import compilation
from rlframe.agents.base import Agent
from rlframe.params.packing import Packing
from rlframe.types import Batch, Logs, Tree


class Updated(NamedTuple):
    """The results of an update."""

    params: Tree
    learner_state: Tree
    logs: Logs
    published: list[jax.Array]  # packed, for actors: the new parameters, or what actors had if these are not finite
    is_finite: jax.Array  # [] bool: whether the parameters, and what actors would get of them, are finite


class Update:
    """The jitted update of an agent.

    Call it with (params, learner_state, batch, published) to get an `Updated`. It donates `params` and `learner_state`.
    `published` is what actors have. They never get parameters that are not finite. The jitted call decides this,
    because waiting for its result would make acting wait for learning.

    Args:
        agent: the `Agent` that learns.
        packing: the layout of what actors get.
    """

    def __init__(self, agent: Agent, packing: Packing) -> None:
        self._agent, self._packing = agent, packing
        self.pack = jax.jit(self._pack)
        self._publish = jax.jit(self._finite_or_last)
        self._call: Callable[..., Updated] = self._update
        if agent.jit_learner_step:
            self._call = compilation.jit(self._update, donate_argnums=(0, 1), differentiates=True)

    def __call__(self, params: Tree, learner_state: Tree, batch: Batch, published: list[jax.Array]) -> Updated:
        return self._call(params, learner_state, batch, published)

    def _update(self, params: Tree, learner_state: Tree, batch: Batch, published: list[jax.Array]) -> Updated:
        params, learner_state, logs = self._agent.learner_step(params, learner_state, batch)
        published, is_finite = self._publish(params, learner_state, published)
        return Updated(params, learner_state, dict(logs), published, is_finite)

    def _finite_or_last(
        self, params: Tree, learner_state: Tree, published: list[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array]:
        for_actors = self._agent.actor_params(params, learner_state)
        packed = self._packing.pack(for_actors)
        in_packed = {id(leaf) for leaf in jax.tree.leaves(for_actors)}
        others = [leaf for leaf in jax.tree.leaves(params) if id(leaf) not in in_packed]
        # The check of one long array compiles sooner than a check of each leaf.
        is_finite = are_finite((self._packing.floats(packed), others))
        return [jnp.where(is_finite, new, old) for new, old in zip(packed, published)], is_finite

    def _pack(self, params: Tree, learner_state: Tree) -> list[jax.Array]:
        # Copies: what actors read must outlive the update that the learner's own arrays are donated to.
        return copied(self._packing.pack(self._agent.actor_params(params, learner_state)))


def are_finite(tree: Tree) -> jax.Array:
    """Return [] bool: True if every floating-point number of `tree` is finite."""
    leaves = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or True))


@jax.jit
def copied(tree: Tree) -> Tree:
    """Return a copy of each array."""
    return jax.tree.map(jnp.copy, tree)
