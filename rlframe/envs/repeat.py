"""Actions that are taken several times, for EnvPool: its environments go on one by one, each as long as it has to."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.envs.envpool import EnvPoolPool
from rlframe.metrics.sums import Sums
from rlframe.types import MID, TimeStep


class RepeatingEnvPool:
    """Steps each environment `times` times with its action, but not beyond the end of an episode; rewards add up.

    Args:
        pool: an EnvPool whose environments answer one at a time (`wait_num=1`).
        times: how often an action is taken.
        wait_num: how many environments `recv` waits for; None: all of them at every step, in order (`reset`, `step`).
    """

    def __init__(self, pool: EnvPoolPool, times: int, wait_num: int | None) -> None:
        self._pool, self._times, self._wait_num = pool, times, wait_num or pool.num_envs
        self.num_envs, self.codec = pool.num_envs, pool.codec
        self._env_ids = np.arange(self.num_envs, dtype=np.int32)
        self._actions = np.zeros((self.num_envs, *self.codec.action_spec.shape), self.codec.action_spec.dtype)
        self._left = np.zeros(self.num_envs, np.int64)  # how often more each action is to be taken
        self._reward = np.zeros(self.num_envs, np.float32)

    def reset(self) -> TimeStep:
        self.start()
        return self._recv_all()

    def step(self, actions: np.ndarray) -> TimeStep:
        self.send(self._env_ids, actions)
        return self._recv_all()

    def start(self) -> None:
        self._left[:] = self._reward[:] = 0
        self._pool.start()

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        self._actions[env_ids] = actions
        self._left[env_ids], self._reward[env_ids] = self._times, 0.0
        self._pool.send(env_ids, actions)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """As `EnvPoolPool.recv`."""
        answered: list[tuple[np.ndarray, TimeStep]] = []
        while len(answered) < self._wait_num:
            env_ids, timestep = self._pool.recv()
            self._left[env_ids] -= 1
            self._reward[env_ids] += timestep.reward
            if timestep.step_type[0] == MID and self._left[env_ids[0]] > 0:
                self._pool.send(env_ids, self._actions[env_ids])
            else:
                answered.append((env_ids, timestep._replace(reward=self._reward[env_ids])))
        return np.concatenate([env_ids for env_ids, _ in answered]), self._batch([timestep for _, timestep in answered])

    def _recv_all(self) -> TimeStep:
        env_ids, timestep = self.recv()
        order = np.argsort(env_ids)
        return self._batch([timestep], order)

    def _batch(self, timesteps: list[TimeStep], order: Any = slice(None)) -> TimeStep:
        """Timesteps one after the other as one."""
        layout = self.codec.layout
        observations = zip(*(layout.flatten(timestep.observation) for timestep in timesteps), strict=True)
        numbers = zip(*(timestep[:3] for timestep in timesteps), strict=True)
        leaves = [np.concatenate(parts)[order] for parts in observations]
        step_type, reward, discount = (np.concatenate(parts)[order] for parts in numbers)
        return TimeStep(step_type, reward, discount, layout.unflatten(leaves))

    def get_state(self) -> None:
        """EnvPool cannot save its environments."""

    def set_state(self, states: list[Any]) -> None:
        self._pool.set_state(states)

    def sums(self) -> Sums:
        """EnvPool's environments log nothing."""
        return {}

    def progress(self) -> None:
        """EnvPool does not say how far it is."""

    def close(self) -> None:
        self._pool.close()
