"""Pools of environments: what an Actor needs of one, and what `SyncEnv` and `AsyncEnv` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from dm_env import specs

from rlframe.envs.checks import ActionCheck, FiniteCheck
from rlframe.envs.codec import Codec
from rlframe.envs.group import ANSWER_TIMEOUT
from rlframe.envs.wrappers import FrameStack
from rlframe.errors import UsageError
from rlframe.interprocess.phases import Phase
from rlframe.metrics.rows import Sums
from rlframe.shutdown import Closeable
from rlframe.types import TimeStep

_LATER = 5.0  # seconds by which a pool that hangs may raise later than it should


@runtime_checkable
class EnvPool(Protocol):
    """Many environments as one batch, all stepped together: what an Actor's `env_builder` is, or returns.

    It obeys the data contract of `rlframe.types`: it resets an environment by itself on the step after LAST, and says
    by the discount at LAST whether the environment terminated. `SyncEnv` is one; so are those that you write, say
    around a simulator that is batched itself. It may have `close`, `get_state` and `set_state`, as `SyncEnv` has, and
    `true_rewards` [num_envs] of its newest timestep, where it gives other rewards: returns are logged of these.

    Attributes:
      num_envs: how many environments.
    """

    num_envs: int

    def reset(self) -> TimeStep:
        """Starts a new episode everywhere: a FIRST timestep [num_envs, ...]."""

    def step(self, actions: np.ndarray) -> TimeStep:
        """Steps all environments with `actions` [num_envs, ...]."""


@runtime_checkable
class AsyncEnvPool(Protocol):
    """Many environments, of which some answer at a time: the other form of an `EnvPool`. `AsyncEnv` is one.

    Attributes:
      num_envs: how many environments.
      wait_num: how many answer at a time.
    """

    num_envs: int
    wait_num: int

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Waits for `wait_num` environments: (env_ids [wait_num] int32, their timesteps [wait_num, ...])."""

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        """Gives `actions` [n, ...] to the environments `env_ids` [n]."""


# The methods that a user's pool may leave out (see `SyncEnv`), each with what stands for it.
_OPTIONAL: dict[str, Callable[[], Any]] = {
    "get_state": lambda: None,
    "sums": dict,
    "progress": lambda: None,
    "close": lambda: None,
}


class UserPool:
    """A user's `EnvPool` or `AsyncEnvPool` with the methods that it may leave out."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.is_sync = isinstance(pool, EnvPool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name, _OPTIONAL[name]) if name in _OPTIONAL else getattr(self._pool, name)


class PoolWrapper(Closeable):
    """Holds a pool, shows its specs, and closes it."""

    def _attach(
        self,
        pool: Any,
        answer_timeout: float = ANSWER_TIMEOUT,
        check_finite: bool | None = None,
        is_native: bool = False,
        frame_stack: int = 1,
        clip_rewards: float | None = None,
    ) -> None:
        self._pool = pool
        self._closed = False
        self.num_envs: int = pool.num_envs
        self.codec: Codec = pool.codec  # of one environment, before frames are stacked
        spec = self.codec.observation_spec
        self._stack = FrameStack(frame_stack, spec, pool.num_envs) if frame_stack > 1 else None
        self._clip_rewards = clip_rewards
        self.true_rewards: np.ndarray | None = None  # [B] of the newest timestep, before they were clipped
        self.observation_spec = spec if self._stack is None else self._stack.observation_spec
        self.action_spec: specs.Array = self.codec.action_spec
        self.answer_timeout = answer_timeout
        self._check_actions = ActionCheck(self.action_spec, every_value=is_native)
        checks = not is_native if check_finite is None else check_finite
        self._check_finite = FiniteCheck(spec) if checks else None

    def _finish(self, timestep: TimeStep, env_ids: np.ndarray | None = None) -> TimeStep:
        """What the caller gets of a timestep [B, ...] of the environments `env_ids` [B]; None: of all."""
        if self._check_finite is not None:
            self._check_finite(timestep, env_ids)
        if self._clip_rewards is not None:
            self.true_rewards = timestep.reward
            timestep = timestep._replace(reward=np.clip(timestep.reward, -self._clip_rewards, self._clip_rewards))
        return timestep if self._stack is None else self._stack(timestep, env_ids)

    def sums(self) -> Sums:
        """What the environments logged since they were made: name -> [sum, count]. Any thread may ask, at any time."""
        return self._pool.sums()

    def progress(self) -> Any:
        """Compares as equal for as long as no environment gets on (always, of EnvPool). Any thread may ask."""
        return self._pool.progress()

    def close(self) -> None:
        """Ends every thread and process of the pool. May be called twice."""
        if not self._closed:
            self._closed = True
            self._pool.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("This environment pool is closed: make a new one.")


def true_rewards(env: Any, timestep: TimeStep) -> np.ndarray:
    """The rewards [B] that the environments of a pool gave with its newest timestep, before any were clipped."""
    rewards = getattr(env, "true_rewards", None)
    return timestep.reward if rewards is None else rewards


def stepping_phase(env: Any) -> Phase:
    """The phase of who waits for a pool, in which each environment has its answer time.

    Pools that see for themselves that an environment of theirs hangs are the first to, and name it.
    """
    allowed = getattr(env, "answer_timeout", ANSWER_TIMEOUT) + _LATER
    return Phase("stepping", allowed, getattr(env, "progress", None))
