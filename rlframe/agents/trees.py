"""Functions on trees of arrays and specs: create zeros, remove or merge axes, and check shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dm_env
import jax
import jax.numpy as jnp
import numpy as np

from rlframe.errors import UsageError
from rlframe.types import AgentState, TimeStep, Tree, specs


def zero_timestep(observation_spec: Tree, batch_size: int) -> TimeStep:
    """Return a batch of FIRST timesteps with zero observations."""
    return dm_env.TimeStep(
        step_type=np.zeros((batch_size,), np.uint8),
        reward=np.zeros((batch_size,), np.float32),
        discount=np.ones((batch_size,), np.float32),
        observation=zeros_like_spec(observation_spec, batch_size),
    )


def zeros_like_spec(spec: Tree, batch_size: int) -> Tree:
    """Return zeros `[batch_size, ...]` for each leaf of a tree of specs."""
    return jax.tree.map(lambda leaf: np.zeros((batch_size, *leaf.shape), leaf.dtype), spec)


def reset_where(is_first: Any, state: AgentState, initial: AgentState, xp: Any = np) -> AgentState:
    """Return `state` `[B, ...]`, in which rows of `initial` replace the rows where `is_first` (`[B]` bool) is True.

    `xp` is the library of the arrays: `numpy`, or `jax.numpy` inside a jitted function.
    """
    if xp is np and not is_first.any():
        return state

    def choose(old: Any, fresh: Any) -> Any:
        return xp.where(is_first.reshape((-1,) + (1,) * (old.ndim - 1)), xp.asarray(fresh, old.dtype), old)

    return jax.tree.map(choose, state, initial)


def flatten_batch_and_time(tree: Tree) -> Tree:
    """Reshape leaves `[B, T, ...]` to `[B * T, ...]`."""
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *leaf.shape[2:])), tree)


def swap_batch_and_time(tree: Tree) -> Tree:
    """Transpose leaves from `[B, T, ...]` to `[T, B, ...]`, or back."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


def check_tree(label: str, spec: Tree, tree: Tree, *, owner: str) -> None:
    """Raise UsageError for the first leaf that does not match its spec with a batch axis. Messages use `label`."""
    expected, received = _named_leaves(spec), _named_leaves(tree)
    if expected.keys() != received.keys():
        raise UsageError(f"{owner}: {label} has the leaves {_names(received)}, but its spec has {_names(expected)}.")
    for name, leaf_spec in expected.items():
        leaf = received[name]
        if not leaf.shape or tuple(leaf.shape[1:]) != tuple(leaf_spec.shape) or leaf.dtype != leaf_spec.dtype:
            raise UsageError(
                f"{owner}: {label}{name} should be [{_dims(('B', *leaf_spec.shape))}] {np.dtype(leaf_spec.dtype)}, "
                f"got [{_dims(leaf.shape)}] {np.dtype(leaf.dtype)}."
            )


def check_shapes(**arrays: tuple[Any, str]) -> None:
    """Raise ValueError if an array has an unexpected shape. Example: `check_shapes(rewards=(rewards, "T B"))`.

    A dimension must have the same size wherever its name is used. After the first use of "T", "T+1" is also allowed.
    "..." means all remaining dimensions, and a number means a dimension of this size.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for name, (array, dims) in arrays.items():
        shape: tuple[int, ...] = np.shape(array)
        wanted: tuple[int, ...] = ()
        for i, dim in enumerate(dims.split()):
            letter, _, addend = dim.partition("+")
            actual = shape[i:] if letter == "..." else shape[i : i + 1] or (-1,)
            size = (int(letter),) if letter.isdigit() else sizes.setdefault(letter, actual)
            wanted += (size[0] + int(addend),) if addend else size
        if wanted != shape:
            known = ", ".join(f"{letter} = {_dims(size)}" for letter, size in sizes.items())
            raise ValueError(f"{name} must be [{', '.join(dims.split())}] with {known}; got [{_dims(shape)}].")


def without_batch(tree: Tree) -> Tree:
    """Return the specs of one row of a tree of arrays `[B, ...]`."""

    def leaf_spec(path: Any, leaf: Any) -> specs.Array:
        return specs.Array(leaf.shape[1:], np.dtype(leaf.dtype), jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(leaf_spec, tree)


def _named_leaves(tree: Tree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _names(leaves: Mapping[str, Any]) -> str:
    return ", ".join(name or "(a single array)" for name in leaves) or "(none)"


def _dims(shape: Any) -> str:
    return ", ".join(str(size) for size in shape)
