"""Adapters from Gymnasium and dm_env environments to one base class, `SingleEnv`.

`wrap` returns the adapter of an environment. The adapters hide the differences between the two APIs: missing rewards,
seeds and time limits. `pickle_with_state` saves an environment.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rlframe.envs import api_checks, spaces
from rlframe.envs.codec import Codec
from rlframe.envs.jax_envs import looks_like_jax_env
from rlframe.errors import UsageError
from rlframe.user_code.files import pickle_with_code


class SingleEnv(abc.ABC):
    """One environment without auto-reset. In the step after LAST, the `EnvGroup` resets the environment.

    Args:
      env: the adapted environment.
      codec: encodes the observations that `reset` and `step` return, and decodes actions.

    Attributes:
      env, codec: the arguments.
      log: function for the values that the environment logs; set by the `EnvGroup`.
    """

    log: Callable[[Any], None]

    def __init__(self, env: Any, codec: Codec):
        self.env, self.codec = env, codec
        api_checks.check_not_empty(codec.observation_spec, "observation")
        api_checks.check_not_empty(codec.action_spec, "action")

    @abc.abstractmethod
    def reset(self, seed: int | None) -> Any:
        """Start an episode and return the first observation. The seed is None, except in the first reset."""

    @abc.abstractmethod
    def step(self, action: Any) -> tuple[Any, float, float, bool]:
        """Return (observation, reward, discount, last). The discount is 0 if the environment terminated, else 1.

        The caller must check and convert the reward.
        """

    def close(self) -> None:
        self.env.close()


def env_seed(*parts: int) -> int:
    """Return a seed in [0, 2^31), a hash of `parts`.

    The parts are (seed, rank, incarnation) for a pool, and (seed of the pool, index) for an environment in a pool.
    Because of the hash, pools with the seeds 1 and 2 share no environment seed.
    """
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)


_NUMPY_FALSE = np.False_  # NumPy has only one False object: compare with `is`, which is faster than `==`

# Key in the dict `info["episode"]` of Gymnasium's RecordEpisodeStatistics -> name of the value in rlframe's logs.
_EPISODE_STATISTICS = {"r": "episode_return", "l": "episode_length", "t": "episode_seconds"}


class GymnasiumEnv(SingleEnv):
    """Adapts `gymnasium.Env`. The discount is 0 if `terminated` is True, and 1 if only `truncated` is True.

    Each step logs `info["log"]`, and also `info["episode"]`, which RecordEpisodeStatistics adds.
    """

    def __init__(self, env: Any):
        api_checks.check_is_gymnasium(env.observation_space, "observation")
        api_checks.check_is_gymnasium(env.action_space, "action")
        super().__init__(env, spaces.codec_of_spaces(env.observation_space, env.action_space))
        self._step: Callable[[Any], Any] = env.step

    def reset(self, seed: int | None) -> Any:
        try:
            result = self.env.reset() if seed is None else self.env.reset(seed=seed)
        except TypeError as error:
            api_checks.check_takes_seed(self.env, error)
            raise
        api_checks.check_gymnasium_reset(result)
        return result[0]

    def step(self, action: Any) -> tuple[Any, float, float, bool]:
        result = self._step(action)
        if type(result) is not tuple or len(result) != 5:
            api_checks.check_gymnasium_step(result)
        observation, reward, terminated, truncated, info = result
        if terminated is not False and terminated is not _NUMPY_FALSE:
            terminated = api_checks.flag("terminated", terminated)
        if truncated is not False and truncated is not _NUMPY_FALSE:
            truncated = api_checks.flag("truncated", truncated)
        if type(info) is not dict:
            api_checks.check_info(info)
        if info and ("log" in info or "episode" in info):
            self._log_info(info)
        if terminated:
            return observation, reward, 0.0, True
        return observation, reward, 1.0, truncated is True

    def _log_info(self, info: Mapping[str, Any]) -> None:
        if "log" in info:
            self.log(info["log"])
        episode = info.get("episode")
        if isinstance(episode, Mapping):  # ignore other types, because RecordEpisodeStatistics adds a dict
            self.log({name: episode[key] for key, name in _EPISODE_STATISTICS.items() if key in episode})


class DmEnv(SingleEnv):
    """Adapts `dm_env.Environment`, which returns the discount itself and whose `reset` takes no seed.

    After each step the adapter logs the result of the method `log_values()`, if the environment has this method.
    """

    def __init__(self, env: Any):
        super().__init__(env, spaces.codec_of_specs(env.observation_spec(), env.action_spec()))
        self._log_values: Callable[[], Any] | None = getattr(env, "log_values", None)

    def reset(self, seed: int | None) -> Any:
        del seed  # the builder has received the seed, because dm_env's `reset` takes none
        result = self.env.reset()
        api_checks.check_dm_env_result("reset", result)
        return result.observation

    def step(self, action: Any) -> tuple[Any, float, float, bool]:
        result = self.env.step(action)
        api_checks.check_dm_env_result("step", result)
        step_type, reward, discount, observation = result
        if self._log_values is not None and (logged := self._log_values()) is not None:
            self.log(logged)
        if type(discount) is not float or not 0.0 <= discount <= 1.0:
            discount = 1.0 if discount is None else api_checks.discount(discount)
        return observation, 0.0 if reward is None else reward, discount, int(step_type) == 2


def is_environment(env: Any) -> bool:
    """Return True for an instance of a gymnasium or dm_env environment, and False for an environment class."""
    return not isinstance(env, type) and (_is_gymnasium(env) or _is_dm_env(env))


def wrap(env: Any) -> SingleEnv:
    """Adapt a gymnasium or dm_env environment to `SingleEnv`. Raise UsageError for any other object."""
    if looks_like_jax_env(env):
        raise UsageError(
            f"A builder returned {type(env).__name__}, which is a JAX environment: pass its class, or use type 'jax' "
            "(--env-type jax)."
        )
    if hasattr(env, "num_envs"):
        raise UsageError(
            f"{type(env).__name__} holds several environments: expected a builder that returns one. "
            "Pass the pool itself as the env_builder, or pass the name of the task."
        )
    if _is_gymnasium(env):
        return GymnasiumEnv(env)
    if _is_dm_env(env):
        return DmEnv(env)
    raise UsageError(
        f"A builder returned {type(env).__name__}: expected a gymnasium.Env (observation_space, action_space, "
        "reset, step) or a dm_env.Environment (observation_spec(), action_spec(), reset, step)."
    )


def _is_gymnasium(env: Any) -> bool:
    return hasattr(env, "observation_space") and hasattr(env, "action_space") and hasattr(env, "step")


def _is_dm_env(env: Any) -> bool:
    return callable(getattr(env, "observation_spec", None)) and callable(getattr(env, "action_spec", None))


# Methods with which a class can omit parts of its state from a pickle. For example, Gymnasium's EzPickle pickles only
# the constructor's arguments, and a restored environment would silently be in its initial state.
_PICKLE_HOOKS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


def _all_layers(env: Any) -> Iterator[Any]:
    """Yield what `wrapper_chain` yields, and the environments in lists, tuples and dicts of each environment."""
    found, seen = [env], set()
    for one in found:
        for layer in api_checks.wrapper_chain(one):
            if id(layer) not in seen:
                seen.add(id(layer))
                yield layer
                for value in getattr(layer, "__dict__", {}).values():
                    items = value.values() if isinstance(value, dict) else value
                    if isinstance(value, (dict, list, tuple)):
                        found += [item for item in items if _is_gymnasium(item) or _is_dm_env(item)]


def pickle_with_state(env: Any) -> bytes | None:
    """Pickle an environment with its state. Return None if the environment or a wrapper cannot be saved exactly."""
    for layer in _all_layers(env):
        if any(getattr(type(layer), hook, None) is not getattr(object, hook, None) for hook in _PICKLE_HOOKS):
            return None
    try:
        return pickle_with_code(env)
    except Exception:  # pickling sockets, surfaces or native handles can raise any exception
        return None
