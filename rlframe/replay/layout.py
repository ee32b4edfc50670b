"""How a tree of specs becomes named flat arrays; the arrays that rows are kept in, and gathered into."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np

from rlframe.errors import UsageError
from rlframe.types import Step, StepSpec, Tree, specs

_LARGE = 1 << 18  # bytes; below, a fresh array costs less than looking for a free one
_KEPT = 6  # arrays per key; a reader that holds more than these gets fresh ones


class Leaf(NamedTuple):
    """One array of a tree, without batch axis."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class TreeLayout:
    """Takes trees apart into their leaves and builds them again."""

    def __init__(self, name: str, spec: Tree):
        def is_spec(x: Any) -> bool:
            return isinstance(x, specs.Array)

        paths, self._treedef = jtu.tree_flatten_with_path(spec, is_leaf=is_spec)
        self.leaves = [Leaf(name + jtu.keystr(path), tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in paths]
        self.is_leaf = len(paths) == 1 and not paths[0][0]
        self._name = name

    def split(self, tree: Tree) -> list[Any]:
        """Return the leaves of `tree`, in the order of `leaves`."""
        return [tree] if self.is_leaf else self._treedef.flatten_up_to(tree)

    def build(self, leaves: list[Any]) -> Tree:
        """Return the inverse of `split`."""
        return leaves[0] if self.is_leaf else self._treedef.unflatten(leaves)

    def map(self, tree: Tree, rows: np.ndarray) -> Tree:
        """Return the tree of `leaf[rows]`."""
        return self.build([np.asarray(value)[rows] for value in self.split(tree)])

    def check(self, tree: Tree, batch: int) -> None:
        """Raise `UsageError` that names the first leaf of `tree` that is not a `[batch, ...]` of its spec."""
        try:
            values = self.split(tree)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            names = ", ".join(leaf.name for leaf in self.leaves) or "nothing"
            raise UsageError(
                f"{self._name}: expected a tree with the leaves {names}; got {_describe(tree)}."
            ) from error
        for leaf, value in zip(self.leaves, values):
            check_array(leaf, value, batch)


def check_array(leaf: Leaf, value: Any, batch: int) -> None:
    """Raise `UsageError` unless `value` is a `[batch, *leaf.shape]` array of `leaf.dtype`."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != (batch, *leaf.shape) or dtype != leaf.dtype:
        came = f"{dtype}{list(shape)}" if shape is not None else f"a {type(value).__name__}"
        raise UsageError(
            f"{leaf.name}: the replay buffer expected {leaf.dtype}{[batch, *leaf.shape]}, as the agent's step_spec "
            f"says; got {came}. Make the environment or the agent give what the spec says."
        )


def step_layouts(step_spec: StepSpec) -> dict[str, TreeLayout]:
    """Return the layouts that `check_step` takes."""
    return {name: TreeLayout(name, getattr(step_spec, name)) for name in StepSpec._fields}


def check_added(env_ids: np.ndarray, step: Step) -> None:
    """Raise `UsageError` unless these are the two arguments of `add`, by their types."""
    if isinstance(env_ids, np.ndarray) and isinstance(step, Step):
        return
    raise UsageError(
        "add() expects (env_ids, step): global ids as an int64 array (rlframe.types.global_env_ids) and a "
        "rlframe.types.Step(timestep, agent_output, agent_state, params_version, next_timestep), so after the "
        f"environments have answered. Got ({type(env_ids).__name__}, {type(step).__name__}). An Actor does this: "
        "Actor(env_builder, inferencer, replay_buffer).step()."
    )


def check_step(layouts: dict[str, TreeLayout], step: Step, batch: int) -> None:
    """Raise `UsageError` unless `step` is one of `batch` environments, as the agent's `step_spec` says."""
    scalars = {"step_type": np.uint8, "reward": np.float32, "discount": np.float32}
    for which in ("timestep", "next_timestep"):
        timestep = getattr(step, which)
        layouts["observation"].check(timestep.observation, batch)
        for name, dtype in scalars.items():
            check_array(Leaf(f"{which}.{name}", (), np.dtype(dtype)), getattr(timestep, name), batch)
    layouts["action"].check(step.agent_output.action, batch)
    layouts["extras"].check(step.agent_output.extras, batch)
    layouts["agent_state"].check(step.agent_state, batch)


def _describe(tree: Tree) -> str:
    return str(jtu.tree_map(lambda x: f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}", tree))


# (name, shape, dtype) -> an array with a row per slot
Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]


def process_memory(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of this process, which it takes as the array fills.

    Columns of scalars begin at 0, as shared memory does. Larger rows hold anything: for arrays like these NumPy asks
    the kernel for huge pages only in `np.empty`, and gathering rows of pixels at random takes a tenth less time with
    them.
    """
    return np.empty(shape, dtype) if len(shape) > 1 else np.zeros(shape, dtype)


def unallocated_array(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array to measure and not to write to: it has its shape and its `nbytes`, and one value."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class OutputArrays:
    """`take` into arrays that are recycled: for pixels, faulting in fresh pages costs more than the copy.

    An array is free when only this pool refers to it. Views, device arrays that alias it (JAX on CPU does not copy) and
    batches all hold a reference, so what a caller still sees is never overwritten.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple, list[np.ndarray]] = {}

    def take(self, data: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return `data[slots]`, `[*slots.shape, *data.shape[1:]]`. Slots beyond the end wrap."""
        if slots.size * data.strides[0] < _LARGE:
            return data.take(slots, axis=0, mode="wrap")
        out = self.empty((*slots.shape, *data.shape[1:]), data.dtype)
        # Any mode but "raise" writes straight into `out`; "raise" would gather into a buffer first.
        data.take(slots, axis=0, mode="wrap", out=out)
        return out

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with arbitrary contents that nobody else refers to."""
        kept = self._arrays.setdefault((shape, dtype), [])
        for i in range(len(kept)):
            if sys.getrefcount(kept[i]) == 2:  # the list, and the argument of getrefcount
                return kept[i]
        array = np.empty(shape, dtype)
        if len(kept) < _KEPT:
            kept.append(array)
        return array
