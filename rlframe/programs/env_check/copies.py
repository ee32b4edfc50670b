"""Copies of a checked environment, each a pool of one environment that is stepped with random actions."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs import SyncEnv, default_type
from rlframe.envs.adapters import is_environment
from rlframe.envs.jax_envs import looks_like_jax_env
from rlframe.envs.names import Builder, describe, registration
from rlframe.errors import UsageError
from rlframe.programs.env_check.report import Findings
from rlframe.programs.options.object_names import is_live
from rlframe.programs.options.registry import env_name_or_builder, name_of
from rlframe.types import LAST, TimeStep

_MASK = "action_mask"  # key of the legal actions in an observation


class Subject:
    """The environment to check.

    Args:
        env: a name, a class or function that makes an environment, or one environment.
        env_kwargs: keyword arguments of the environment.
        num_envs: number of environments of a run, which decides the type of the pool.

    Attributes:
        env: the argument. For one environment: its class.
        label: name of the environment, for messages.
        name: value for `--env`. None if no file or library defines the environment.
        target: name, class or function for a pool, or the environment itself.
        is_single: True if `target` is one environment, so that there are no copies.
        type: type of the pool that a run uses by default: "loop", "envpool" or "jax".

    Raises:
        UsageError: there is no such environment.
    """

    def __init__(self, env: Any, env_kwargs: Mapping[str, Any] | None, num_envs: int) -> None:
        self.kwargs = dict(env_kwargs or {})
        self.is_single = is_environment(env)
        if self.is_single:
            self._check_single(env)
            spec: Any = getattr(env, "spec", None)
            is_registered = spec is not None and registration(spec.id) is not None
            self.env, self.target, self.type = type(getattr(env, "unwrapped", env)), env, "loop"
            self.name = spec.id if is_registered else None
            self.label = self.name or self.env.__name__
            return
        name, is_text = name_of("env", env), isinstance(env, (str, os.PathLike))
        self.env, self.target = env, env_name_or_builder(name)
        self.label = os.fspath(env) if is_text else describe(env)
        self.name = None if is_live(name) else self.label if is_text else str(name)
        self.type = default_type(self.target, num_envs)

    def open(self, seed: int) -> Copy:
        """Make a copy of the environment. For a single environment, the copy is the environment itself."""
        if self.type != "loop":
            options: dict[str, Any] = {"env_kwargs": self.kwargs, "check_finite": False}
            return Copy(SyncEnv(self.target, 1, self.type, seed=seed, **options), None, owns_env=True)
        recorder = Recorder(self.target if self.is_single else Builder(self.target, seed, self.kwargs)(0).env)
        return Copy(SyncEnv.from_env(recorder, seed=seed, check_finite=False), recorder, owns_env=not self.is_single)

    def _check_single(self, env: Any) -> None:
        kind = type(env).__name__
        if looks_like_jax_env(env):
            raise UsageError(
                f"The JAX environment {kind} was passed as an object: expected its class or its name. Pass {kind}, and "
                "its arguments as env_kwargs."
            )
        if self.kwargs:
            raise UsageError(
                f"env_kwargs={self.kwargs} are for a name, class or function, got an object of {kind}. Leave "
                "env_kwargs out, or pass the class."
            )


class Recorder:
    """Passes all calls to an environment. Measures their time, and keeps the observation before any conversion.

    Attributes:
        observation: the newest observation.
    """

    def __init__(self, env: Any) -> None:
        self.env, self.observation = env, None
        self._seconds: dict[str, Any] = {name: collections.deque(maxlen=1_000) for name in ("reset", "step")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **options: Any) -> Any:
        """Reset the environment."""
        return self._call("reset", lambda: self.env.reset(**options))

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self._call("step", lambda: self.env.step(action))

    def seconds_per(self, method: str) -> float | None:
        """Return the median time of the newest calls of `reset` or `step`, or None without calls."""
        return float(np.median(self._seconds[method])) if self._seconds[method] else None

    def _call(self, method: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        self._seconds[method].append(time.perf_counter() - start)
        if hasattr(result, "observation"):
            self.observation = result.observation
        elif isinstance(result, (tuple, list)) and result:
            self.observation = result[0]
        return result


class Copy:
    """One copy of the environment, and random actions for it. All copies get the same random numbers for actions.

    Attributes:
        pool: a `SyncEnv` of size 1.
        recorder: the `Recorder` around the environment. None if the environment is no Python object.
        timestep: the newest timestep `[1, ...]`.
        steps: number of steps, without resets.
        lengths, returns: lengths and returns of the finished episodes.
        terminated: number of episodes that ended with discount 0.
    """

    def __init__(self, pool: SyncEnv, recorder: Recorder | None, *, owns_env: bool) -> None:
        self.pool, self.recorder, self._owns_env = pool, recorder, owns_env
        self.timestep: TimeStep | None = None
        self.steps, self.terminated = 0, 0
        self.lengths: list[int] = []
        self.returns: list[float] = []
        self._rng, self._length, self._return = np.random.default_rng(0), 0, 0.0

    @property
    def is_last(self) -> bool:
        """True if the newest timestep is the last one of its episode."""
        return self.timestep is not None and int(self.timestep.step_type[0]) == LAST

    def step(self) -> TimeStep:
        """Step with a random action. Reset at the start, and after the end of an episode."""
        if self.timestep is None or self.is_last:
            self.timestep = self.pool.reset() if self.timestep is None else self.pool.step(self.actions())
            self._length, self._return = 0, 0.0
            return self.timestep
        self.timestep = self.pool.step(self.actions())
        self.steps += 1
        self._length, self._return = self._length + 1, self._return + float(self.timestep.reward[0])
        if self.is_last:
            self.lengths.append(self._length)
            self.returns.append(self._return)
            self.terminated += float(self.timestep.discount[0]) == 0.0
        return self.timestep

    def actions(self) -> np.ndarray:
        """Return a random action `[1, ...]`."""
        assert self.timestep is not None
        return random_actions(self.pool.action_spec, self.timestep, self._rng, self.steps)

    def close(self, findings: Findings) -> None:
        """Close the environment, unless it belongs to the caller. Add an error if its `close` raises."""
        try:
            if self._owns_env:
                self.pool.close()
        except (Exception, SystemExit) as error:
            findings.error(
                "close",
                "close() raised",
                expected="close() returns",
                received=f"{type(error).__name__}: {error}",
                fix="Correct close(). A run calls it at its end, and would fail.",
            )


def random_actions(spec: Any, timestep: TimeStep, rng: np.random.Generator, step: int) -> np.ndarray:
    """Return random actions `[B, ...]`. Of ten steps, one has the lowest bounded actions, and one the highest.

    If the observation has a mask of legal actions, return only legal actions.
    """
    num_envs = len(timestep.step_type)
    shape = (num_envs, *spec.shape)
    if isinstance(spec, specs.DiscreteArray):
        mask = timestep.observation.get(_MASK) if isinstance(timestep.observation, dict) else None
        if mask is not None and mask.shape == (num_envs, spec.num_values) and mask.any(-1).all():
            return np.array([rng.choice(np.flatnonzero(row)) for row in mask], spec.dtype)
    if not isinstance(spec, specs.BoundedArray) or spec.dtype.kind != "f":
        return rng.integers(spec.minimum, spec.maximum, shape, spec.dtype, endpoint=True)
    low, high = (np.broadcast_to(bound, shape) for bound in (spec.minimum, spec.maximum))
    share = step % 10 if step % 10 < 2 else rng.random(shape)
    with np.errstate(invalid="ignore"):
        inside = low + share * (high - low)
    is_bounded = np.isfinite(low) & np.isfinite(high)
    return np.where(is_bounded, inside, np.clip(rng.standard_normal(shape), low, high)).astype(spec.dtype)
