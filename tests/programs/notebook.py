"""A fake notebook: it runs cells in a new `__main__` module, like an interactive session."""

from __future__ import annotations

import sys
import types

import pytest

ENV = """
import gymnasium, numpy as np

class Catch(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    reward = 1.0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), self.reward, self.t == 4, False, {}
"""
AGENT = """
import dataclasses
from rlframe.agents.ppo import PPO, PPOConfig

@dataclasses.dataclass(frozen=True)
class MineConfig(PPOConfig):
    bonus: float = 0.5

class Mine(PPO):
    config_cls = MineConfig
"""
NETWORK = """
import haiku as hk

def make_net(observation_spec, action_spec):
    def forward(observation):
        return hk.Linear(action_spec.num_values)(observation), hk.Linear(1)(observation)
    return hk.without_apply_rng(hk.transform(forward))
"""
# Options of a PPO run that ends after about one second.
SMALL = {
    "num_envs": 2,
    "steps": 64,
    "unroll_length": 8,
    "num_minibatches": 2,
    "eval_episodes": 1,
    "preset": "none",
    "quiet": True,
}


class Notebook:
    """A fake notebook. `notebook.run(code)` runs a cell, and `notebook[name]` returns a variable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.restart()

    def restart(self) -> None:
        """Restart the notebook with an empty `__main__` module."""
        self._main = types.ModuleType("__main__")
        self._monkeypatch.setitem(sys.modules, "__main__", self._main)

    def run(self, *cells: str) -> None:
        for cell in cells:
            exec(compile(cell, "<cell>", "exec"), vars(self._main))

    def __getitem__(self, name: str):
        return vars(self._main)[name]
