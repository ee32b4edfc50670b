"""`type='envpool'`: an adapter for EnvPool, which steps environments in C++ threads.

EnvPool's own dm_env API does not report truncation, so the adapter computes the discount from `done` and `trunc`. It
calls the C++ object directly, because EnvPool's Python classes rebuild dicts at every step.
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

# Options of EnvPool that the adapter sets. Users may set all other options with `env_kwargs`.
_RESERVED = ("num_envs", "batch_size", "seed", "env_type", "gym_reset_return_info")

# EnvPool families with steps of about a microsecond. With 1 to 1024 environments on two cores, one thread was faster
# than two threads.
_LIGHT = ("envpool.classic_control", "envpool.toy_text")

_SETTLE_TIME = 0.02  # seconds that EnvPool's buffer thread needs to fill its queue


class EnvPoolAdapter:
    """Converts EnvPool's lists of arrays to batched timesteps.

    Args:
      wait_num: number of environments that each `recv` returns. None creates a synchronous pool, for `reset` and
        `step`, which return all environments in order.
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
            warnings.simplefilter("ignore")  # ignore Gymnasium's warnings about bounds that lose precision in a cast
            codec = spaces.codec_of_spaces(self.pool.observation_space, self.pool.action_space)
        codec.action.dtype = self.pool.spec.action_array_spec["action"].dtype  # the dtype of the space can be wrong
        self.codec, self.layout = codec, codec.layout
        keys = list(self.pool._state_keys)
        self._done, self._trunc = keys.index("done"), keys.index("trunc")
        self._reward, self._env_id = keys.index("reward"), keys.index("info:env_id")
        # EnvPool names a leaf of a nested observation as in "obs:position". The order is that of the Dict space.
        leaves = [spec.name.replace("observation", "obs", 1).replace(".", ":") for spec in self.layout.leaves]
        # For each leaf: (position in EnvPool's lists, leaf).
        self._leaves = list(zip(map(keys.index, leaves), codec.leaves, strict=True))
        self._running = np.zeros(size, np.uint8)  # 0 if the environment's next timestep is FIRST, else 1

    def reset(self) -> TimeStep:
        self.start()
        return self._recv_all()

    def step(self, actions: np.ndarray) -> TimeStep:
        self.send(self._env_ids, actions)
        return self._recv_all()

    def start(self) -> None:
        self._running[:] = FIRST  # the next timestep of every environment is FIRST
        self.pool._reset(self._env_ids)

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        self.pool._send([env_ids, env_ids, np.ascontiguousarray(self.codec.action.decode(actions))])

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Return (env_ids [B] int32, timestep [B, ...]) of the environments that are ready, in new arrays."""
        state = self.pool._recv()
        env_ids = state[self._env_id]
        timestep, alive = self._timestep(state, self._running[env_ids])
        self._running[env_ids] = alive
        return env_ids, timestep

    def _recv_all(self) -> TimeStep:
        """Return the timestep of all environments in order, for a synchronous pool."""
        timestep, self._running = self._timestep(self.pool._recv(), self._running)
        return timestep

    def _timestep(self, state: list[np.ndarray], running: np.ndarray) -> tuple[TimeStep, np.ndarray]:
        """Convert a result of EnvPool to a timestep.

        Args:
          state: the result of EnvPool.
          running: [B] uint8 from the previous call: 0 if this timestep is FIRST, else 1.

        Returns:
          The timestep, and `running` for the next call.
        """
        done = state[self._done]
        alive = ~done
        # The sum is 0 for FIRST, 1 for MID, and 2 for LAST.
        step_type = running + done.view(np.uint8)
        discount = (alive | state[self._trunc]).astype(np.float32)
        try:
            leaves = [leaf.encode(state[i], is_batch=True) for i, leaf in self._leaves]
        except SpecMismatchError as error:
            raise error.for_batch(state[self._env_id]) from error
        timestep = TimeStep(step_type, state[self._reward], discount, self.layout.unflatten(leaves))
        return timestep, alive.view(np.uint8)

    def get_state(self) -> None:
        """Return None, because EnvPool cannot save its environments."""

    def set_state(self, states: list[Any]) -> None:
        raise UsageError("EnvPool environments cannot restore a state: reset them instead.")

    def sums(self) -> Sums:
        """Return no sums, because EnvPool's environments log no numbers."""
        return {}

    def progress(self) -> None:
        """Return None, because EnvPool does not report its progress."""

    def close(self) -> None:
        if self.pool is not None:
            # The destructor of EnvPool 0.8.4 can wait forever while it holds the GIL. This happened on a busy machine,
            # when the destructor ran after a `Put` of the buffer thread and before the thread checked `quit_`
            # (state_buffer_queue.h).
            time.sleep(_SETTLE_TIME)
            self.pool = None


def _make(name: str, size: int, batch_size: int, seed: int, num_workers: int | None, options: dict[str, Any]) -> Any:
    task = envpool_task(name)
    import envpool

    reserved = sorted(set(options) & set(_RESERVED))
    if reserved:
        raise UsageError(f"env_kwargs has {reserved}, which the pool sets itself: use the pool's own arguments.")
    options.setdefault("num_threads", num_workers or default_threads(task, size))
    try:
        # No environment has the index `size`, so this seed differs from the seed of each environment.
        return envpool.make_gymnasium(task, num_envs=size, batch_size=batch_size, seed=env_seed(seed, size), **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"EnvPool task {task!r} cannot be created with the options {options}: {error}") from error


def default_threads(task: str, size: int) -> int:
    """Return the number of threads for EnvPool: the number of cores, or 1 for light tasks.

    Light tasks use one thread, because waking a second thread takes longer than a step.
    """
    from envpool.registration import registry

    if registry.specs[task][0] in _LIGHT:
        return 1
    return max(1, min(size, len(os.sched_getaffinity(0))))


class ActionRepeatEnvPool(EnvPoolAdapter):
    """Repeats each action `times` times, until the episode ends. The rewards are summed.

    EnvPool returns one environment at a time, because an episode may end before the last repetition.

    Args:
        times: number of steps for each action.
        name, size, wait_num, others: see `EnvPoolAdapter`.
    """

    def __init__(self, times: int, name: str, size: int, wait_num: int | None, *others: Any) -> None:
        super().__init__(name, size, 1, *others)
        self._times, self._wait_num = times, wait_num or size
        self._actions = np.zeros((size, *self.codec.action_spec.shape), self.codec.action_spec.dtype)
        self._left = np.zeros(size, np.int64)  # number of remaining steps for each action
        self._rewards = np.zeros(size, np.float32)

    def start(self) -> None:
        self._left[:] = self._rewards[:] = 0
        super().start()

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        self._actions[env_ids] = actions
        self._left[env_ids], self._rewards[env_ids] = self._times, 0.0
        super().send(env_ids, actions)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """See `EnvPoolAdapter.recv`."""
        received: list[tuple[np.ndarray, TimeStep]] = []
        while len(received) < self._wait_num:
            env_ids, timestep = super().recv()
            self._left[env_ids] -= 1
            self._rewards[env_ids] += timestep.reward
            if timestep.step_type[0] == MID and self._left[env_ids[0]] > 0:
                super().send(env_ids, self._actions[env_ids])
            else:
                received.append((env_ids, timestep._replace(reward=self._rewards[env_ids])))
        return np.concatenate([env_ids for env_ids, _ in received]), self._batch([timestep for _, timestep in received])

    def _recv_all(self) -> TimeStep:
        env_ids, timestep = self.recv()
        return self._batch([timestep], np.argsort(env_ids))

    def _batch(self, timesteps: list[TimeStep], order: Any = slice(None)) -> TimeStep:
        """Concatenate timesteps, and reorder the rows by `order`."""
        observations = zip(*(self.layout.flatten(timestep.observation) for timestep in timesteps), strict=True)
        numbers = zip(*(timestep[:3] for timestep in timesteps), strict=True)
        leaves = [np.concatenate(parts)[order] for parts in observations]
        step_type, reward, discount = (np.concatenate(parts)[order] for parts in numbers)
        return TimeStep(step_type, reward, discount, self.layout.unflatten(leaves))
