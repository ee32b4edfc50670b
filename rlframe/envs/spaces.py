"""Specs: what an environment's observations and actions look like, in the framework's own dtypes.

Gymnasium spaces and dm_env specs both become trees (dict, tuple) of `dm_env.specs` for ONE environment,
without a batch axis. float64 becomes float32 and int64 becomes int32 (JAX's own default widths); all
other dtypes are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from dm_env import specs

from rlframe.errors import UsageError

_NARROWED = {"float64": np.float32, "float16": np.float32, "int64": np.int32, "uint64": np.uint32}


def canonical_dtype(dtype: Any) -> np.dtype:
    """The dtype in which the framework holds values that an environment gives as `dtype`."""
    dtype = np.dtype(dtype)
    return np.dtype(_NARROWED.get(dtype.name, dtype))


class ActionCodec(NamedTuple):
    """How a batch of actions in the spec's dtype becomes what one environment takes."""

    dtype: np.dtype  # the environment's own
    offset: int = 0  # added to a discrete action: spaces may start elsewhere than at 0

    def decode(self, actions: np.ndarray) -> list[Any]:
        """[n, ...] -> n actions. Always copies: an environment may keep the action that it was given."""
        decoded = actions.astype(self.dtype)
        if self.offset:
            decoded += self.offset
        # A list of numpy scalars or rows; `tolist` would give Python numbers, which some environments refuse.
        return list(decoded)


def observation_spec_of_space(space: Any, path: str = "observation") -> Any:
    """The spec tree of a gymnasium observation space. Raises UsageError for spaces without a fixed shape.

    A Discrete counts from 0 in it, wherever the space starts: see `observation_starts`.
    """
    import gymnasium.spaces as g

    if isinstance(space, (g.Dict, Mapping)):
        return {key: observation_spec_of_space(sub, f"{path}.{key}") for key, sub in space.items()}
    if isinstance(space, g.Tuple):
        return tuple(observation_spec_of_space(sub, f"{path}.{i}") for i, sub in enumerate(space))
    if isinstance(space, g.Discrete):
        return specs.DiscreteArray(int(space.n), np.int32, path)
    return _array_spec_of_space(space, path)


def observation_starts(space: Any) -> list[int]:
    """What to subtract from each leaf of an observation, in the order of `Layout`: where its Discrete starts."""
    import gymnasium.spaces as g

    if isinstance(space, (g.Dict, Mapping)):
        return [start for sub in space.values() for start in observation_starts(sub)]
    if isinstance(space, g.Tuple):
        return [start for sub in space for start in observation_starts(sub)]
    return [int(space.start) if isinstance(space, g.Discrete) else 0]


def action_spec_of_space(space: Any) -> tuple[specs.Array, ActionCodec]:
    """The spec of a gymnasium action space and how to decode it. Raises UsageError for other spaces than
    Discrete, MultiDiscrete, MultiBinary and Box."""
    import gymnasium.spaces as g

    if isinstance(space, g.Discrete):
        return specs.DiscreteArray(int(space.n), np.int32, "action"), ActionCodec(space.dtype, int(space.start))
    if isinstance(space, (g.Box, g.MultiDiscrete, g.MultiBinary)):
        return _array_spec_of_space(space, "action"), ActionCodec(np.dtype(space.dtype))
    raise UsageError(
        f"The action space {space} is not supported: expected Discrete, MultiDiscrete, MultiBinary or Box. "
        "Wrap the environment so that it takes one of those."
    )


def _array_spec_of_space(space: Any, path: str) -> specs.Array:
    import gymnasium.spaces as g

    if isinstance(space, g.MultiDiscrete):
        start = np.asarray(getattr(space, "start", 0))
        if start.any() and path == "action":
            raise UsageError(f"The action space {space} starts at {start}: expected a MultiDiscrete that starts at 0.")
        return specs.BoundedArray(space.shape, np.int32, start, start + space.nvec - 1, name=path)
    if isinstance(space, g.MultiBinary):
        return specs.BoundedArray(space.shape, np.int32 if path == "action" else space.dtype, 0, 1, name=path)
    if isinstance(space, g.Box):
        return bounded(space.shape, space.dtype, space.low, space.high, path)
    raise UsageError(
        f"The space of {path!r}, {space}, is not supported: expected Box, Discrete, MultiDiscrete, MultiBinary, "
        "or a Dict or Tuple of them."
    )


def bounded(shape: tuple[int, ...], dtype: Any, low: Any, high: Any, name: str) -> specs.BoundedArray:
    """A BoundedArray in the canonical dtype, with the bounds narrowed to it."""
    narrow = canonical_dtype(dtype)
    low, high = np.asarray(low), np.asarray(high)
    if narrow.kind == "f":
        # EnvPool says numeric_limits::min() and max() where a value has no bound; the former is tiny and positive.
        given, largest = np.finfo(low.dtype if low.dtype.kind == "f" else np.float64), np.finfo(narrow).max
        low = np.where((low == given.tiny) | (low <= -largest), -np.inf, low)
        high = np.where(high >= largest, np.inf, high)
    elif narrow.kind in "iu":
        limits = np.iinfo(narrow)
        low, high = np.clip(low, limits.min, limits.max), np.clip(high, limits.min, limits.max)
    with np.errstate(over="ignore"):
        return specs.BoundedArray(shape, narrow, low.astype(narrow), high.astype(narrow), name=name)


def observation_spec_of_specs(tree: Any, path: str = "observation") -> Any:
    """A dm_env observation spec tree in the canonical dtypes."""
    if isinstance(tree, Mapping):
        return {key: observation_spec_of_specs(sub, f"{path}.{key}") for key, sub in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(observation_spec_of_specs(sub, f"{path}.{i}") for i, sub in enumerate(tree))
    if isinstance(tree, specs.DiscreteArray):
        return specs.DiscreteArray(tree.num_values, np.int32, path)
    if isinstance(tree, specs.BoundedArray):
        return bounded(tree.shape, tree.dtype, tree.minimum, tree.maximum, path)
    if isinstance(tree, specs.Array) and tree.dtype.kind in "fiub":
        return specs.Array(tree.shape, canonical_dtype(tree.dtype), name=path)
    raise UsageError(f"The spec of {path!r}, {tree!r}, is not supported: expected numeric dm_env.specs.Array leaves.")


def action_spec_of_specs(spec: Any) -> tuple[specs.Array, ActionCodec]:
    """A dm_env action spec in the canonical dtypes and how to decode it."""
    if isinstance(spec, specs.BoundedArray) and spec.dtype.kind in "iu" and spec.shape == ():
        low, high = int(spec.minimum), int(spec.maximum)
        return specs.DiscreteArray(high - low + 1, np.int32, "action"), ActionCodec(spec.dtype, low)
    if isinstance(spec, specs.BoundedArray):
        return bounded(spec.shape, spec.dtype, spec.minimum, spec.maximum, "action"), ActionCodec(spec.dtype)
    raise UsageError(f"The action spec {spec!r} is not supported: expected one DiscreteArray or BoundedArray.")


class Layout:
    """The leaves of a spec tree in a fixed order, to go from trees to lists of arrays and back."""

    def __init__(self, spec: Any):
        self.spec = spec
        self.leaves: list[specs.Array] = list(_leaves(spec))
        self.is_leaf = isinstance(spec, specs.Array)

    def flatten(self, tree: Any) -> list[Any]:
        """The leaves of a tree of this structure. Raises UsageError naming what is missing."""
        if self.is_leaf:
            return [tree]
        out: list[Any] = []
        _flatten(self.spec, tree, "observation", out)
        return out

    def unflatten(self, leaves: list[Any]) -> Any:
        """The inverse of `flatten`: a new dict or tuple, or the only leaf itself."""
        return leaves[0] if self.is_leaf else _unflatten(self.spec, iter(leaves))


def _leaves(spec: Any) -> Any:
    if isinstance(spec, dict):
        for sub in spec.values():
            yield from _leaves(sub)
    elif isinstance(spec, tuple):
        for sub in spec:
            yield from _leaves(sub)
    else:
        yield spec


def _flatten(spec: Any, tree: Any, path: str, out: list[Any]) -> None:
    if isinstance(spec, dict):
        if not isinstance(tree, Mapping) or len(tree) != len(spec) or not all(key in tree for key in spec):
            came = sorted(tree) if isinstance(tree, Mapping) else type(tree).__name__
            raise UsageError(f"{path} must be a dict with the keys {sorted(spec)}, got {came}.")
        for key, sub in spec.items():
            _flatten(sub, tree[key], f"{path}.{key}", out)
    elif isinstance(spec, tuple):
        if not isinstance(tree, (tuple, list)) or len(tree) != len(spec):
            raise UsageError(f"{path} must be a tuple of {len(spec)}, got {type(tree).__name__}.")
        for i, sub in enumerate(spec):
            _flatten(sub, tree[i], f"{path}.{i}", out)
    else:
        out.append(tree)


def _unflatten(spec: Any, leaves: Any) -> Any:
    if isinstance(spec, dict):
        return {key: _unflatten(sub, leaves) for key, sub in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_unflatten(sub, leaves) for sub in spec)
    return next(leaves)
