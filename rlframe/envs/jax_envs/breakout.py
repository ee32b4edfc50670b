"""Breakout on a grid of 10 x 10, with the rules of MinAtar (Young and Tian 2019, arXiv:1903.03176)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

# The directions of the ball are 0 (up left), 1 (up right), 2 (down right) and 3 (down left).
_MOVES = np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]], np.int32)  # (rows, columns) of each direction
_AFTER_SIDE = np.array([1, 0, 3, 2], np.int32)  # direction after the ball hits a side wall
_AFTER_TOP = np.array([3, 2, 1, 0], np.int32)  # after a hit from above or below
_AFTER_EDGE = np.array([2, 3, 0, 1], np.int32)  # after a hit of the paddle's edge
_COLORS = np.array([[70, 130, 220], [255, 255, 255], [120, 120, 120], [220, 110, 70]], np.uint8)


class BreakoutState(NamedTuple):
    ball: jax.Array  # [2] int32: row and column
    direction: jax.Array  # [] int32
    last_ball: jax.Array  # [2] int32: position one step before
    paddle: jax.Array  # [] int32: column
    bricks: jax.Array  # [10, 10] bool
    hits: jax.Array  # [] bool: True if the ball has just hit a brick
    last_action: jax.Array  # [] int32
    time: jax.Array  # [] int32, steps since the reset


class Breakout:
    """Breakout-MinAtar: keep a ball in play with a paddle (0 stay, 1 left, 2 right). Each brick gives a reward of 1.

    The observation has a channel for the paddle, the ball, the ball's previous position, and the bricks.

    Args:
        max_steps: step at which an episode is truncated.
        sticky_action_probability: probability that the previous action is repeated.
    """

    observation_space = specs.BoundedArray((10, 10, 4), np.float32, 0.0, 1.0, "observation")
    action_space = specs.DiscreteArray(3, np.int32, "action")
    render_fps = 10

    def __init__(self, max_steps: int = 1000, sticky_action_probability: float = 0.1) -> None:
        self.max_steps, self.sticky_action_probability = max_steps, sticky_action_probability

    def reset(self, rng: jax.Array) -> tuple[BreakoutState, jax.Array]:
        starts_left = jax.random.bernoulli(rng)
        ball = jnp.where(starts_left, np.array([3, 0], np.int32), np.array([3, 9], np.int32))
        direction, zero = jnp.where(starts_left, 2, 3).astype(jnp.int32), jnp.zeros((), jnp.int32)
        state = BreakoutState(ball, direction, ball, zero + 4, jnp.asarray(_full_wall()), zero > 0, zero, zero)
        return state, self.observe(state)

    def step(self, rng: jax.Array, state: BreakoutState, action: jax.Array) -> tuple[Any, ...]:
        is_sticky = jax.random.bernoulli(rng, self.sticky_action_probability)
        action = jnp.where(is_sticky, state.last_action, action.astype(jnp.int32))
        paddle = jnp.clip(state.paddle + jnp.where(action == 1, -1, jnp.where(action == 2, 1, 0)), 0, 9)
        last, direction = state.ball, state.direction
        row, column = last + jnp.asarray(_MOVES)[direction]
        direction = jnp.where((column < 0) | (column > 9), jnp.asarray(_AFTER_SIDE)[direction], direction)
        column = jnp.clip(column, 0, 9)
        at_top = row < 0
        at_brick = ~at_top & state.bricks[row, column]
        at_bottom = ~at_top & ~at_brick & (row == 9)
        breaks = at_brick & ~state.hits
        bricks = state.bricks.at[row, column].set(state.bricks[row, column] & ~breaks)
        bricks = jnp.where(at_bottom & ~bricks.any(), jnp.asarray(_full_wall()), bricks)
        on_paddle = at_bottom & (last[1] == paddle)
        on_edge = at_bottom & ~on_paddle & (column == paddle)
        bounces = at_top | breaks | on_paddle
        direction = jnp.where(on_edge, jnp.asarray(_AFTER_EDGE)[direction], direction)
        direction = jnp.where(bounces, jnp.asarray(_AFTER_TOP)[direction], direction)
        row = jnp.where(at_top, 0, jnp.where(breaks | on_paddle | on_edge, last[0], row))
        state = BreakoutState(
            jnp.stack([row, column]), direction, last, paddle, bricks, at_brick, action, state.time + 1
        )
        terminated = at_bottom & ~on_paddle & ~on_edge
        return state, self.observe(state), breaks.astype(jnp.float32), terminated, state.time >= self.max_steps

    def observe(self, state: BreakoutState) -> jax.Array:
        """Return the observation of a state."""
        grid = jnp.zeros((10, 10, 4), jnp.float32)
        grid = grid.at[9, state.paddle, 0].set(1.0)
        grid = grid.at[state.ball[0], state.ball[1], 1].set(1.0)
        grid = grid.at[state.last_ball[0], state.last_ball[1], 2].set(1.0)
        return grid.at[:, :, 3].set(state.bricks)

    def render(self, state: BreakoutState) -> np.ndarray:
        """Return an image of a state, [160, 160, 3] uint8."""
        grid = np.asarray(self.observe(state)).astype(np.uint8)
        return (grid[..., None] * _COLORS).max(axis=2).repeat(16, 0).repeat(16, 1)


def _full_wall() -> np.ndarray:
    wall = np.zeros((10, 10), bool)
    wall[1:4] = True
    return wall
