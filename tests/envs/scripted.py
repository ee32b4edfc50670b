"""Environments with fixed steps, in the APIs of Gymnasium and dm_env, and the timesteps that pools must return."""

from __future__ import annotations

import ctypes
import time

import dm_env
import gymnasium
import numpy as np
from dm_env import specs
from gymnasium import spaces

from rlframe.envs.adapters import env_seed
from rlframe.types import TimeStep

NUM_ACTIONS = 5
FIRST, MID, LAST = 0, 1, 2


def ending(episode: int, t: int) -> tuple[bool, bool]:
    """Return (terminated, truncated) after `t` steps. Every third episode ends with both flags."""
    return [(t == 3, False), (False, t == 2), (t == 4, t == 4)][episode % 3]


class ScriptedEnv(gymnasium.Env):
    """An environment with the observation (hash of the seed, episode, step) and the reward `step + 10 * action`."""

    observation_space = spaces.Box(-1.0, 1e6, (3,), np.float64)
    action_space = spaces.Discrete(NUM_ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.mark, self.episode = seed % 100_000, -1
        self.episode, self.t = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        terminated, truncated = ending(self.episode, self.t)
        return self._observation(), self.t + 10.0 * action, terminated, truncated, {}

    def _observation(self):
        return np.array([self.mark, self.episode, self.t], np.float64)


class ScriptedDictEnv(ScriptedEnv):
    """A ScriptedEnv whose observation is a dict with a nested tuple, an image and a scalar. Its actions start at 1."""

    observation_space = spaces.Dict(
        numbers=spaces.Box(-1.0, 1e6, (3,), np.float64),
        more=spaces.Tuple((spaces.Discrete(100), spaces.Box(0, 255, (2, 2), np.uint8))),
    )
    action_space = spaces.Discrete(NUM_ACTIONS, start=1)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward - 10.0, *rest

    def _observation(self):
        numbers = super()._observation()
        return {"numbers": numbers, "more": (self.t, np.full((2, 2), self.episode, np.uint8))}


class ScriptedDmEnv(dm_env.Environment):
    """A ScriptedEnv in the dm_env API."""

    def __init__(self, seed: int = 0):
        self.env = ScriptedEnv()
        self.seed = seed

    def reset(self):
        observation, _ = self.env.reset(seed=self.seed)
        self.seed = None
        return dm_env.restart(observation)

    def step(self, action):
        observation, reward, terminated, truncated, _ = self.env.step(action)
        if terminated:
            return dm_env.termination(reward, observation)
        return dm_env.truncation(reward, observation) if truncated else dm_env.transition(reward, observation)

    def observation_spec(self):
        return specs.Array((3,), np.float64, "numbers")

    def action_spec(self):
        return specs.DiscreteArray(NUM_ACTIONS, np.int64, "move")


INVALID_REWARDS = {
    "reward shape": np.array([1.0]),
    "reward text": "much",
    "reward dict": {"speed": 1.0},
    "reward nan": np.nan,
}


class FaultyEnv(ScriptedEnv):
    """A ScriptedEnv that fails in its constructor or second step if its index in the pool is `victim`."""

    def __init__(self, fault: str, victim: int, seed: int = 0):
        self.fault = fault if seed == env_seed(0, victim) else None
        if self.fault == "build":
            raise RuntimeError("no such level")
        if self.fault == "exit in build":
            raise SystemExit("no fuel")
        if self.fault == "spec":
            self.action_space = spaces.Discrete(NUM_ACTIONS + 1)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.t == 2 and self.fault in INVALID_REWARDS:
            reward = INVALID_REWARDS[self.fault]
        rest = [reward, *rest]
        if self.t == 2:
            if self.fault == "raise":
                raise KeyError("the wheel came off")
            if self.fault == "exit":
                raise SystemExit("out of fuel")
            if self.fault == "shape":
                return observation[:2], *rest
            if self.fault == "dtype":
                return observation.astype(str), *rest
            if self.fault == "nan":
                observation[1] = np.nan
            if self.fault == "hang":
                print("hangs", flush=True)
                time.sleep(600)
            if self.fault == "hang in C":
                print("hangs", flush=True)
                ctypes.PyDLL(None).sleep(600)  # sleep without releasing the GIL
        return observation, *rest


class Stream:
    """Computes the steps that a pool must return for one ScriptedEnv."""

    def __init__(self, seed: int, index: int):
        self.mark = env_seed(seed, index) % 100_000
        self.episode, self.t, self.last = -1, 0, True

    def step(self, action: int) -> tuple[int, float, float, list[int]]:
        """Return the expected (step_type, reward, discount, [hash of the seed, episode, step])."""
        if self.last:
            self.episode, self.t, self.last = self.episode + 1, 0, False
            return FIRST, 0.0, 1.0, [self.mark, self.episode, 0]
        self.t += 1
        terminated, truncated = ending(self.episode, self.t)
        self.last = terminated or truncated
        discount = 0.0 if terminated else 1.0
        return (LAST if self.last else MID), self.t + 10.0 * action, discount, [self.mark, self.episode, self.t]


def rows(timestep: TimeStep, numbers: np.ndarray) -> list[tuple[int, float, float, list[int]]]:
    """Return one tuple for each environment in a batched timestep. `Stream.step` returns the same format."""
    columns = timestep.step_type.tolist(), timestep.reward.tolist(), timestep.discount.tolist(), numbers.tolist()
    return [(step_type, reward, discount, row) for step_type, reward, discount, row in zip(*columns, strict=True)]
