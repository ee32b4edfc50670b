"""Environments of gymnax 0.0.9 and 1.x, such as `gymnax:Breakout-MinAtar`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import gymnax
import jax
import numpy as np
from dm_env import specs
from gymnax.environments import spaces

from rlframe.envs.jax_envs import check_kwargs
from rlframe.errors import UsageError


class GymnaxEnv:
    """One environment of gymnax, as a `JaxEnv`.

    Args:
        name: the name, for messages.
        env: the environment.
        params: its parameters. An episode is truncated at the step `max_steps_in_episode`.
    """

    def __init__(self, name: str, env: Any, params: Any) -> None:
        self.name, self._env, self._params = name, env, params
        self._unlimited = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)
        observation = jax.eval_shape(self.reset, jax.random.PRNGKey(0))[1]
        # The space of Catch-bsuite has another dtype than its observations.
        self.observation_space = _spec(name, "observation", env.observation_space(params), observation.dtype)
        self.action_space = _spec(name, "action", env.action_space(params), np.float32)

    def reset(self, rng: jax.Array) -> tuple[Any, Any]:
        observation, state = self._env.reset_env(rng, self._params)
        return state, observation

    def step(self, rng: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        observation, new, reward, terminated, _ = self._env.step_env(rng, state, action, self._params)
        if hasattr(self._env, "is_truncated"):
            truncated = self._env.is_truncated(new, self._params)
        else:
            # In gymnax 0.0.9, `terminated` includes the time limit. Without a limit, the same step tells them apart.
            # XLA computes what both steps have in common once.
            terminated = self._env.step_env(rng, state, action, self._unlimited)[3]
            truncated = new.time >= self._params.max_steps_in_episode
        return new, observation, reward, terminated, truncated


def tasks() -> list[str]:
    """Return the names of the environments of gymnax."""
    return list(gymnax.registered_envs)


def make(task: str, kwargs: Mapping[str, Any]) -> GymnaxEnv:
    """Make an environment. `kwargs` are fields of its `EnvParams`, and arguments of its class."""
    env, params = gymnax.make(task)
    fields = {field.name for field in dataclasses.fields(params)}
    check_kwargs(f"gymnax:{task}", kwargs, {*fields, *inspect.signature(type(env)).parameters})
    if of_class := {key: value for key, value in kwargs.items() if key not in fields}:
        env, params = gymnax.make(task, **of_class)
    params = params.replace(**{key: value for key, value in kwargs.items() if key in fields})
    return GymnaxEnv(f"gymnax:{task}", env, params)


def _spec(name: str, part: str, space: Any, dtype: Any) -> specs.Array:
    """Return the spec of a space. `dtype` is the dtype of a Box."""
    if isinstance(space, spaces.Discrete):
        return specs.DiscreteArray(space.n, np.int32, part)
    if isinstance(space, spaces.Box):
        return specs.BoundedArray(space.shape, dtype, space.low, space.high, part)
    raise UsageError(f"{name} has the {part} space {type(space).__name__}: expected Discrete or Box.")
