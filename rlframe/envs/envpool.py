"""`type='envpool'`: EnvPool's C++ thread pool.

EnvPool's own dm_env API loses truncation, so this builds the discount from its `done` and `trunc`. It talks
to the C++ object directly: the Python layer on top rebuilds its dicts on every step.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.envs import spaces
from rlframe.envs.adapters import env_seed
from rlframe.envs.layout import SpecMismatchError
from rlframe.envs.names import envpool_task
from rlframe.errors import UsageError
from rlframe.metrics.rows import Sums
from rlframe.types import FIRST, MID, TimeStep

# Kept by this file; anything else that EnvPool takes goes through env_kwargs.
_RESERVED = ("num_envs", "batch_size", "seed", "env_type", "gym_reset_return_info")

# Families whose steps take about a microsecond: on two cores one thread was ahead of two from 1 to 1024 environments.
_LIGHT = ("envpool.classic_control", "envpool.toy_text")

_SETTLES = 0.02  # seconds in which the thread that makes an EnvPool's buffers has made all that there is room for


class EnvPoolAdapter:
    """An EnvPool, whose raw lists of arrays it gives as batched timesteps.

    Args:
      wait_num: how many environments answer at a time, whichever are ready (`start`, `send`, `recv`); None: all of them
        at every step, in order (`reset`, `step`).
    """

    def __init__(
        self,
        name: str,
        size: int,
        wait_num: int | None,
        seed: int,
        num_workers: int | None,
        env_kwargs: Mapping[str, Any] | None,
    ):
        self.num_envs = size
        self._env_ids = np.arange(size, dtype=np.int32)
        self.pool = _make(name, size, wait_num or size, seed, num_workers, dict(env_kwargs or {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of precision lowered by casting
            codec = spaces.codec_of_spaces(self.pool.observation_space, self.pool.action_space)
        codec.action.dtype = self.pool.spec.action_array_spec["action"].dtype  # the space may say another one
        self.codec, self.layout = codec, codec.layout
        keys = list(self.pool._state_keys)
        self._done, self._trunc = keys.index("done"), keys.index("trunc")
        self._reward, self._env_id = keys.index("reward"), keys.index("info:env_id")
        # A nested observation has keys such as "obs:position", in the order of its Dict space.
        leaves = [spec.name.replace("observation", "obs", 1).replace(".", ":") for spec in self.layout.leaves]
        # the position of each leaf in EnvPool's lists
        self._leaves = list(zip(map(keys.index, leaves), codec.leaves, strict=True))
        self._is_leaf = self.layout.is_leaf
        self._running = np.zeros(size, np.uint8)  # 1 unless the environment's next timestep is FIRST

    def reset(self) -> TimeStep:
        self.start()
        return self._recv_all()

    def step(self, actions: np.ndarray) -> TimeStep:
        self.send(self._env_ids, actions)
        return self._recv_all()

    def start(self) -> None:
        self._running[:] = FIRST  # the next timestep of every environment
        self.pool._reset(self._env_ids)

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        self.pool._send([env_ids, env_ids, np.ascontiguousarray(self.codec.action.decode(actions))])

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """(env_ids [B] int32, timestep [B, ...]) of whichever are ready; the arrays are new and the caller's own."""
        state = self.pool._recv()
        env_ids = state[self._env_id]
        timestep, alive = self._timestep(state, self._running[env_ids])
        self._running[env_ids] = alive
        return env_ids, timestep

    def _recv_all(self) -> TimeStep:
        """The timestep of all environments in order, where they are all in step."""
        timestep, self._running = self._timestep(self.pool._recv(), self._running)
        return timestep

    def _timestep(self, state: list[np.ndarray], running: np.ndarray) -> tuple[TimeStep, np.ndarray]:
        """The timestep, and [B] uint8: 0 where the next one is FIRST. `running` is what the last one said."""
        done = state[self._done]
        alive = ~done
        # 0 FIRST, 1 MID, 2 LAST
        step_type = running + done.view(np.uint8)
        discount = (alive | state[self._trunc]).astype(np.float32)
        try:
            leaves = [leaf.encode(state[i], is_batch=True) for i, leaf in self._leaves]
        except SpecMismatchError as error:
            raise error.for_batch(state[self._env_id]) from error
        observation = leaves[0] if self._is_leaf else self.layout.unflatten(leaves)
        return TimeStep(step_type, state[self._reward], discount, observation), alive.view(np.uint8)

    def get_state(self) -> None:
        """EnvPool cannot save its environments."""

    def set_state(self, states: list[Any]) -> None:
        raise UsageError("EnvPool environments cannot restore a state: reset them instead.")

    def sums(self) -> Sums:
        """EnvPool's environments log nothing."""
        return {}

    def progress(self) -> None:
        """EnvPool does not say how far it is."""

    def close(self) -> None:
        if self.pool is not None:
            # The destructor of 0.8.4 waits for ever, with the GIL, where it comes between a `Put` of the thread that
            # makes buffers and that thread's look at `quit_` (state_buffer_queue.h): seen on a busy machine.
            time.sleep(_SETTLES)
            self.pool = None


def _make(name: str, size: int, batch_size: int, seed: int, num_workers: int | None, options: dict[str, Any]) -> Any:
    task = envpool_task(name)
    import envpool

    reserved = sorted(set(options) & set(_RESERVED))
    if reserved:
        raise UsageError(f"env_kwargs has {reserved}, which the pool sets itself: use the pool's own arguments.")
    options.setdefault("num_threads", num_workers or default_threads(task, size))
    try:
        # The index is past that of any environment, so that no single one gets the pool's own seed.
        return envpool.make_gymnasium(task, num_envs=size, batch_size=batch_size, seed=env_seed(seed, size), **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"EnvPool task {task!r} cannot be made with the options {options}: {error}") from error


def default_threads(task: str, size: int) -> int:
    """Threads for EnvPool: the cores, but one where a step takes less time than waking a second thread."""
    from envpool.registration import registry

    if registry.specs[task][0] in _LIGHT:
        return 1
    return max(1, min(size, len(os.sched_getaffinity(0))))


class ActionRepeatEnvPool(EnvPoolAdapter):
    """Steps each environment `times` times with its action, but not beyond the end of an episode; rewards add up.

    Args:
        times: how often an action is taken.
        others: as for `EnvPoolAdapter`. EnvPool itself answers for one environment at a time.
    """

    def __init__(self, times: int, name: str, size: int, wait_num: int | None, *others: Any) -> None:
        super().__init__(name, size, 1, *others)
        self._times, self._wait_num = times, wait_num or size
        self._actions = np.zeros((size, *self.codec.action_spec.shape), self.codec.action_spec.dtype)
        self._left = np.zeros(size, np.int64)  # how often more each action is to be taken
        self._rewards = np.zeros(size, np.float32)

    def start(self) -> None:
        self._left[:] = self._rewards[:] = 0
        super().start()

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        self._actions[env_ids] = actions
        self._left[env_ids], self._rewards[env_ids] = self._times, 0.0
        super().send(env_ids, actions)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """As `EnvPoolAdapter.recv`."""
        answered: list[tuple[np.ndarray, TimeStep]] = []
        while len(answered) < self._wait_num:
            env_ids, timestep = super().recv()
            self._left[env_ids] -= 1
            self._rewards[env_ids] += timestep.reward
            if timestep.step_type[0] == MID and self._left[env_ids[0]] > 0:
                super().send(env_ids, self._actions[env_ids])
            else:
                answered.append((env_ids, timestep._replace(reward=self._rewards[env_ids])))
        return np.concatenate([env_ids for env_ids, _ in answered]), self._batch([timestep for _, timestep in answered])

    def _recv_all(self) -> TimeStep:
        env_ids, timestep = self.recv()
        return self._batch([timestep], np.argsort(env_ids))

    def _batch(self, timesteps: list[TimeStep], order: Any = slice(None)) -> TimeStep:
        """Timesteps one after the other as one."""
        observations = zip(*(self.layout.flatten(timestep.observation) for timestep in timesteps), strict=True)
        numbers = zip(*(timestep[:3] for timestep in timesteps), strict=True)
        leaves = [np.concatenate(parts)[order] for parts in observations]
        step_type, reward, discount = (np.concatenate(parts)[order] for parts in numbers)
        return TimeStep(step_type, reward, discount, self.layout.unflatten(leaves))
