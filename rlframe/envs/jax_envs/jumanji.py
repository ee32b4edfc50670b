"""Environments of jumanji, such as `jumanji:Game2048-v1`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import dm_env.specs
import jax
import jumanji
import numpy as np
from jumanji import specs

from rlframe.envs.jax_envs import check_kwargs
from rlframe.errors import UsageError
from rlframe.types import MultiDiscreteArray


class JumanjiEnv:
    """One environment of jumanji, as a `JaxEnv`. An observation with several fields is a dict.

    An episode is terminated if the last discount is 0, and truncated otherwise.

    Args:
        name: the name, for messages.
        env: the environment.
    """

    def __init__(self, name: str, env: Any) -> None:
        self.name, self._env = name, env
        if env.reward_spec.shape or env.discount_spec.shape:
            raise UsageError(
                f"{name} gives one reward to each of several agents: the shape is {env.reward_spec.shape}. rlframe "
                "needs one reward."
            )
        self.observation_space = specs.jumanji_specs_to_dm_env_specs(env.observation_spec)
        self.action_space = _action_spec(name, env.action_spec)

    def reset(self, rng: jax.Array) -> tuple[Any, Any]:
        state, timestep = self._env.reset(rng)
        return state, _as_dict(self.observation_space, timestep.observation)

    def step(self, rng: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        state, timestep = self._env.step(state, action)  # the random key is in the state
        observation = _as_dict(self.observation_space, timestep.observation)
        last, terminated = timestep.last(), timestep.discount == 0
        return state, observation, timestep.reward, last & terminated, last & ~terminated


def tasks() -> list[str]:
    """Return the names of the environments of jumanji."""
    return sorted(jumanji.registered_environments())


def make(task: str, kwargs: Mapping[str, Any]) -> JumanjiEnv:
    """Make an environment. `kwargs` are arguments of its class."""
    env = jumanji.make(task)
    check_kwargs(f"jumanji:{task}", kwargs, inspect.signature(type(env)).parameters)
    return JumanjiEnv(f"jumanji:{task}", jumanji.make(task, **kwargs) if kwargs else env)


def _as_dict(spec: Any, value: Any) -> Any:
    """Return an observation, whose fields are attributes, in the structure of its spec."""
    return {key: _as_dict(sub, getattr(value, key)) for key, sub in spec.items()} if isinstance(spec, dict) else value


def _action_spec(name: str, spec: Any) -> dm_env.specs.Array:
    if isinstance(spec, specs.BoundedArray):
        is_integer = np.issubdtype(spec.dtype, np.integer)
        if spec.shape and is_integer and not np.any(spec.minimum):
            maximum = np.broadcast_to(np.asarray(spec.maximum, np.int64), spec.shape)
            return MultiDiscreteArray(maximum + 1, spec.dtype, "action")
        return specs.jumanji_specs_to_dm_env_specs(spec)
    raise UsageError(
        f"{name} has the action spec {spec!r}: expected DiscreteArray, MultiDiscreteArray or BoundedArray."
    )
