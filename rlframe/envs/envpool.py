"""`type='envpool'`: EnvPool's C++ thread pool.

EnvPool's own dm_env API loses truncation, so this builds the discount from its `done` and `trunc`. It talks
to the C++ object directly: the Python layer on top rebuilds its dicts on every step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.envs import spaces
from rlframe.envs.adapters import env_seed
from rlframe.envs.names import envpool_task
from rlframe.errors import UsageError
from rlframe.types import FIRST, TimeStep

# Kept by this file; anything else that EnvPool takes goes through env_kwargs.
_RESERVED = ("num_envs", "batch_size", "seed", "env_type", "gym_reset_return_info")


class EnvPoolCore:
    """An EnvPool object, its specs, and its raw lists of arrays as batched timesteps."""

    def __init__(
        self,
        name: str,
        size: int,
        batch_size: int,
        seed: int,
        num_workers: int | None,
        env_kwargs: Mapping[str, Any] | None,
    ):
        self.pool = _make(name, size, batch_size, seed, num_workers, dict(env_kwargs or {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of precision lowered by casting
            self.observation_spec = spaces.observation_spec_of_space(self.pool.observation_space)
            self.action_spec, _ = spaces.action_spec_of_space(self.pool.action_space)
        self.layout = spaces.Layout(self.observation_spec)
        keys = list(self.pool._state_keys)
        self._done, self._trunc = keys.index("done"), keys.index("trunc")
        self._reward, self._env_id = keys.index("reward"), keys.index("info:env_id")
        # A nested observation has keys such as "obs:position", in the order of its Dict space.
        leaves = [spec.name.replace("observation", "obs", 1).replace(".", ":") for spec in self.layout.leaves]
        self._leaves = [keys.index(leaf) for leaf in leaves]
        self._dtypes = [spec.dtype for spec in self.layout.leaves]
        self._action_dtype = self.pool.spec.action_array_spec["action"].dtype
        self._running = np.zeros(size, np.uint8)  # 1 unless the environment's next timestep is FIRST

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        self.pool._send([env_ids, env_ids, np.ascontiguousarray(actions, self._action_dtype)])

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """(env_ids [B] int32, timestep [B, ...]); the arrays are new and the caller's own."""
        state = self.pool._recv()
        env_ids = state[self._env_id]
        done = state[self._done]
        alive = ~done
        # 0 FIRST, 1 MID, 2 LAST: one more than the running flag allows where the episode is done.
        step_type = self._running[env_ids]
        step_type += done.view(np.uint8)
        self._running[env_ids] = alive.view(np.uint8)
        discount = (alive | state[self._trunc]).astype(np.float32)
        leaves = [state[i].astype(dtype, copy=False) for i, dtype in zip(self._leaves, self._dtypes, strict=True)]
        reward = state[self._reward].astype(np.float32, copy=False)
        return env_ids, TimeStep(step_type, reward, discount, self.layout.unflatten(leaves))

    def forget(self) -> None:
        """The next timestep of every environment is FIRST."""
        self._running[:] = FIRST

    def close(self) -> None:
        self.pool = None


class EnvPoolPool:
    """A synchronous EnvPool: all environments at every step, in order."""

    def __init__(self, name: str, size: int, seed: int, num_workers: int | None, env_kwargs: Mapping[str, Any] | None):
        self._core = EnvPoolCore(name, size, size, seed, num_workers, env_kwargs)
        self.num_envs = size
        self.observation_spec, self.action_spec = self._core.observation_spec, self._core.action_spec
        self._env_ids = np.arange(size, dtype=np.int32)

    def reset(self) -> TimeStep:
        self._core.forget()
        self._core.pool._reset(self._env_ids)
        return self._core.recv()[1]

    def step(self, actions: np.ndarray) -> TimeStep:
        self._core.send(self._env_ids, actions)
        return self._core.recv()[1]

    def get_state(self) -> None:
        """EnvPool cannot save its environments."""

    def set_state(self, states: list[Any]) -> None:
        raise UsageError("EnvPool environments cannot restore a state: reset them instead.")

    def close(self) -> None:
        self._core.close()


class EnvPoolAsync:
    """An asynchronous EnvPool: `wait_num` environments at a time, whichever are ready."""

    def __init__(
        self,
        name: str,
        size: int,
        wait_num: int,
        seed: int,
        num_workers: int | None,
        env_kwargs: Mapping[str, Any] | None,
    ):
        self._core = EnvPoolCore(name, size, wait_num, seed, num_workers, env_kwargs)
        self.num_envs = size
        self.observation_spec, self.action_spec = self._core.observation_spec, self._core.action_spec
        self.send = self._core.send
        self.recv = self._core.recv

    def start(self) -> None:
        self._core.pool._reset(np.arange(self.num_envs, dtype=np.int32))

    def close(self) -> None:
        self._core.close()


def _make(name: str, size: int, batch_size: int, seed: int, num_workers: int | None, options: dict[str, Any]) -> Any:
    task = envpool_task(name)
    import envpool

    reserved = sorted(set(options) & set(_RESERVED))
    if reserved:
        raise UsageError(f"env_kwargs has {reserved}, which the pool sets itself: use the pool's own arguments.")
    options.setdefault("num_threads", num_workers or default_threads(size))
    try:
        # The index is past that of any environment, so that no single one gets the pool's own seed.
        return envpool.make_gymnasium(task, num_envs=size, batch_size=batch_size, seed=env_seed(seed, size), **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"EnvPool task {task!r} cannot be made with the options {options}: {error}") from error


def default_threads(size: int) -> int:
    """Threads for EnvPool: the cores, but never more than there are environments."""
    return max(1, min(size, len(os.sched_getaffinity(0))))
