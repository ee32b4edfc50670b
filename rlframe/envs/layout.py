"""Observation trees (dict, tuple) as lists of leaves in a fixed order. The error for a value that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlframe.errors import EnvError, RlframeError, UsageError


class Layout:
    """The leaves of a spec tree in a fixed order, to go from trees to lists of arrays and back."""

    def __init__(self, spec: Any):
        self.spec = spec
        self.leaves: list[Any] = list(_leaves(spec))
        self.is_leaf = not isinstance(spec, (dict, tuple))
        parts = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple) else ()
        is_nested = any(isinstance(part, (dict, tuple)) for part in parts)
        self._keys = tuple(spec) if isinstance(spec, dict) and not is_nested else None
        self._is_flat_tuple = isinstance(spec, tuple) and not is_nested

    def flatten(self, tree: Any) -> list[Any]:
        """The leaves of a tree of this structure: any Mapping stands for a dict, a list for a tuple.

        Raises MisfitError, which names the part that has another structure.
        """
        if self.is_leaf:
            return [tree]
        if type(tree) is dict and self._keys is not None and len(tree) == len(self._keys):
            try:  # `contextlib.suppress` would take as long as all the rest
                return [tree[key] for key in self._keys]
            except KeyError:
                pass
        elif type(tree) is tuple and self._is_flat_tuple and len(tree) == len(self.leaves):
            return list(tree)
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
            came = f"a dict with the keys {_keys(tree)}" if isinstance(tree, Mapping) else type(tree).__name__
            raise MisfitError(path, came, f"a dict with the keys {_keys(spec)}")
        for key, sub in spec.items():
            _flatten(sub, tree[key], f"{path}.{key}", out)
    elif isinstance(spec, tuple):
        if not isinstance(tree, (tuple, list)) or len(tree) != len(spec):
            came = f"{type(tree).__name__} of {len(tree)}" if isinstance(tree, (tuple, list)) else type(tree).__name__
            raise MisfitError(path, came, f"a tuple of {len(spec)}")
        for i, sub in enumerate(spec):
            _flatten(sub, tree[i], f"{path}.{i}", out)
    else:
        out.append(tree)


def _keys(tree: Mapping[Any, Any]) -> list[str]:
    return sorted(map(str, tree))


def _unflatten(spec: Any, leaves: Any) -> Any:
    if isinstance(spec, dict):
        return {key: _unflatten(sub, leaves) for key, sub in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_unflatten(sub, leaves) for sub in spec)
    return next(leaves)


class MisfitError(UsageError):
    """An observation, or a part of one, that is not in its space.

    Args:
      name: of the part.
      came: the value; or its dtype and shape, or its structure, where these are wrong.
      expected: what the space allows.
      place: the indices of a value that is not allowed; None where dtype, shape or structure are wrong.
    """

    def __init__(self, name: str, came: str, expected: str, place: tuple[int, ...] | None = None):
        self.name, self.came, self.expected, self.place = name, came, expected, place
        super().__init__(f"{name!r} must be {expected}, got {came}{_at(place)}.")

    def of_environment(self, env_id: int) -> RlframeError:
        """The same, naming the environment that gave the observation."""
        gave = f"Environment {env_id} gave {self.name!r}"
        if self.place is None:
            return UsageError(
                f"{gave} as {self.came}, but its space says {self.expected}. Correct the environment's observation "
                "space."
            )
        return EnvError(
            f"{gave} with {self.came}{_at(self.place)}: expected {self.expected}. Correct the environment, or its "
            "observation space."
        )

    def of_row(self, env_ids: Any) -> RlframeError:
        """The same, where the observations of the environments `env_ids` were encoded as one batch."""
        if not self.place:
            return self.of_environment(env_ids[0])
        inside = MisfitError(self.name, self.came, self.expected, self.place[1:])
        return inside.of_environment(env_ids[self.place[0]])


def _at(place: tuple[int, ...] | None) -> str:
    return f" at {place}" if place else ""
