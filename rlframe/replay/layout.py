"""Split trees into named arrays, check steps, allocate the arrays of batches, and compute the shapes of a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from rlframe.errors import UsageError
from rlframe.types import (
    AgentSpecs,
    Batch,
    Sequence,
    SequenceBatch,
    Step,
    StepSpec,
    TransitionBatch,
    Tree,
    specs,
)

_LARGE = 1 << 18  # bytes; smaller arrays are not reused, because allocation is faster
_KEPT = 6  # maximum number of arrays in the pool for each shape and dtype


class Leaf(NamedTuple):
    """One array of a tree, without the batch axis."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size of one row in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class TreeLayout:
    """Splits trees into their leaves, and builds them again."""

    def __init__(self, name: str, spec: Tree):
        def is_spec(x: Any) -> bool:
            return isinstance(x, specs.Array)

        paths, self._treedef = jtu.tree_flatten_with_path(spec, is_leaf=is_spec)
        self.leaves = [Leaf(name + jtu.keystr(path), tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in paths]
        self.is_leaf = len(paths) == 1 and not paths[0][0]
        self._name = name

    def split(self, tree: Tree) -> list[Any]:
        """Return the values of the tree's leaves, in the order of the attribute `leaves`."""
        return [tree] if self.is_leaf else self._treedef.flatten_up_to(tree)

    def build(self, leaves: list[Any]) -> Tree:
        """Return a tree with these leaves."""
        return leaves[0] if self.is_leaf else self._treedef.unflatten(leaves)

    def check(self, tree: Tree, batch: int) -> None:
        """Raise UsageError if a leaf of `tree` is not a `[batch, ...]` array with the shape and dtype of its spec.

        The message contains the name of the first wrong leaf.
        """
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
    """Raise UsageError if `value` is not an array of shape `[batch, *leaf.shape]` and dtype `leaf.dtype`."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != (batch, *leaf.shape) or dtype != leaf.dtype:
        received = f"{dtype}{list(shape)}" if shape is not None else f"a {type(value).__name__}"
        raise UsageError(
            f"{leaf.name}: the agent's step_spec requires {leaf.dtype}{[batch, *leaf.shape]}, but the replay buffer "
            f"got {received}. Change the environment or the agent to match the spec."
        )


def step_layouts(step_spec: StepSpec) -> dict[str, TreeLayout]:
    """Return the layout of each part of a step, for `check_step`."""
    return {name: TreeLayout(name, getattr(step_spec, name)) for name in StepSpec._fields}


def check_added(env_ids: np.ndarray, step: Step) -> None:
    """Raise UsageError if the arguments of `add` have wrong types."""
    if isinstance(env_ids, np.ndarray) and isinstance(step, Step):
        return
    raise UsageError(
        "add() expects (env_ids, step): global ids as an int64 array (rlframe.types.global_env_ids) and a "
        "rlframe.types.Step(timestep, agent_output, agent_state, params_version, next_timestep), after the "
        f"environments were stepped. Got ({type(env_ids).__name__}, {type(step).__name__}). An Actor does this: "
        "Actor(env_builder, inferencer, replay_buffer).step()."
    )


def check_step(layouts: dict[str, TreeLayout], step: Step, batch: int) -> None:
    """Raise UsageError if `step` does not match the agent's `step_spec` for `batch` environments."""
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


# Function (name, shape, dtype) -> array with one row per slot.
Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]


def process_memory(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array in this process. It uses physical memory only after its rows are written.

    Arrays of scalars are initialized with 0, as in shared memory. Arrays with larger rows are not initialized, because
    NumPy requests huge pages from the kernel only in `np.empty`. Huge pages make random reads of pixels 10 % faster.
    """
    return np.empty(shape, dtype) if len(shape) > 1 else np.zeros(shape, dtype)


def unallocated_array(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a read-only array that uses no memory. It has the shape and `nbytes` of the allocated array."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class OutputArrays:
    """A pool of output arrays for `take`. Arrays are reused, because a new large array causes slow page faults.

    An array is free if only this pool refers to it. Views, batches, and device arrays that share its memory (JAX does
    not copy on a CPU) refer to the array. So an array that a caller still uses is never overwritten.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple, list[np.ndarray]] = {}

    def take(self, data: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return `data[slots]` [*slots.shape, *data.shape[1:]]. Slots beyond the end of `data` wrap around."""
        if slots.size * data.strides[0] < _LARGE:
            return data.take(slots, axis=0, mode="wrap")
        out = self.empty((*slots.shape, *data.shape[1:]), data.dtype)
        # Do not use the default mode "raise", because it copies to a temporary buffer. Other modes write to `out`.
        data.take(slots, axis=0, mode="wrap", out=out)
        return out

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with arbitrary contents that only the caller uses."""
        kept = self._arrays.setdefault((shape, dtype), [])
        for i in range(len(kept)):
            if sys.getrefcount(kept[i]) == 2:  # only this list and the argument refer to it
                return kept[i]
        array = np.empty(shape, dtype)
        if len(kept) < _KEPT:
            kept.append(array)
        return array


def batch_shapes(agent: AgentSpecs | Any, num_envs: int) -> Batch:
    """Return the shapes of the batches that a Learner passes to its agent, before there is a batch.

    Args:
        agent: an agent, or its specs.
        num_envs: number of environments of all writers. Used if `batch_size` of the replay spec is None.

    Returns:
        A batch without `keys` and `params_version`. Its leaves are `jax.ShapeDtypeStruct` objects.
    """
    spec, step = agent.replay_spec, agent.step_spec
    rows = spec.batch_size or num_envs

    def shapes(tree: Tree, *lead: int) -> Tree:
        return jax.tree.map(lambda leaf: _shape((*lead, *leaf.shape), leaf.dtype), tree)

    data: Any
    if isinstance(spec.item, Sequence):
        length, number = spec.item.length, _shape((rows, spec.item.length), np.float32)
        data = SequenceBatch(
            observation=shapes(step.observation, rows, length + 1),
            step_type=_shape((rows, length + 1), np.uint8),
            action=shapes(step.action, rows, length),
            reward=number,
            discount=number,
            extras=shapes(step.extras, rows, length),
            agent_state=shapes(step.agent_state, rows),
        )
    else:
        observation, number = shapes(step.observation, rows), _shape((rows,), np.float32)
        data = TransitionBatch(
            observation, shapes(step.action, rows), number, number, observation, shapes(step.extras, rows)
        )
    return Batch(data, (), _shape((rows,), np.float32), ())


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))
