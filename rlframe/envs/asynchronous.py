"""AsyncEnv: many environments of which some are ready at any time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.envs.group import ANSWER_TIMEOUT
from rlframe.envs.pool import PoolHandle
from rlframe.envs.sync import check_arguments, make_pool, pool_type
from rlframe.envs.wrappers import check_wrappers
from rlframe.errors import UsageError
from rlframe.types import TimeStep

ASYNC_TYPES = ("thread", "process", "envpool")


class AsyncEnv(PoolHandle):
    """`size` environments, `wait_num` of which answer at a time: the slow ones hold nobody up.

    Args:
      wait_num: how many environments `recv` waits for, 1 to `size`.
      type: "thread", "process" or "envpool", or a phrase for one of these, as for `SyncEnv`.

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
        answer_timeout: float = ANSWER_TIMEOUT,
        check_finite: bool | None = None,
        frame_stack: int = 1,
        action_repeat: int = 1,
        clip_rewards: float | None = None,
    ):
        type = pool_type(type, ASYNC_TYPES)
        check_arguments(size, seed, num_workers, answer_timeout)
        if not isinstance(wait_num, (int, np.integer)) or not 1 <= wait_num <= size:
            raise UsageError(f"wait_num must be between 1 and the size, {size}, got {wait_num!r}.")
        check_wrappers(frame_stack, action_repeat, clip_rewards)
        pool = make_pool(
            name_or_pybuilder, size, wait_num, type, seed, num_workers, env_kwargs, answer_timeout, action_repeat
        )
        self._attach(pool, answer_timeout, check_finite, type == "envpool", frame_stack, clip_rewards)
        self.wait_num = wait_num
        self._started = False
        self._idle: set[int] = set()  # received, but not sent to since: what `send` may name

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Waits for `wait_num` environments: (env_ids [wait_num] int32, their timesteps [wait_num, ...])."""
        self._check_open()
        if not self._started:
            self._pool.start()
            self._started = True
        num_running = self.num_envs - len(self._idle)
        if num_running < self.wait_num:
            raise UsageError(
                f"recv() waits for {self.wait_num} environments, but only {num_running} were sent an action "
                "and not received since: send() to those that were received first."
            )
        env_ids, timestep = self._pool.recv()
        self._idle.update(env_ids.tolist())
        return env_ids, self._finish(timestep, env_ids)

    def send(self, env_ids: Any, actions: Any) -> None:
        """Gives `actions` [n, ...] to the environments `env_ids` [n], which were received and not sent to since.

        Ids and actions that do not fit (see `rlframe.envs.checks`) are refused before anything is sent.
        """
        self._check_open()
        env_ids = np.asarray(env_ids)
        if env_ids.ndim != 1 or env_ids.dtype.kind not in "iu":
            raise UsageError(f"'env_ids' must be [n] integers, got {env_ids.dtype} of shape {env_ids.shape}.")
        ids = env_ids.tolist()
        named = set(ids)
        if len(named) != len(ids) or not named <= self._idle:
            self._refuse(ids)
        actions = self._check_actions(actions, len(ids))
        self._idle -= named
        self._pool.send(env_ids.astype(np.int32), actions)

    def _refuse(self, ids: list[int]) -> None:
        """Raises UsageError for the first of `ids` that cannot be sent to."""
        for place, env_id in enumerate(ids):
            if not 0 <= env_id < self.num_envs:
                raise UsageError(f"send() to environment {env_id}: the ids are 0 to {self.num_envs - 1}.")
            if env_id in ids[:place]:
                raise UsageError(f"send() to environment {env_id} twice in one call: give each one action.")
            if env_id not in self._idle:
                raise UsageError(
                    f"send() to environment {env_id}, which was not received since its last action: recv() it first."
                )

    def get_state(self) -> None:
        """None: environments that are in the middle of a step cannot be saved."""

    def set_state(self, state: bytes) -> None:
        raise UsageError("An AsyncEnv cannot restore a state: use a SyncEnv of type 'loop' or 'process'.")
