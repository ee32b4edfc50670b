"""`FrameStack` stacks the observations of any pool, in batches.

Action repeat is implemented in `EnvGroup`, and in `ActionRepeatEnvPool` for EnvPool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.layout import Layout
from rlframe.errors import UsageError
from rlframe.types import FIRST, ActionMaskArray, MultiDiscreteArray, TimeStep, has_channels_first


class FrameStack:
    """Stacks the newest `count` observations of each environment, oldest first. At FIRST it repeats the observation.

    The shape `[C, H, W]` becomes `[count * C, H, W]`, and `[H, W, C]` becomes `[H, W, count * C]`. The channel axis is
    the shorter one of the first and the last axis. Every other leaf gets a new first axis: `[H, W]` becomes
    `[count, H, W]`, and `[n]` becomes `[count, n]`. An action mask is not stacked.

    Args:
        count: number of observations, at least 2.
        observation_spec: spec of one environment, before stacking.
        num_envs: number of environments.

    Attributes:
        observation_spec: spec of one environment, after stacking.
    """

    def __init__(self, count: int, observation_spec: Any, num_envs: int) -> None:
        self._count, self._layout = count, Layout(observation_spec)
        leaves = self._layout.leaves
        self._frames = [np.zeros((num_envs, num_frames(leaf, count), *leaf.shape), leaf.dtype) for leaf in leaves]
        self.observation_spec = stacked_spec(observation_spec, count)

    def __call__(self, timestep: TimeStep, env_ids: np.ndarray | None = None) -> TimeStep:
        """Return the timestep with stacked observations.

        Args:
            timestep: [B, ...].
            env_ids: [B] ids of the environments; None means all environments in order.
        """
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
        """Return the state for `set_state`."""
        return [frames.copy() for frames in self._frames]

    def set_state(self, state: list[np.ndarray]) -> None:
        """Restore a state from `get_state`."""
        for frames, saved in zip(self._frames, state, strict=True):
            frames[:] = saved


def num_frames(leaf: specs.Array, count: int) -> int:
    """Return the number of newest observations of a leaf that are stacked: 1 for an action mask, otherwise `count`."""
    return 1 if isinstance(leaf, ActionMaskArray) else count


def merge_stack(rows: Any) -> Any:
    """Return stacked observations `[B, *stacked_shape]` for frames `[B, count, *shape]`: NumPy or JAX arrays.

    If `count` is 1, return `[B, *shape]`.
    """
    if rows.shape[1] == 1:
        return rows[:, 0]
    if rows.ndim != 5:
        return rows
    if has_channels_first(rows.shape[2:]):
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])
    return rows.transpose(0, 2, 3, 1, 4).reshape(rows.shape[0], *rows.shape[2:4], -1)


def stacked_spec(observation_spec: Any, count: int) -> Any:
    """Return the spec of `count` stacked observations. If `count` is 1, return `observation_spec`."""

    def of_leaf(leaf: specs.Array) -> specs.Array:
        if num_frames(leaf, count) == 1:
            return leaf

        def stacked(bound: Any) -> np.ndarray:
            return merge_stack(np.broadcast_to(bound, (1, count, *leaf.shape)))[0]

        shape = stacked(0).shape
        if len(leaf.shape) == 3 and has_channels_first(leaf.shape) != has_channels_first(shape):
            order = "[C, H, W]" if has_channels_first(leaf.shape) else "[H, W, C]"
            raise UsageError(
                f"frame_stack={count} makes the image {leaf.name!r} of shape {leaf.shape} ({order}) an image of shape "
                f"{shape}, whose channel axis a network would mistake. Make the images square, or larger."
            )
        if isinstance(leaf, (specs.DiscreteArray, MultiDiscreteArray)):  # a stack of categories
            return MultiDiscreteArray(stacked(leaf.num_values), leaf.dtype, leaf.name)
        if isinstance(leaf, specs.BoundedArray):
            return specs.BoundedArray(shape, leaf.dtype, stacked(leaf.minimum), stacked(leaf.maximum), leaf.name)
        return specs.Array(shape, leaf.dtype, leaf.name)

    layout = Layout(observation_spec)
    return layout.unflatten([of_leaf(leaf) for leaf in layout.leaves])
