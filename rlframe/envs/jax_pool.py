"""`type="jax"`: a pool of JAX environments that the host steps with one jitted call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe import compilation
from rlframe.envs.adapters import env_seed
from rlframe.envs.jax_env import BatchedJaxEnv, EnvCarry, JaxEnv
from rlframe.metrics.rows import Sums
from rlframe.types import TimeStep


class JaxPool:
    """Steps a batch of JAX environments.

    Args:
        env: the environment.
        size: number of environments.
        seed: seed of the pool. The key of environment i is `PRNGKey(hash of (seed, i))`.
        options: other arguments of `BatchedJaxEnv`.
    """

    def __init__(self, env: JaxEnv, size: int, seed: int, **options: Any) -> None:
        self.num_envs = size
        self._envs = BatchedJaxEnv(env, **options)
        self.codec = self._envs.codec
        self._keys = env_keys(seed, size)
        self._steps = 0
        self._init = compilation.jit(self._envs.init, differentiates=False)
        self._step = compilation.jit(self._envs.step, differentiates=False)
        spec = self.codec.action_spec
        self._no_actions = np.zeros((size, *spec.shape), spec.dtype)
        self._carry: EnvCarry = self._init(self._keys)

    def reset(self) -> TimeStep:
        """Start a new episode in every environment. After the first call, the episodes differ from earlier ones."""
        self._carry = self._carry._replace(is_last=jnp.ones(self.num_envs, bool))
        return self.step(self._no_actions)

    def step(self, actions: np.ndarray) -> TimeStep:
        self._carry, timestep = self._step(self._carry, actions)
        self._steps += 1
        return jax.tree.map(np.asarray, timestep)

    def get_state(self) -> list[Any]:
        """Return the state of each environment, as numpy arrays."""
        carry = jax.tree.map(np.asarray, self._carry)
        rows = carry._replace(time=np.repeat(carry.time, self.num_envs))
        return [jax.tree.map(lambda leaf, i=i: leaf[i], rows) for i in range(self.num_envs)]

    def set_state(self, states: list[Any]) -> None:
        """Restore a state from `get_state`."""
        rows = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
        self._carry = rows._replace(time=rows.time[0])

    def sums(self) -> Sums:
        """Return no sums, because JAX environments log no numbers."""
        return {}

    def progress(self) -> int:
        """Return the number of steps."""
        return self._steps

    def close(self) -> None:
        """Do nothing, because the pool has no thread or process."""


def env_keys(seed: int, size: int) -> np.ndarray:
    """Return the keys [size, 2] uint32 of a batch of environments."""
    return np.stack([np.asarray(jax.random.PRNGKey(env_seed(seed, i))) for i in range(size)])
