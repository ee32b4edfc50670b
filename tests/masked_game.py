"""A game with action masks, whose best possible mean return is known exactly.

An episode has 8 steps. At each step, about a third of the 12 actions are legal, and the observation shows which ones. A
legal action a at step t and level s gives the reward `REWARDS[t, s, a]` and leads to the level `LEVELS[s, a]`. An
illegal action ends the episode without a reward.
"""

from __future__ import annotations

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

STEPS, NUM_LEVELS, NUM_ACTIONS, SHARE = 8, 3, 12, 1 / 3
_random = np.random.RandomState(0)
REWARDS = np.round(_random.rand(STEPS, NUM_LEVELS, NUM_ACTIONS), 2).astype(np.float32)
LEVELS = _random.randint(NUM_LEVELS, size=(NUM_LEVELS, NUM_ACTIONS))
SIZE = STEPS + 1 + NUM_LEVELS + NUM_ACTIONS  # of the array "observation"


def optimal_values() -> np.ndarray:
    """Return the values of all actions under the best policy, [STEPS, NUM_LEVELS, NUM_ACTIONS].

    Each action is legal with the probability SHARE, independent of the others. A state without a legal action is drawn
    again. So the k-th best action is chosen with the probability (1 - SHARE)^k SHARE / (1 - (1 - SHARE)^NUM_ACTIONS).
    """
    values = np.zeros((STEPS + 1, NUM_LEVELS, NUM_ACTIONS))
    for t in reversed(range(STEPS)):
        values[t] = REWARDS[t] + _expected_maximum(values[t + 1])[LEVELS]
    return values[:STEPS]


def optimal_return() -> float:
    """Return the mean return of the best policy, by dynamic programming. See `optimal_values`."""
    return float(_expected_maximum(optimal_values()[0])[0])


def _expected_maximum(values):
    """Return [levels]: the mean of the largest value of a legal action, for values [levels, actions]."""
    chances = (1 - SHARE) ** np.arange(NUM_ACTIONS) * SHARE
    return -np.sort(-values, axis=1) @ (chances / chances.sum())


def _observation(step, level, legal, xp):
    shown = (xp.arange(STEPS + 1) == step, xp.arange(NUM_LEVELS) == level, legal)
    return xp.concatenate([part.astype(np.float32) for part in shown])


class MaskedGame(gymnasium.Env):
    """The game for Gymnasium.

    Args:
        mask: key of the mask in the observation. None leaves the mask out.
        strict: raise ValueError for an illegal action, instead of ending the episode.
        blocked: number of the step at which no action is legal. None for the game without such a step.
    """

    def __init__(self, mask="action_mask", strict=False, blocked=None, render_mode=None):
        self._key, self._strict, self._blocked = mask, strict, blocked
        spaces = {"observation": Box(0, 1, (SIZE,), np.float32)}
        self.observation_space = Dict(spaces if mask is None else {**spaces, mask: MultiBinary(NUM_ACTIONS)})
        self.action_space = Discrete(NUM_ACTIONS)
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = self._level = 0
        return self._observed(), {}

    def step(self, action):
        if not self._legal[action]:
            if self._strict:
                raise ValueError(f"The action {action} is illegal.")
            self._step = STEPS
            return self._observed(), 0.0, True, False, {}
        reward = float(REWARDS[self._step, self._level, action])
        self._step, self._level = self._step + 1, LEVELS[self._level, action]
        return self._observed(), reward, self._step == STEPS, False, {}

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)

    def _observed(self):
        self._legal = np.zeros(NUM_ACTIONS, np.int8)  # all actions are illegal after the end, as in PettingZoo
        while self._step < STEPS and self._step != self._blocked and not self._legal.any():
            self._legal = (self.np_random.random(NUM_ACTIONS) < SHARE).astype(np.int8)
        observation = {"observation": _observation(self._step, self._level, self._legal, np)}
        return observation if self._key is None else {**observation, self._key: self._legal}


class MaskedJaxGame:
    """The game as a JAX environment. See `MaskedGame` for the arguments."""

    def __init__(self, mask="action_mask", blocked=None):
        self._key, self._blocked = mask, blocked
        spaces = {"observation": Box(0, 1, (SIZE,), np.float32)}
        self.observation_space = Dict(spaces if mask is None else {**spaces, mask: MultiBinary(NUM_ACTIONS)})
        self.action_space = Discrete(NUM_ACTIONS)

    def reset(self, rng):
        return self._observed(rng, jnp.int32(0), jnp.int32(0))

    def step(self, rng, state, action):
        step, level, legal = state
        is_legal = legal[action]
        reward = jnp.where(is_legal, jnp.asarray(REWARDS)[step, level, action], 0.0)
        step = jnp.where(is_legal, step + 1, STEPS)
        return *self._observed(rng, step, jnp.asarray(LEVELS, jnp.int32)[level, action]), reward, step == STEPS, False

    def _observed(self, rng, step, level):
        def draw(loop):
            return jax.random.split(loop[0])[0], jax.random.uniform(loop[0], (NUM_ACTIONS,)) < SHARE

        _, legal = jax.lax.while_loop(lambda loop: ~loop[1].any(), draw, (rng, jnp.zeros(NUM_ACTIONS, bool)))
        legal &= (step < STEPS) & (step != (-1 if self._blocked is None else self._blocked))
        observation = {"observation": _observation(step, level, legal, jnp)}
        observation = observation if self._key is None else {**observation, self._key: legal}
        return (step, level, legal), observation
