"""One environment, whatever API it speaks, behind one small protocol.

`wrap` takes a gymnasium or a dm_env environment and gives a `SingleEnv`. Everything that the two
worlds do differently (rewards of None, seeds, time limits) ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from rlframe.envs import api_checks, spaces
from rlframe.envs.codec import Codec
from rlframe.errors import UsageError


class SingleEnv(Protocol):
    """One environment. It never resets itself: its group does, on the step after LAST."""

    env: Any  # the environment itself
    codec: Codec  # of its observations, which it gives as they are, and of the actions that it takes
    log: Callable[[Any], None]  # takes what the environment logs; its group sets it

    def reset(self, seed: int | None) -> Any:
        """Starts an episode and returns the first observation; a seed is given at the first one only."""

    def step(self, action: Any) -> tuple[Any, float, float, bool]:
        """(observation, reward, discount, last); discount is 0 where the environment terminated, else 1.

        The reward is as the environment gives it: nothing of it is checked.
        """

    def close(self) -> None: ...


def env_seed(seed: int, index: int) -> int:
    """The seed of environment `index` of a pool with `seed`, in [0, 2^31).

    Hashed, so that the environments of the pools with seeds 1 and 2 have none in common.
    """
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0] >> 1)


_NO = np.False_  # numpy has one object of it, as Python has of False

# What Gymnasium's RecordEpisodeStatistics says at the end of an episode, by our names.
_EPISODE = {"r": "episode_return", "l": "episode_length", "t": "episode_seconds"}


class GymnasiumEnv:
    """Adapts `gymnasium.Env`: `terminated` is discount 0, `truncated` alone is discount 1.

    It logs what a step's `info["log"]` holds, and the `info["episode"]` of RecordEpisodeStatistics.
    """

    log: Callable[[Any], None]

    def __init__(self, env: Any):
        self.env = env
        api_checks.check_is_gymnasium(env.observation_space, "observation")
        api_checks.check_is_gymnasium(env.action_space, "action")
        self.codec = spaces.codec_of_spaces(env.observation_space, env.action_space)
        api_checks.check_not_empty(self.codec.observation_spec, "observation")
        api_checks.check_not_empty(self.codec.action_spec, "action")
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
        if terminated is not False and terminated is not _NO:
            terminated = api_checks.flag("terminated", terminated)
        if truncated is not False and truncated is not _NO:
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
        if isinstance(episode, Mapping):  # any other is the environment's own affair
            self.log({name: episode[key] for key, name in _EPISODE.items() if key in episode})

    def close(self) -> None:
        self.env.close()


class DmEnv:
    """Adapts `dm_env.Environment`: the discount is the environment's own. It seeds itself when built.

    After each step it logs what the environment's method `log_values()` gives, where it has one.
    """

    log: Callable[[Any], None]

    def __init__(self, env: Any):
        self.env = env
        self._log_values: Callable[[], Any] | None = getattr(env, "log_values", None)
        self.codec = spaces.codec_of_specs(env.observation_spec(), env.action_spec())
        api_checks.check_not_empty(self.codec.observation_spec, "observation")
        api_checks.check_not_empty(self.codec.action_spec, "action")

    def reset(self, seed: int | None) -> Any:
        del seed  # dm_env has no such argument: builders take it.
        result = self.env.reset()
        api_checks.check_dm_env_answer("reset", result)
        return result.observation

    def step(self, action: Any) -> tuple[Any, float, float, bool]:
        result = self.env.step(action)
        api_checks.check_dm_env_answer("step", result)
        step_type, reward, discount, observation = result
        if self._log_values is not None and (logged := self._log_values()) is not None:
            self.log(logged)
        if type(discount) is not float or not 0.0 <= discount <= 1.0:
            discount = 1.0 if discount is None else api_checks.discount(discount)
        return observation, 0.0 if reward is None else reward, discount, int(step_type) == 2

    def close(self) -> None:
        self.env.close()


def is_environment(env: Any) -> bool:
    """Whether this is one gymnasium or dm_env environment (and not the class of one)."""
    return not isinstance(env, type) and (_is_gymnasium(env) or _is_dm_env(env))


def wrap(env: Any) -> SingleEnv:
    """A gymnasium or dm_env environment as a `SingleEnv`. Raises UsageError for anything else."""
    if hasattr(env, "num_envs"):
        raise UsageError(
            f"{type(env).__name__} holds several environments: expected a builder that returns one. "
            "Pass the pool itself where an env_builder is asked for, or the name of the task."
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
