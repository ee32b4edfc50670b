"""Gymnasium's classic control tasks in JAX. From the same state, a step equals Gymnasium's to 1e-5.

Dynamics: CartPole from Barto, Sutton and Anderson 1983; Acrobot from Sutton 1996; Pendulum from Gymnasium. `draw` draws
their images for videos.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

BLACK, GRAY, BLUE, RED = (30, 30, 30), (170, 170, 170), (70, 130, 220), (220, 110, 70)


class Line(NamedTuple):
    """A thick line with round ends."""

    start: Any  # (x, y), with y upward
    end: Any  # (x, y)
    width: float
    color: tuple[int, int, int]


def draw(lines: Iterable[Line], extent: float, size: int = 256) -> np.ndarray:
    """Return an image [size, size, 3] uint8 of lines on white. Both coordinates go from -`extent` to `extent`."""
    axis = np.linspace(-extent, extent, size, dtype=np.float32)
    points = np.stack(np.meshgrid(axis, -axis), axis=-1)
    image = np.full((size, size, 3), 255, np.uint8)
    for line in lines:
        start = np.asarray(line.start, np.float32)
        way = np.asarray(line.end, np.float32) - start
        share = np.clip((points - start) @ way / max(way @ way, 1e-9), 0.0, 1.0)  # of the way, at the nearest point
        distance = np.linalg.norm(points - start - share[..., None] * way, axis=-1)
        image[distance <= line.width / 2] = line.color
    return image


class CartPoleState(NamedTuple):
    x: jax.Array  # position of the cart, in m
    x_dot: jax.Array  # in m/s
    theta: jax.Array  # angle of the pole, in rad
    theta_dot: jax.Array  # in rad/s
    time: jax.Array  # [] int32, steps since the reset


class CartPole:
    """CartPole-v1: push a cart left (0) or right (1) so that the pole on it does not fall.

    Args:
        max_steps: step at which an episode is truncated.
    """

    observation_space: Any = specs.BoundedArray(
        (4,), np.float32, [-4.8, -np.inf, -0.41887903, -np.inf], [4.8, np.inf, 0.41887903, np.inf], "observation"
    )
    action_space = specs.DiscreteArray(2, np.int32, "action")
    render_fps = 50

    def __init__(self, max_steps: int = 500) -> None:
        self.max_steps = max_steps

    def reset(self, rng: jax.Array) -> tuple[CartPoleState, jax.Array]:
        start = jax.random.uniform(rng, (4,), minval=-0.05, maxval=0.05)
        x, x_dot, theta, theta_dot = start
        state = CartPoleState(x, x_dot, theta, theta_dot, jnp.zeros((), jnp.int32))
        return state, self.observe(state)

    def step(self, rng: jax.Array, state: CartPoleState, action: jax.Array) -> tuple[Any, ...]:
        force = jnp.where(action == 1, 10.0, -10.0)
        cos, sin = jnp.cos(state.theta), jnp.sin(state.theta)
        # masses of 1.0 kg (cart) and 0.1 kg (pole), half of the pole's length 0.5 m, 0.02 s per step
        push = (force + 0.05 * jnp.square(state.theta_dot) * sin) / 1.1
        theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * jnp.square(cos) / 1.1))
        x_acc = push - 0.05 * theta_acc * cos / 1.1
        state = CartPoleState(
            state.x + 0.02 * state.x_dot,
            state.x_dot + 0.02 * x_acc,
            state.theta + 0.02 * state.theta_dot,
            state.theta_dot + 0.02 * theta_acc,
            state.time + 1,
        )
        terminated = (jnp.abs(state.x) > 2.4) | (jnp.abs(state.theta) > 12 * 2 * np.pi / 360)
        return state, self.observe(state), 1.0, terminated, state.time >= self.max_steps

    def observe(self, state: CartPoleState) -> jax.Array:
        """Return the observation of a state."""
        return jnp.stack(state[:4])

    def render(self, state: CartPoleState) -> np.ndarray:
        """Return an image of a state, [256, 256, 3] uint8."""
        cart, top = np.array([state.x, 0.0]), np.array([np.sin(state.theta), np.cos(state.theta)])
        side = np.array([0.25, 0.0])
        track = Line((-2.4, 0.0), (2.4, 0.0), 0.04, GRAY)
        return draw([track, Line(cart - side, cart + side, 0.3, BLUE), Line(cart, cart + top, 0.12, RED)], extent=2.6)


class CartPolePositions(CartPole):
    """CartPole-v1 without velocities in the observation, so that an agent needs a memory."""

    observation_space = specs.BoundedArray((2,), np.float32, [-4.8, -0.41887903], [4.8, 0.41887903], "observation")

    def observe(self, state: CartPoleState) -> jax.Array:
        """Return the positions of a state."""
        return jnp.stack([state.x, state.theta])


class AcrobotState(NamedTuple):
    angles: jax.Array  # [4]: two angles in rad, and their velocities in rad/s
    time: jax.Array  # [] int32, steps since the reset


class Acrobot:
    """Acrobot-v1: swing two links above a line with a torque of -1, 0 or 1 at their joint.

    Args:
        max_steps: step at which an episode is truncated.
    """

    observation_space = specs.BoundedArray(
        (6,), np.float32, [-1, -1, -1, -1, -4 * np.pi, -9 * np.pi], [1, 1, 1, 1, 4 * np.pi, 9 * np.pi], "observation"
    )
    action_space = specs.DiscreteArray(3, np.int32, "action")
    render_fps = 15

    def __init__(self, max_steps: int = 500) -> None:
        self.max_steps = max_steps

    def reset(self, rng: jax.Array) -> tuple[AcrobotState, jax.Array]:
        angles = jax.random.uniform(rng, (4,), minval=-0.1, maxval=0.1)
        return AcrobotState(angles, jnp.zeros((), jnp.int32)), _acrobot_observation(angles)

    def step(self, rng: jax.Array, state: AcrobotState, action: jax.Array) -> tuple[Any, ...]:
        torque, angles, seconds = action.astype(jnp.float32) - 1.0, state.angles, 0.2
        # one step of the Runge-Kutta method of order 4
        k1 = _acrobot_derivatives(angles, torque)
        k2 = _acrobot_derivatives(angles + seconds / 2 * k1, torque)
        k3 = _acrobot_derivatives(angles + seconds / 2 * k2, torque)
        k4 = _acrobot_derivatives(angles + seconds * k3, torque)
        angles = angles + seconds / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        limits = np.array([4 * np.pi, 9 * np.pi], np.float32)
        angles = jnp.concatenate([_wrapped(angles[:2]), jnp.clip(angles[2:], -limits, limits)])
        terminated = -jnp.cos(angles[0]) - jnp.cos(angles[0] + angles[1]) > 1.0
        state = AcrobotState(angles, state.time + 1)
        reward = jnp.where(terminated, 0.0, -1.0)
        return state, _acrobot_observation(angles), reward, terminated, state.time >= self.max_steps

    def render(self, state: AcrobotState) -> np.ndarray:
        """Return an image of a state, [256, 256, 3] uint8."""
        first, second = np.cumsum(state.angles[:2])
        joint = np.array([np.sin(first), -np.cos(first)])
        end = joint + np.array([np.sin(second), -np.cos(second)])
        target = Line((-2.3, 1.0), (2.3, 1.0), 0.04, GRAY)
        return draw([target, Line((0.0, 0.0), joint, 0.16, BLUE), Line(joint, end, 0.16, RED)], extent=2.3)


def _acrobot_observation(angles: jax.Array) -> jax.Array:
    first, second = angles[0], angles[1]
    return jnp.stack([jnp.cos(first), jnp.sin(first), jnp.cos(second), jnp.sin(second), angles[2], angles[3]])


def _acrobot_derivatives(angles: jax.Array, torque: jax.Array) -> jax.Array:
    """Return the time derivatives of the angles and velocities.

    The links have a length of 1 m, a mass of 1 kg with its center at 0.5 m, and a moment of inertia of 1 kg m².
    """
    theta1, theta2, velocity1, velocity2 = angles
    cos2, sin2 = jnp.cos(theta2), jnp.sin(theta2)
    d1 = 0.25 + (1.0 + 0.25 + cos2) + 2.0
    d2 = 0.25 + 0.5 * cos2 + 1.0
    phi2 = 0.5 * 9.8 * jnp.cos(theta1 + theta2 - np.pi / 2)
    phi1 = -0.5 * jnp.square(velocity2) * sin2 - velocity2 * velocity1 * sin2
    phi1 = phi1 + 1.5 * 9.8 * jnp.cos(theta1 - np.pi / 2) + phi2
    acceleration2 = (torque + d2 / d1 * phi1 - 0.5 * jnp.square(velocity1) * sin2 - phi2) / (1.25 - jnp.square(d2) / d1)
    acceleration1 = -(d2 * acceleration2 + phi1) / d1
    return jnp.stack([velocity1, velocity2, acceleration1, acceleration2])


class PendulumState(NamedTuple):
    theta: jax.Array  # angle from the upright position, in rad
    theta_dot: jax.Array  # in rad/s
    time: jax.Array  # [] int32, steps since the reset


class Pendulum:
    """Pendulum-v1: swing a pendulum up with a torque of -2 to 2 N m, and hold it.

    Args:
        max_steps: step at which an episode is truncated.
    """

    observation_space = specs.BoundedArray((3,), np.float32, [-1, -1, -8], [1, 1, 8], "observation")
    action_space = specs.BoundedArray((1,), np.float32, -2.0, 2.0, "action")

    def __init__(self, max_steps: int = 200) -> None:
        self.max_steps = max_steps

    def reset(self, rng: jax.Array) -> tuple[PendulumState, jax.Array]:
        theta, theta_dot = jax.random.uniform(rng, (2,), minval=-1.0) * np.array([np.pi, 1.0], np.float32)
        state = PendulumState(theta, theta_dot, jnp.zeros((), jnp.int32))
        return state, _pendulum_observation(state)

    def step(self, rng: jax.Array, state: PendulumState, action: jax.Array) -> tuple[Any, ...]:
        torque = jnp.clip(action[0], -2.0, 2.0)
        cost = jnp.square(_wrapped(state.theta)) + 0.1 * jnp.square(state.theta_dot) + 0.001 * jnp.square(torque)
        # gravity 10 m/s², mass 1 kg, length 1 m, 0.05 s per step
        theta_dot = state.theta_dot + (15.0 * jnp.sin(state.theta) + 3.0 * torque) * 0.05
        theta_dot = jnp.clip(theta_dot, -8.0, 8.0)
        state = PendulumState(state.theta + 0.05 * theta_dot, theta_dot, state.time + 1)
        return state, _pendulum_observation(state), -cost, False, state.time >= self.max_steps

    def render(self, state: PendulumState) -> np.ndarray:
        """Return an image of a state, [256, 256, 3] uint8."""
        end = (-np.sin(state.theta), np.cos(state.theta))
        return draw([Line((0.0, 0.0), end, 0.2, RED), Line((0.0, 0.0), (0.0, 0.0), 0.1, BLACK)], extent=1.3)


def _pendulum_observation(state: PendulumState) -> jax.Array:
    return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])


def _wrapped(angle: jax.Array) -> jax.Array:
    """Return an angle in [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi
