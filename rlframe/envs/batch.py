"""`SyncEnv` steps a batch of environments together. `AsyncEnv` steps each environment of a batch independently."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.envs.adapters import env_seed, is_environment, wrap
from rlframe.envs.checks import DEFAULT_KEY
from rlframe.envs.envpool import ActionRepeatEnvPool, EnvPoolAdapter
from rlframe.envs.group import ANSWER_TIMEOUT, EnvGroup, LoopPool, build_group, build_groups
from rlframe.envs.jax_envs import make_jax_env
from rlframe.envs.names import Builder, describe, is_jax, takes_seed
from rlframe.envs.pool import AsyncEnvPool, EnvPool, PoolWrapper, UserPool
from rlframe.envs.process import AsyncProcesses, ProcessPool
from rlframe.envs.remote import RemoteAsyncEnv, RemoteEnv, ServedSpecs
from rlframe.envs.thread import AsyncThreads, ThreadPool
from rlframe.errors import UsageError, suggest
from rlframe.types import TimeStep

ASYNC_TYPES = ("thread", "process", "envpool")
SYNC_TYPES = ("loop", *ASYNC_TYPES, "jax")
# Alias in the design document -> type.
_ALIASES = {
    "python for loop": "loop",
    "python thread": "thread",
    "python multiprocess": "process",
    "c++ threadpool": "envpool",
}


class SyncEnv(PoolWrapper):
    """`size` environments that step together, with the data contract of `rlframe.types`: auto-reset, discounts, dtypes.

    Args:
      name_or_pybuilder: a name (see `rlframe.envs.names`) or a callable that returns one gymnasium or dm_env
        environment. The callable receives `seed` if its signature has this argument.
      size: number of environments, at least 1.
      type: "loop" (one after another), "thread", "process" (Python workers), "envpool" (C++ threads, only for names) or
        "jax" (one jitted call, only for JAX environments, see `rlframe.envs.jax_env.JaxEnv`); or one of the aliases
        "python for loop", "python thread", "python multiprocess" and "c++ threadpool".
      seed: the seed of environment i is a hash of (seed, i), so all Python types produce the same episodes.
      num_workers: number of threads or processes; None means one for each core that this process may use.
      env_kwargs: options of the environment, or of EnvPool.
      answer_timeout: seconds that one step may take in a thread or process. After a longer step, an EnvError reports
        that the environment hangs. The types "loop", "envpool" and "jax" have no timeout.
      frame_stack: number of newest observations that are stacked into one observation; see `FrameStack`.
      action_repeat: number of steps for each action, until the episode ends. The rewards are summed.
      clip_rewards: rewards are clipped to [-clip_rewards, clip_rewards]; None means no clipping. `true_rewards` [B]
        contains the unclipped rewards of the newest timestep.
      check_finite: whether to raise EnvError with the environment's id for NaN and infinity in rewards and
        observations. None means True, except for EnvPool, whose fast steps would take 10 % more time.
      action_mask: key of the action mask in a dict observation (docs/howto/action-masks.md). The default key may be
        absent. None means that the observations have no mask.

    Raises:
      UsageError: a name, type or option is unknown, the environments have different specs, or an action is invalid.
      EnvError: an environment raised or its process died. The message contains the environment's id.

    `observation_spec` (a tree) and `action_spec` are `dm_env.specs` of ONE environment. The arrays that `reset` and
    `step` return belong to the caller: they do not change while the caller refers to them.
    """

    is_sync = True

    def __init__(
        self,
        name_or_pybuilder: Any,
        size: int,
        type: str = "loop",
        *,
        seed: int = 0,
        num_workers: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        answer_timeout: float = ANSWER_TIMEOUT,
        check_finite: bool | None = None,
        frame_stack: int = 1,
        action_repeat: int = 1,
        clip_rewards: float | None = None,
        action_mask: str | None = DEFAULT_KEY,
    ):
        type = pool_type(type, SYNC_TYPES)
        check_options(size, seed, num_workers, answer_timeout, frame_stack, action_repeat, clip_rewards)
        pool = make_pool(
            name_or_pybuilder, size, None, type, seed, num_workers, env_kwargs, answer_timeout, action_repeat
        )
        is_native = type == "envpool"
        self._attach(
            pool, answer_timeout, check_finite, is_native, frame_stack, clip_rewards, action_mask, action_repeat
        )

    @classmethod
    def from_env(cls, env: Any, *, seed: int = 0, check_finite: bool = True) -> SyncEnv:
        """Return a pool of size 1 with an existing environment."""
        pool = cls.__new__(cls)
        pool._attach(LoopPool(EnvGroup([wrap(env)], [env_seed(seed, 0)], 0)), check_finite=check_finite)
        return pool

    def reset(self) -> TimeStep:
        """Start a new episode in every environment and return a FIRST timestep [B, ...]."""
        self._check_open()
        return self._finish(self._pool.reset())

    def step(self, actions: Any) -> TimeStep:
        """Step all environments with `actions` [B, ...]. An environment at LAST ignores the action and returns FIRST.

        If an action is invalid (see `rlframe.envs.checks`), raise UsageError and step no environment.
        """
        self._check_open()
        return self._finish(self._pool.step(self._check_actions(actions, self.num_envs)))

    def get_state(self) -> bytes | None:
        """Return the state of all environments. Return None if an environment cannot be saved.

        Environments with EnvPool, EzPickle or native handles cannot be saved. Pools of the types "loop", "thread" and
        "process" can restore the state. It does not include the state of global random generators (`np.random`).
        """
        self._check_open()
        states = self._pool.get_state()
        if states is None:
            return None
        return pickle.dumps(states if self._stack is None else (states, self._stack.get_state()))

    def set_state(self, state: bytes) -> None:
        """Restore a state from `get_state`. The caller must save the newest timestep separately.

        The state is a pickle, which can run code: load only states that you saved.
        """
        self._check_open()
        states = pickle.loads(state)
        if self._stack is not None:
            states, frames = states
            self._stack.set_state(frames)
        if len(states) != self.num_envs:
            raise UsageError(f"The state holds {len(states)} environments, but this pool has {self.num_envs}.")
        self._pool.set_state(states)


class AsyncEnv(PoolWrapper):
    """`size` environments that step independently, so that a slow environment does not delay other environments.

    Args:
      wait_num: number of environments that `recv` waits for, from 1 to `size`.
      type: "thread", "process", "envpool", or an alias of one of these types (see `SyncEnv`).

    `SyncEnv` describes all other arguments, the specs, the errors and the data contract. The first calls of `recv`
    return the FIRST timestep of every environment.
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
        action_mask: str | None = DEFAULT_KEY,
    ):
        type = pool_type(type, ASYNC_TYPES)
        check_options(size, seed, num_workers, answer_timeout, frame_stack, action_repeat, clip_rewards)
        if not isinstance(wait_num, (int, np.integer)) or not 1 <= wait_num <= size:
            raise UsageError(f"wait_num must be between 1 and the size, {size}, got {wait_num!r}.")
        pool = make_pool(
            name_or_pybuilder, size, wait_num, type, seed, num_workers, env_kwargs, answer_timeout, action_repeat
        )
        is_native = type == "envpool"
        self._attach(
            pool, answer_timeout, check_finite, is_native, frame_stack, clip_rewards, action_mask, action_repeat
        )
        self.wait_num = wait_num
        self._started = False
        # Ids that `recv` has returned and that have no action yet. `send` accepts only these ids.
        self._idle: set[int] = set()

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Wait for `wait_num` environments. Return (env_ids [wait_num] int32, timestep [wait_num, ...])."""
        self._check_open()
        if not self._started:
            self._pool.start()
            self._started = True
        num_running = self.num_envs - len(self._idle)
        if num_running < self.wait_num:
            raise UsageError(
                f"recv() waits for {self.wait_num} environments, but the number of environments that are stepping is "
                f"{num_running}: call send() for the received environments first."
            )
        env_ids, timestep = self._pool.recv()
        self._idle.update(env_ids.tolist())
        return env_ids, self._finish(timestep, env_ids)

    def send(self, env_ids: Any, actions: Any) -> None:
        """Send `actions` [n, ...] to the environments `env_ids` [n]. `recv` must have returned their latest timesteps.

        If an id or action is invalid (see `rlframe.envs.checks`), raise UsageError and send no action.
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
        """Raise UsageError for the first id that cannot receive an action."""
        for place, env_id in enumerate(ids):
            if not 0 <= env_id < self.num_envs:
                raise UsageError(f"send() to environment {env_id}: expected an id from 0 to {self.num_envs - 1}.")
            if env_id in ids[:place]:
                raise UsageError(f"send() to environment {env_id} twice in one call: send one action to each.")
            if env_id not in self._idle:
                raise UsageError(
                    f"send() to environment {env_id}, which is still stepping: receive it with recv() first."
                )

    def get_state(self) -> None:
        """Return None, because environments cannot be saved during a step."""

    def set_state(self, state: bytes) -> None:
        raise UsageError("An AsyncEnv cannot restore a state: use a SyncEnv of type 'loop' or 'process'.")


def as_pool(env: Any, *, seed: int = 0, deadline: float = handles.DEADLINE, stop: threading.Event | None = None) -> Any:
    """Return a pool for any value that may be an `env_builder`.

    Args:
      env: one of these:
        a `SyncEnv` or `AsyncEnv`, which is returned unchanged;
        a user's `EnvPool` or `AsyncEnvPool`;
        one gymnasium or dm_env environment, which becomes a SyncEnv of size 1;
        a callable that returns one of the above. The callable receives `seed` if its signature has this argument;
        a handle to an `EnvServer`, or a list of handles to `EnvServer`s of `AsyncEnv`s. `seed` has no effect on these.
      seed: seed for the builder.
      deadline: seconds after which a call to an `EnvServer` fails; see `handles.resolve`.
      stop: event that ends the retries of a call; see `handles.resolve`.

    Raises:
      UsageError: `env` has another type. The message lists the missing methods.
    """
    listed = list(env) if isinstance(env, (list, tuple)) and env else [env]
    listed = [handles.resolve(one, "EnvServer", deadline=deadline, stop=stop) for one in listed]
    if all(isinstance(one, handles.Remote) for one in listed):
        served = [(server, ServedSpecs(*server.specs())) for server in listed]
        if len(served) == 1 and served[0][1].wait_num is None:
            return UserPool(RemoteEnv(*served[0]))
        return UserPool(RemoteAsyncEnv(served))
    env = env if isinstance(env, (list, tuple)) else listed[0]
    if hasattr(env, "is_sync"):
        return env
    if hasattr(env, "single_observation_space"):
        raise UsageError(
            f"{type(env).__name__} is a vector environment of gymnasium.vector, which has another format of timesteps. "
            "Use SyncEnv(env, size), where env is the name of the task or a callable that returns one environment."
        )
    if is_environment(env):
        return SyncEnv.from_env(env, seed=seed)
    if not isinstance(env, type) and isinstance(env, (EnvPool, AsyncEnvPool)):
        return UserPool(env)
    if callable(env):
        built = env(seed=seed) if takes_seed(env) else env()
        return as_pool(built, seed=seed, deadline=deadline, stop=stop)
    if isinstance(env, str):
        raise UsageError(f"{env!r} is the name of an environment: expected a pool. Pass SyncEnv({env!r}, size).")
    missing = [name for name in ("num_envs", "reset", "step") if not hasattr(env, name)]
    lacks = f" A pool also needs {', '.join(missing)}." if len(missing) < 3 else ""
    raise UsageError(
        f"Expected a pool, an environment or a callable that returns one, got {type(env).__name__}.{lacks}"
    )


def pool_type(type: Any, types: tuple[str, ...]) -> str:
    """Return the pool type for a type name or an alias. Raise UsageError if the type is not in `types`."""
    aliases = {alias: name for alias, name in _ALIASES.items() if name in types}
    name = aliases.get(type.lower(), type) if isinstance(type, str) else type
    if name not in types:
        raise UsageError(f"type must be one of {types}, got {type!r}.{suggest(str(type), (*types, *aliases))}")
    return name


def check_options(
    size: Any,
    seed: Any,
    num_workers: Any,
    answer_timeout: float,
    frame_stack: Any,
    action_repeat: Any,
    clip_rewards: float | None,
) -> None:
    """Raise UsageError for options outside their ranges."""
    whole = {"size": (size, 1), "seed": (seed, 0), "frame_stack": (frame_stack, 1), "action_repeat": (action_repeat, 1)}
    for name, (value, least) in whole.items():
        if not isinstance(value, (int, np.integer)) or value < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    if num_workers is not None and num_workers < 1:
        raise UsageError(f"num_workers must be at least 1, or None for one per core; got {num_workers!r}.")
    if not 0 < answer_timeout <= threading.TIMEOUT_MAX:
        raise UsageError(f"answer_timeout must be a number of seconds above 0, got {answer_timeout!r}.")
    if clip_rewards is not None and not clip_rewards > 0:
        raise UsageError(f"clip_rewards must be above 0, or None for unclipped rewards; got {clip_rewards!r}.")


def split_evenly(size: int, num_workers: int) -> list[tuple[int, int]]:
    """Return the range (start, stop) of environments for each worker. The range sizes differ by at most 1."""
    bounds = [round(worker * size / num_workers) for worker in range(num_workers + 1)]
    return list(itertools.pairwise(bounds))


def make_pool(
    name_or_pybuilder: Any,
    size: int,
    wait_num: int | None,
    type: str,
    seed: int,
    num_workers: int | None,
    env_kwargs: Mapping[str, Any] | None,
    answer_timeout: float,
    action_repeat: int = 1,
) -> Any:
    """Return a pool of a type: an asynchronous pool if `wait_num` is not None, else a synchronous pool."""
    if type == "envpool":
        if not isinstance(name_or_pybuilder, str):
            raise UsageError(
                "type='envpool' requires the name of an EnvPool task, not a builder: use 'loop', 'thread' or 'process'."
            )
        options = name_or_pybuilder, size, wait_num, seed, num_workers, env_kwargs
        return ActionRepeatEnvPool(action_repeat, *options) if action_repeat > 1 else EnvPoolAdapter(*options)
    if type == "jax":
        if num_workers is not None:
            raise UsageError("type='jax' steps all environments in one call: leave num_workers out.")
        from rlframe.envs.jax_pool import JaxPool

        return JaxPool(make_jax_env(name_or_pybuilder, env_kwargs or {}), size, seed, action_repeat=action_repeat)
    if is_jax(name_or_pybuilder):
        raise UsageError(f"{describe(name_or_pybuilder)} is a JAX environment: use type 'jax', not {type!r}.")
    builder = Builder(name_or_pybuilder, seed, env_kwargs, action_repeat)
    if type == "loop":
        return LoopPool(build_group(builder, 0, size))
    workers = min(size, num_workers or len(os.sched_getaffinity(0)))
    slices = split_evenly(size, workers)
    if type == "process":
        if wait_num is not None:
            return AsyncProcesses(builder, slices, wait_num, answer_timeout)
        return ProcessPool(builder, slices, answer_timeout)
    if wait_num is not None:
        return AsyncThreads(build_group(builder, 0, size), wait_num, workers, answer_timeout)
    return ThreadPool(build_groups(builder, slices), answer_timeout)
