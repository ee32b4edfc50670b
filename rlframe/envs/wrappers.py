"""What a pool makes of its timesteps, whichever backend they come from: stacked frames and clipped rewards, in batches.

A repeated action is the business of who steps an environment: `EnvGroup`, and `ActionRepeatEnvPool` for EnvPool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.layout import Layout
from rlframe.types import FIRST, MultiDiscreteArray, TimeStep


class FrameStack:
    """Gives the newest `count` observations of each environment as one, oldest first; at FIRST all are the first one.

    A leaf of shape `[C, H, W]` or `[H, W, C]` (the smaller end is the channels) becomes `[count * C, H, W]` or
    `[H, W, count * C]`; any other gets an axis in front: `[H, W]` becomes `[count, H, W]`, `[n]` becomes `[count, n]`.

    Args:
        count: how many observations, at least 2.
        observation_spec: of one environment, before stacking.
        num_envs: how many environments.

    Attributes:
        observation_spec: of one environment, after it.
    """

    def __init__(self, count: int, observation_spec: Any, num_envs: int) -> None:
        self._count, self._layout = count, Layout(observation_spec)
        leaves = self._layout.leaves
        self._frames = [np.zeros((num_envs, count, *leaf.shape), leaf.dtype) for leaf in leaves]
        self.observation_spec = stacked_spec(observation_spec, count)

    def __call__(self, timestep: TimeStep, env_ids: np.ndarray | None = None) -> TimeStep:
        """The timestep [B, ...] of the environments `env_ids` [B] (None: of all), its observations stacked."""
        first, stacked = timestep.step_type == FIRST, []
        leaves = self._layout.flatten(timestep.observation)
        for frames, leaf in zip(self._frames, leaves, strict=True):
            rows = np.roll(frames if env_ids is None else frames[env_ids], -1, axis=1)
            rows[:, -1] = leaf
            rows[first] = leaf[first, None]
            frames[slice(None) if env_ids is None else env_ids] = rows
            stacked.append(merge_stack(rows))
        return timestep._replace(observation=self._layout.unflatten(stacked))

    def get_state(self) -> list[np.ndarray]:
        """What `set_state` needs."""
        return [frames.copy() for frames in self._frames]

    def set_state(self, state: list[np.ndarray]) -> None:
        """Goes on as the one that gave `state` would have."""
        for frames, saved in zip(self._frames, state, strict=True):
            frames[:] = saved


def merge_stack(rows: Any) -> Any:
    """`[B, *stacked shape]` of frames `[B, count, *shape]`, of NumPy or JAX."""
    if rows.ndim != 5:
        return rows
    if _channels_first(rows.shape[2:]):
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])
    return rows.transpose(0, 2, 3, 1, 4).reshape(rows.shape[0], *rows.shape[2:4], -1)


def stacked_spec(observation_spec: Any, count: int) -> Any:
    """The spec of `count` stacked observations of one environment; of 1, the observation's own."""

    def of_leaf(leaf: specs.Array) -> specs.Array:
        def stacked(bound: Any) -> np.ndarray:
            return merge_stack(np.broadcast_to(bound, (1, count, *leaf.shape)))[0]

        shape = stacked(0).shape
        if isinstance(leaf, (specs.DiscreteArray, MultiDiscreteArray)):  # stacked categories stay categories
            return MultiDiscreteArray(stacked(leaf.num_values), leaf.dtype, leaf.name)
        if isinstance(leaf, specs.BoundedArray):
            return specs.BoundedArray(shape, leaf.dtype, stacked(leaf.minimum), stacked(leaf.maximum), leaf.name)
        return specs.Array(shape, leaf.dtype, leaf.name)

    layout = Layout(observation_spec)
    return layout.unflatten([of_leaf(leaf) for leaf in layout.leaves]) if count > 1 else observation_spec


def _channels_first(shape: tuple[int, ...]) -> bool:
    return shape[0] <= shape[-1]
