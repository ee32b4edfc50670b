"""AsyncEnv: many environments of which some are ready at any time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.envs.envpool import EnvPoolAsync
from rlframe.envs.group import build_group
from rlframe.envs.handle import PoolHandle
from rlframe.envs.names import Builder
from rlframe.envs.process import AsyncProcesses
from rlframe.envs.sync import check_actions, check_arguments, refuse_builder, split_among, workers_for
from rlframe.envs.thread import AsyncThreads
from rlframe.errors import UsageError
from rlframe.types import TimeStep

ASYNC_TYPES = ("thread", "process", "envpool")


class AsyncEnv(PoolHandle):
    """`size` environments, `wait_num` of which answer at a time: the slow ones hold nobody up.

    Args:
      wait_num: how many environments `recv` waits for, 1 to `size`.
      type: "thread", "process" or "envpool".

    The other arguments, the specs and the errors are those of `SyncEnv`. Each environment's steps obey the same
    contract: auto-reset, discounts, dtypes. The first `recv`s give the FIRST timestep of every environment.
    """

    is_sync = False

    def __init__(
        self,
        name_or_pybuilder: Any,
        size: int,
        wait_num: int,
        type: str = "thread",
        *,
        seed: int = 0,
        num_workers: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ):
        check_arguments(size, type, ASYNC_TYPES, seed, num_workers)
        if not isinstance(wait_num, (int, np.integer)) or not 1 <= wait_num <= size:
            raise UsageError(f"wait_num must be between 1 and the size, {size}, got {wait_num!r}.")
        self._attach(_make_pool(name_or_pybuilder, size, wait_num, type, seed, num_workers, env_kwargs))
        self.wait_num = wait_num
        self._started = False
        self._running = np.zeros(size, np.bool_)  # sent to, but not yet received
        self._num_running = 0

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Waits for `wait_num` environments: (env_ids [wait_num] int32, their timesteps [wait_num, ...])."""
        if not self._started:
            self._check_open()
            self._pool.start()
            self._started = True
            self._running[:] = True
            self._num_running = self.num_envs
        if self._num_running < self.wait_num:
            raise UsageError(
                f"recv() waits for {self.wait_num} environments, but only {self._num_running} were sent an action "
                "and not received since: send() to those that were received first."
            )
        env_ids, timestep = self._pool.recv()
        self._running[env_ids] = False
        self._num_running -= self.wait_num
        return env_ids, timestep

    def send(self, env_ids: Any, actions: Any) -> None:
        """Gives `actions` [n, ...] to the environments `env_ids` [n], which were received and not sent to since."""
        env_ids, actions = np.asarray(env_ids, np.int32), np.asarray(actions)
        if not self._checked:
            self._check_open()
            check_actions(actions, len(env_ids), self.action_spec)
            self._checked = True
        if not self._started or self._running[env_ids].any():
            raise UsageError("send() to an environment that was not received since its last action: recv() first.")
        self._running[env_ids] = True
        self._num_running += len(env_ids)
        self._pool.send(env_ids, actions)

    def get_state(self) -> None:
        """None: environments that are in the middle of a step cannot be saved."""

    def set_state(self, state: bytes) -> None:
        raise UsageError("An AsyncEnv cannot restore a state: use a SyncEnv of type 'loop' or 'process'.")

    def close(self) -> None:
        """Ends every thread and process of the pool. May be called twice."""
        self._started = False
        super().close()


def _make_pool(
    name_or_pybuilder: Any,
    size: int,
    wait_num: int,
    type: str,
    seed: int,
    num_workers: int | None,
    env_kwargs: Mapping[str, Any] | None,
) -> Any:
    if type == "envpool":
        refuse_builder(name_or_pybuilder)
        return EnvPoolAsync(name_or_pybuilder, size, wait_num, seed, num_workers, env_kwargs)
    builder = Builder(name_or_pybuilder, seed, env_kwargs)
    workers = workers_for(size, num_workers)
    if type == "thread":
        return AsyncThreads(build_group(builder, builder.seed_of, 0, size), wait_num, workers)
    return AsyncProcesses(builder, split_among(size, workers), wait_num)
