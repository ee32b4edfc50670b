"""Functions that create codecs (`rlframe.envs.codec`) from gymnasium spaces and dm_env specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.codec import ActionLeaf, Codec, ObservationLeaf
from rlframe.errors import UsageError
from rlframe.types import MultiDiscreteArray

_MAX_VALUES = np.iinfo(np.int32).max  # maximum number of categories, because categories are int32


def codec_of_spaces(observation_space: Any, action_space: Any) -> Codec:
    """Return the codec of a gymnasium environment.

    Raises:
      UsageError: the observation space has no fixed shape, or the action space is not a Discrete, MultiDiscrete,
        MultiBinary or Box.
    """
    return Codec(_tree(observation_space, _space_leaf), _action_of_space(action_space))


def codec_of_specs(observation_spec: Any, action_spec: Any) -> Codec:
    """Return the codec of a dm_env environment. Raise UsageError for specs that are not numeric."""
    return Codec(_tree(observation_spec, _spec_leaf), _action_of_spec(action_spec))


def canonical_dtype(dtype: Any) -> np.dtype:
    """Return the framework's dtype for an environment's dtype. It has at most 32 bits."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return np.dtype(np.float32)
    return np.dtype(f"{dtype.kind}4") if dtype.kind in "iu" and dtype.itemsize > 4 else dtype


def _tree(node: Any, leaf: Callable[[Any, str], ObservationLeaf], path: str = "observation") -> Any:
    """Convert a space or a tree of specs to a tree of `ObservationLeaf`."""
    if isinstance(node, Mapping):  # includes Dict spaces
        _check_keys(node, path)
        return {key: _tree(sub, leaf, f"{path}.{key}") for key, sub in node.items()}
    if isinstance(node, Sequence):  # includes Tuple spaces
        return tuple(_tree(sub, leaf, f"{path}.{i}") for i, sub in enumerate(node))
    return leaf(node, path)


def _check_keys(node: Mapping[Any, Any], path: str) -> None:
    try:
        sorted(node)
    except TypeError:
        raise UsageError(
            f"The space of {path!r} has the keys {list(node)}, which JAX cannot sort: expected strings, or other keys "
            "of one type."
        ) from None


def _space_leaf(space: Any, path: str) -> ObservationLeaf:
    import gymnasium.spaces as g

    if isinstance(space, g.Discrete):
        return ObservationLeaf(_discrete(space.n, path, space), int(space.start))
    if isinstance(space, g.MultiDiscrete):
        return ObservationLeaf(_multi_discrete(space.nvec, path, space), _start_of(space))
    if isinstance(space, g.MultiBinary):
        return ObservationLeaf(specs.BoundedArray(space.shape, space.dtype, 0, 1, path))
    if isinstance(space, g.Box):
        return ObservationLeaf(_bounded(space.shape, space.dtype, space.low, space.high, path))
    raise UsageError(
        f"The space of {path!r}, {space}, is not supported: expected Box, Discrete, MultiDiscrete, MultiBinary, "
        "or a Dict or Tuple of them."
    )


def _spec_leaf(spec: Any, path: str) -> ObservationLeaf:
    if isinstance(spec, specs.DiscreteArray):
        return ObservationLeaf(_discrete(spec.num_values, path, spec))
    if isinstance(spec, specs.BoundedArray):
        return ObservationLeaf(_bounded(spec.shape, spec.dtype, spec.minimum, spec.maximum, path))
    if isinstance(spec, specs.Array) and spec.dtype.kind in "fiub":
        return ObservationLeaf(specs.Array(spec.shape, canonical_dtype(spec.dtype), name=path))
    raise UsageError(f"The spec of {path!r}, {spec!r}, is not supported: expected numeric dm_env.specs.Array leaves.")


def _action_of_space(space: Any) -> ActionLeaf:
    import gymnasium.spaces as g

    if isinstance(space, g.Discrete):
        return ActionLeaf(_discrete(space.n, "action", space), space.dtype, int(space.start))
    if isinstance(space, g.MultiDiscrete):
        return ActionLeaf(_multi_discrete(space.nvec, "action", space), space.dtype, _start_of(space))
    if isinstance(space, g.MultiBinary):
        return ActionLeaf(specs.BoundedArray(space.shape, np.int32, 0, 1, "action"), space.dtype)
    if isinstance(space, g.Box):
        return _bounded_action(space.shape, space.dtype, space.low, space.high)
    raise UsageError(
        f"The action space {space} is not supported: expected Discrete, MultiDiscrete, MultiBinary or Box. "
        "Wrap the environment so that its action space is one of these."
    )


def _action_of_spec(spec: Any) -> ActionLeaf:
    if isinstance(spec, MultiDiscreteArray):
        return ActionLeaf(_multi_discrete(spec.num_values, "action", spec), spec.dtype)
    if isinstance(spec, specs.BoundedArray) and spec.dtype.kind in "iu" and spec.shape == ():
        low, high = int(spec.minimum), int(spec.maximum)
        return ActionLeaf(_discrete(high - low + 1, "action", spec), spec.dtype, low)
    if isinstance(spec, specs.BoundedArray):
        return _bounded_action(spec.shape, spec.dtype, spec.minimum, spec.maximum)
    raise UsageError(f"The action spec {spec!r} is not supported: expected one DiscreteArray or BoundedArray.")


def _discrete(num_values: Any, path: str, space: Any) -> specs.DiscreteArray:
    _check_count(num_values, path, space)
    return specs.DiscreteArray(int(num_values), np.int32, path)


def _multi_discrete(num_values: Any, path: str, space: Any) -> MultiDiscreteArray:
    _check_count(np.max(num_values, initial=1), path, space)
    return MultiDiscreteArray(num_values, np.int32, path)


def _check_count(num_values: Any, path: str, space: Any) -> None:
    if not 1 <= int(num_values) <= _MAX_VALUES:
        raise UsageError(
            f"The space of {path!r}, {space}, has {int(num_values)} values: expected 1 to {_MAX_VALUES}, the limit "
            "of int32. Use a Box, or fewer categories."
        )


def _start_of(space: Any) -> Any:
    return np.broadcast_to(np.asarray(getattr(space, "start", 0), np.int64), space.shape)


def _bounded(shape: tuple[int, ...], dtype: Any, low: Any, high: Any, name: str) -> specs.BoundedArray:
    """Return a BoundedArray in the framework's dtype. Round the bounds to the nearest number."""
    narrow = canonical_dtype(dtype)
    low, high = _limited(dtype, low, high)
    return specs.BoundedArray(shape, narrow, low.astype(narrow), high.astype(narrow), name=name)


def _bounded_action(shape: tuple[int, ...], dtype: Any, low: Any, high: Any) -> ActionLeaf:
    """Return an ActionLeaf in the framework's dtype. Round the bounds inward, so that each bound is a valid action."""
    narrow = canonical_dtype(dtype)
    low, high = _limited(dtype, low, high)
    inner_low, inner_high = low.astype(narrow), high.astype(narrow)
    if narrow.kind != "f":
        return ActionLeaf(specs.BoundedArray(shape, narrow, inner_low, inner_high, "action"), dtype)
    above, below = narrow.type(np.inf), narrow.type(-np.inf)
    inner_low = np.where(inner_low < low, np.nextafter(inner_low, above), inner_low)
    inner_high = np.where(inner_high > high, np.nextafter(inner_high, below), inner_high)
    # Sort the two bounds. They can be in the wrong order if no number of the dtype lies between the original bounds.
    inner_low, inner_high = np.minimum(inner_low, inner_high), np.maximum(inner_low, inner_high)
    is_bounded = np.isfinite(low).any() or np.isfinite(high).any()
    spec = specs.BoundedArray(shape, narrow, inner_low, inner_high, "action")
    return ActionLeaf(spec, dtype, bounds=(low.astype(dtype), high.astype(dtype)) if is_bounded else None)


def _limited(dtype: Any, low: Any, high: Any) -> tuple[np.ndarray, np.ndarray]:
    """Limit the bounds to the framework's dtype. Bounds outside its range become infinite, or the integer limit."""
    narrow = canonical_dtype(dtype)
    low, high = np.asarray(low), np.asarray(high)
    if narrow.kind == "f":
        # EnvPool sets missing bounds to numeric_limits::min() and max(). For floats, min() is a tiny positive number.
        given, largest = np.finfo(low.dtype if low.dtype.kind == "f" else np.float64), np.finfo(narrow).max
        return np.where((low == given.tiny) | (low <= -largest), -np.inf, low), np.where(high >= largest, np.inf, high)
    if narrow.kind in "iu":
        limits = np.iinfo(narrow)
        return np.clip(low, limits.min, limits.max), np.clip(high, limits.min, limits.max)
    return low, high
