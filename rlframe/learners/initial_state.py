"""The arrays of a learner before its first update, and their shapes."""

from __future__ import annotations

import jax

from rlframe import compilation
from rlframe.agents.base import Agent
from rlframe.learners.update import LearnerArrays, copy_arrays
from rlframe.params.packing import Packing
from rlframe.types import Params


class InitialState:
    """Makes the initial arrays of a learner.

    Args:
        agent: the `Agent` that learns.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._jitted = compilation.jit_once(self._begin)

    def shapes(self) -> LearnerArrays:
        """Return the shapes of the arrays. This traces the agent's functions, but computes nothing."""
        key = jax.eval_shape(jax.random.PRNGKey, 0)
        return self._jitted.eval_shape(jax.eval_shape(self._agent.initial_params, key), key)

    def make(self, seed: int, params: Params | None = None) -> LearnerArrays:
        """Return the arrays. No array occurs twice, because updates donate the arrays.

        Args:
            seed: seed of the parameters and of the random numbers in the learner state.
            params: parameters to start from, in place of random ones.
        """
        init_rng, learner_rng = jax.random.split(jax.random.PRNGKey(seed))
        return self._jitted(self._agent.initial_params(init_rng) if params is None else params, learner_rng)

    def _begin(self, params: Params, rng: jax.Array) -> LearnerArrays:
        learner_state = self._agent.seeded(self._agent.initial_learner_state(params), rng)
        for_actors = self._agent.actor_params(params, learner_state)
        # Copy, because the learner state can share arrays with the parameters, for example the initial target network.
        return copy_arrays(LearnerArrays(params, learner_state, Packing(for_actors).pack_jax(for_actors)))
