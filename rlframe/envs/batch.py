"""SyncEnv and AsyncEnv: many environments as one batch, stepped all together or whichever are ready."""

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
from rlframe.envs.envpool import ActionRepeatEnvPool, EnvPoolAdapter
from rlframe.envs.group import ANSWER_TIMEOUT, EnvGroup, LoopPool, build_group, build_groups
from rlframe.envs.names import Builder, takes_seed
from rlframe.envs.pool import AsyncEnvPool, EnvPool, PoolWrapper, UserPool
from rlframe.envs.process import AsyncProcesses, ProcessPool
from rlframe.envs.remote import RemoteAsyncEnv, RemoteEnv, ServedSpecs
from rlframe.envs.thread import AsyncThreads, ThreadPool
from rlframe.errors import UsageError, suggest
from rlframe.types import TimeStep

SYNC_TYPES = ("loop", "thread", "process", "envpool")
ASYNC_TYPES = SYNC_TYPES[1:]
# The design document's phrases for them, which work as well.
_PHRASES = {
    "python for loop": "loop",
    "python thread": "thread",
    "python multiprocess": "process",
    "c++ threadpool": "envpool",
}


class SyncEnv(PoolWrapper):
    """`size` environments in lock step. Obeys the data contract of `rlframe.types` (auto-reset, discounts, dtypes).

    Args:
      name_or_pybuilder: a name (see `rlframe.envs.names`) or a callable that returns one gymnasium or dm_env
        environment; it is given `seed=` where its signature has that.
      size: how many environments, at least 1.
      type: "loop" (one after another), "thread", "process" (Python workers) or "envpool" (C++ threads; names only);
        or "python for loop", "python thread", "python multiprocess", "c++ threadpool".
      seed: environment i is seeded from (seed, i), so every Python type gives the same streams.
      num_workers: threads or processes; the cores that this process may use, if None.
      env_kwargs: options of the environment or of EnvPool.
      answer_timeout: seconds that an environment may take for a step in a thread or process before it counts as hung:
        an EnvError names it. A loop and EnvPool have no such limit.
      frame_stack: how many observations each one is made of, its own and those before; see `FrameStack`.
      action_repeat: how often each action is taken, up to the end of an episode; rewards add up.
      clip_rewards: rewards are clipped to between minus this and this; None: they are not. `true_rewards` [B] holds
        those of the newest timestep before that.
      check_finite: whether NaN and infinity in a reward or an observation is an EnvError that names the environment;
        None: but for EnvPool, a light step of which would take a tenth more time.

    Raises UsageError for unknown names, types and options, for environments that differ, and for actions that do not
    fit; EnvError, naming the environment, where one raises or its process dies.

    `observation_spec` and `action_spec` are `dm_env.specs` (trees of them) of ONE environment. Arrays that `reset` and
    `step` return are the caller's own: they are never written again while anything refers to them.
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
    ):
        type = pool_type(type, SYNC_TYPES)
        check_options(size, seed, num_workers, answer_timeout, frame_stack, action_repeat, clip_rewards)
        pool = make_pool(
            name_or_pybuilder, size, None, type, seed, num_workers, env_kwargs, answer_timeout, action_repeat
        )
        self._attach(pool, answer_timeout, check_finite, type == "envpool", frame_stack, clip_rewards)

    @classmethod
    def from_env(cls, env: Any, *, seed: int = 0) -> SyncEnv:
        """A batch of one, around an environment that is there already."""
        pool = cls.__new__(cls)
        pool._attach(LoopPool(EnvGroup([wrap(env)], [env_seed(seed, 0)], 0)))
        return pool

    def reset(self) -> TimeStep:
        """Starts a new episode everywhere: a FIRST timestep [B, ...]."""
        self._check_open()
        return self._finish(self._pool.reset())

    def step(self, actions: Any) -> TimeStep:
        """Steps all environments with `actions` [B, ...]; those that were LAST ignore theirs and give FIRST.

        Actions that do not fit (see `rlframe.envs.checks`) are refused before any environment steps.
        """
        self._check_open()
        return self._finish(self._pool.step(self._check_actions(actions, self.num_envs)))

    def get_state(self) -> bytes | None:
        """All environments with their state, or None where they cannot save it (EnvPool, EzPickle, native handles).

        A pool of any Python type restores it. Randomness outside the environments (`np.random`) is not in it.
        """
        self._check_open()
        states = self._pool.get_state()
        if states is None:
            return None
        return pickle.dumps(states if self._stack is None else (states, self._stack.get_state()))

    def set_state(self, state: bytes) -> None:
        """Continues as the pool that gave `state` would have; the caller keeps the timestep that goes with it.

        The state is a pickle: load only what you saved.
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
        check_options(size, seed, num_workers, answer_timeout, frame_stack, action_repeat, clip_rewards)
        if not isinstance(wait_num, (int, np.integer)) or not 1 <= wait_num <= size:
            raise UsageError(f"wait_num must be between 1 and the size, {size}, got {wait_num!r}.")
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


def as_pool(env: Any, *, seed: int = 0, deadline: float = handles.DEADLINE, stop: threading.Event | None = None) -> Any:
    """A pool of whatever an `env_builder` is or returns.

    Args:
      env: a pool (a `SyncEnv` or `AsyncEnv` is returned as it is; one of your own is an `EnvPool` or `AsyncEnvPool`),
        one gymnasium or dm_env environment (becomes a SyncEnv of size 1), or a callable that returns one of those; it
        is given `seed=` where its signature has that; or a handle to an `EnvServer`, which has a seed of its own, or a
        list of handles to several, each of an `AsyncEnv`.
      seed: for the builder.
      deadline, stop: for the calls to an `EnvServer`, as of `handles.resolve`.

    Raises:
      UsageError: it is none of these; the message says what it lacks.
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
            f"{type(env).__name__} is one of gymnasium.vector, whose timesteps have other rules. Give SyncEnv the name "
            "of the task, or a callable that returns one environment, and a size."
        )
    if is_environment(env):
        return SyncEnv.from_env(env, seed=seed)
    if not isinstance(env, type) and isinstance(env, (EnvPool, AsyncEnvPool)):
        return UserPool(env)
    if callable(env):
        built = env(seed=seed) if takes_seed(env) else env()
        return as_pool(built, seed=seed, deadline=deadline, stop=stop)
    if isinstance(env, str):
        raise UsageError(f"{env!r} names an environment, but not how many: use SyncEnv({env!r}, size).")
    missing = [name for name in ("num_envs", "reset", "step") if not hasattr(env, name)]
    lacks = f" As a pool it lacks {', '.join(missing)}." if len(missing) < 3 else ""
    raise UsageError(
        f"Expected a pool, an environment or a callable that returns one, got {type(env).__name__}.{lacks}"
    )


def pool_type(type: Any, types: tuple[str, ...]) -> str:
    """Return the type that a name or a phrase of the design document stands for.

    Raises:
      UsageError: it is none of `types`.
    """
    phrases = {phrase: name for phrase, name in _PHRASES.items() if name in types}
    name = phrases.get(type.lower(), type) if isinstance(type, str) else type
    if name not in types:
        raise UsageError(f"type must be one of {types}, got {type!r}.{suggest(str(type), (*types, *phrases))}")
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
    """Raise UsageError for options that no pool can have."""
    whole = {"size": (size, 1), "seed": (seed, 0), "frame_stack": (frame_stack, 1), "action_repeat": (action_repeat, 1)}
    for name, (value, least) in whole.items():
        if not isinstance(value, (int, np.integer)) or value < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    if num_workers is not None and num_workers < 1:
        raise UsageError(f"num_workers must be at least 1 (or None: the cores), got {num_workers!r}.")
    if not 0 < answer_timeout <= threading.TIMEOUT_MAX:
        raise UsageError(f"answer_timeout must be a number of seconds above 0, got {answer_timeout!r}.")
    if clip_rewards is not None and not clip_rewards > 0:
        raise UsageError(f"clip_rewards must be above 0 (or None: rewards as they are), got {clip_rewards!r}.")


def split_evenly(size: int, num_workers: int) -> list[tuple[int, int]]:
    """(start, stop) of each worker's share, as even as can be, in order."""
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
    """The pool of this type: a synchronous one, or where `wait_num` is given an asynchronous one."""
    if type == "envpool":
        if not isinstance(name_or_pybuilder, str):
            raise UsageError(
                "type='envpool' takes the name of an EnvPool task, not a builder: use 'loop', 'thread' or 'process'."
            )
        options = name_or_pybuilder, size, wait_num, seed, num_workers, env_kwargs
        return ActionRepeatEnvPool(action_repeat, *options) if action_repeat > 1 else EnvPoolAdapter(*options)
    builder = Builder(name_or_pybuilder, seed, env_kwargs, action_repeat)
    if type == "loop":
        return LoopPool(build_group(builder, 0, size))
    workers = min(size, num_workers or len(os.sched_getaffinity(0)))  # one for each core
    slices = split_evenly(size, workers)
    if type == "process":
        if wait_num is not None:
            return AsyncProcesses(builder, slices, wait_num, answer_timeout)
        return ProcessPool(builder, slices, answer_timeout)
    if wait_num is not None:
        return AsyncThreads(build_group(builder, 0, size), wait_num, workers, answer_timeout)
    return ThreadPool(build_groups(builder, slices), answer_timeout)
