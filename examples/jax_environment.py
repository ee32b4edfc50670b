"""A JAX environment of 30 lines: move to a random target on a line.

    rlframe train --agent ppo --env examples/jax_environment.py:Target --topology fused --steps 100000

The same command works with `--topology single_process` and `--topology heavy_env`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs


class Target:
    """Actions are left, stay and right. Each step costs the distance to the target. An episode has 50 steps."""

    observation_space = specs.BoundedArray((2,), np.float32, -2.0, 2.0, "observation")
    action_space = specs.DiscreteArray(3, np.int32, "action")

    def reset(self, rng):
        """Return (state, observation) of a new episode."""
        position, target = jax.random.uniform(rng, (2,), minval=-1.0)
        state = (position, target, jnp.zeros((), jnp.int32))
        return state, jnp.stack([position, target])

    def step(self, rng, state, action):
        """Return (state, observation, reward, terminated, truncated)."""
        position, target, time = state
        position = jnp.clip(position + 0.1 * (action - 1), -2.0, 2.0)
        state = (position, target, time + 1)
        return state, jnp.stack([position, target]), -jnp.abs(position - target), False, time + 1 >= 50
