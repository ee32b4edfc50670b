"""The protocols of pools, `EnvPool` and `AsyncEnvPool`, and the common base of `SyncEnv` and `AsyncEnv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from dm_env import specs

from rlframe.envs.checks import DEFAULT_KEY, ActionCheck, FiniteCheck, MaskCheck, mark_mask
from rlframe.envs.codec import Codec
from rlframe.envs.group import ANSWER_TIMEOUT
from rlframe.envs.wrappers import FrameStack
from rlframe.errors import UsageError
from rlframe.interprocess.heartbeat import Phase
from rlframe.metrics.rows import Sums
from rlframe.shutdown import Closeable
from rlframe.types import TimeStep, find_action_mask

_MARGIN = 5.0  # seconds after the answer timeout, in which a pool can raise its own error


@runtime_checkable
class EnvPool(Protocol):
    """A batch of environments that step together. The `env_builder` of an Actor is a pool or returns a pool.

    A pool follows the data contract of `rlframe.types`: it resets each environment on the step after LAST, and the
    discount at LAST is 0 if the environment terminated. `SyncEnv` is a pool. You can write your own pool, for example
    for a batched simulator. A pool may also have `close`, `get_state` and `set_state`, as `SyncEnv` has. If a pool
    changes rewards, it may have an attribute `true_rewards` [num_envs] with the original rewards of the newest
    timestep. The logged episode returns are sums of these rewards.

    Attributes:
      num_envs: number of environments.
    """

    num_envs: int

    def reset(self) -> TimeStep:
        """Start a new episode in every environment and return a FIRST timestep [num_envs, ...]."""

    def step(self, actions: np.ndarray) -> TimeStep:
        """Step all environments with `actions` [num_envs, ...]."""


@runtime_checkable
class AsyncEnvPool(Protocol):
    """A batch of environments that step independently, unlike the environments of an `EnvPool`. Example: `AsyncEnv`.

    Attributes:
      num_envs: number of environments.
      wait_num: number of environments that each `recv` returns.
    """

    num_envs: int
    wait_num: int

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Wait for `wait_num` environments. Return (env_ids [wait_num] int32, timestep [wait_num, ...])."""

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        """Send `actions` [n, ...] to the environments `env_ids` [n]."""


# Defaults for the optional methods of a user's pool. `SyncEnv` describes these methods.
_OPTIONAL: dict[str, Callable[[], Any]] = {
    "get_state": lambda: None,
    "sums": dict,
    "progress": lambda: None,
    "close": lambda: None,
}


class UserPool:
    """A user's `EnvPool` or `AsyncEnvPool`, with defaults for the optional methods."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.is_sync = isinstance(pool, EnvPool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name, _OPTIONAL[name]) if name in _OPTIONAL else getattr(self._pool, name)


class PoolWrapper(Closeable):
    """The common base of `SyncEnv` and `AsyncEnv`: it checks and wraps the timesteps of a pool."""

    def _attach(
        self,
        pool: Any,
        answer_timeout: float = ANSWER_TIMEOUT,
        check_finite: bool | None = None,
        is_native: bool = False,
        frame_stack: int = 1,
        clip_rewards: float | None = None,
        action_mask: str | None = DEFAULT_KEY,
        action_repeat: int = 1,
    ) -> None:
        self._pool = pool
        self._closed = False
        self.num_envs: int = pool.num_envs
        # codec of one environment; its observations are single frames
        self.codec: Codec = mark_mask(pool.codec, action_mask, action_repeat)
        spec = self.codec.observation_spec
        self._stack = FrameStack(frame_stack, spec, pool.num_envs) if frame_stack > 1 else None
        self._clip_rewards = clip_rewards
        self.true_rewards: np.ndarray | None = None  # [B] unclipped rewards of the newest timestep
        self.observation_spec = spec if self._stack is None else self._stack.observation_spec
        self.action_spec: specs.Array = self.codec.action_spec
        self.answer_timeout = answer_timeout
        self._check_actions = ActionCheck(self.action_spec, every_value=is_native)
        checks = not is_native if check_finite is None else check_finite
        self._check_finite = FiniteCheck(spec) if checks else None
        self._check_masks = MaskCheck(spec) if find_action_mask(spec)[1] is not None else None

    def _finish(self, timestep: TimeStep, env_ids: np.ndarray | None = None) -> TimeStep:
        """Check a timestep [B, ...], clip its rewards and stack its frames.

        Args:
          timestep: the timestep of the pool.
          env_ids: [B] ids of the environments; None means all environments in order.
        """
        if self._check_finite is not None:
            self._check_finite(timestep, env_ids)
        if self._check_masks is not None:
            self._check_masks(timestep, env_ids)
        if self._clip_rewards is not None:
            self.true_rewards = timestep.reward
            timestep = timestep._replace(reward=np.clip(timestep.reward, -self._clip_rewards, self._clip_rewards))
        return timestep if self._stack is None else self._stack(timestep, env_ids)

    def sums(self) -> Sums:
        """Return a dict of name -> [sum, count] for the numbers that environments logged. Any thread may call this."""
        return self._pool.sums()

    def progress(self) -> Any:
        """Return a value that changes with each step of an environment. Any thread may call this method.

        For EnvPool the value never changes.
        """
        return self._pool.progress()

    def close(self) -> None:
        """End every thread and process of the pool. Repeated calls are allowed."""
        if not self._closed:
            self._closed = True
            self._pool.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("This environment pool is closed: make a new one.")


def true_rewards(env: Any, timestep: TimeStep) -> np.ndarray:
    """Return the rewards [B] of a pool's newest timestep before clipping."""
    rewards = getattr(env, "true_rewards", None)
    return timestep.reward if rewards is None else rewards


def stepping_phase(env: Any) -> Phase:
    """Return the phase in which a caller waits for a pool, for the detection of hung processes.

    The phase allows a step more time than the pool's `answer_timeout`, so that the pool raises its own error first.
    """
    allowed = getattr(env, "answer_timeout", ANSWER_TIMEOUT) + _MARGIN
    return Phase("stepping", allowed, getattr(env, "progress", None))
