"""Items as rows of bytes: how they travel to another process, and lie there.

A row is a numpy record that holds everything of one item. It goes as one array, because what a server's client pays for
is the number of arrays: of seven named columns, a quarter as many items per second go in, and come out.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rlframe.replay.layout import TreeLayout
from rlframe.types import AgentSpecs, Batch, Sequence, SequenceBatch, Transition, TransitionBatch, Tree, specs

_SCALAR = specs.Array((), np.float32)


class ItemRows:
    """Turns batches of an agent's items into rows, and rows into batches.

    Attributes:
        dtype: the record: `key` [3] int64 (rank, incarnation, number), `params_version` int64, and the item's leaves.
        description: JSON of what the rows hold; two processes understand each other where theirs are equal.
    """

    def __init__(self, agent: AgentSpecs) -> None:
        item = agent.replay_spec.item
        self._batch = TransitionBatch if isinstance(item, Transition) else SequenceBatch
        self._trees: dict[str, TreeLayout] = {}
        columns: list[tuple[str, Any, tuple[int, ...]]] = [("key", np.int64, (3,)), ("params_version", np.int64, ())]
        for field, (spec, time) in _fields(agent).items():
            layout = self._trees[field] = TreeLayout(field, spec)
            columns += [(leaf.name, leaf.dtype, (*time, *leaf.shape)) for leaf in layout.leaves]
        self.dtype = np.dtype(columns, align=True)  # type: ignore[call-overload]
        leaves = [[name, np.dtype(dtype).str, list(shape)] for name, dtype, shape in columns]
        self.description = json.dumps({"kind": agent.replay_spec.kind, "item": repr(item), "leaves": leaves})

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize

    def pack(self, batch: Batch) -> np.ndarray:
        """Returns the items of `batch` as rows, [B, nbytes] uint8."""
        records = np.zeros(len(batch.keys), self.dtype)
        records["key"], records["params_version"] = batch.keys, batch.params_version
        for field, layout in self._trees.items():
            for leaf, values in zip(layout.leaves, layout.split(getattr(batch.data, field))):
                records[leaf.name] = values
        return records.view(np.uint8).reshape(len(records), self.nbytes)

    def unpack(self, rows: np.ndarray, probabilities: np.ndarray) -> Batch:
        """The inverse of `pack`, with the chances of the draws ([B] float32)."""
        records = rows.reshape(-1).view(self.dtype)
        data = {
            field: layout.build([np.ascontiguousarray(records[leaf.name]) for leaf in layout.leaves])
            for field, layout in self._trees.items()
        }
        keys, versions = np.ascontiguousarray(records["key"]), np.ascontiguousarray(records["params_version"])
        return Batch(self._batch(**data), keys, probabilities, versions)

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """[B] int64: the last part of each row's key. Below 0 the row is padding."""
        return rows.reshape(-1).view(self.dtype)["key"][:, 2]

    def ranks(self, rows: np.ndarray) -> np.ndarray:
        """[B] int64: who wrote each row."""
        return rows.reshape(-1).view(self.dtype)["key"][:, 0]

    def versions(self, rows: np.ndarray) -> np.ndarray:
        """[B] int64: the oldest version that acted in each row."""
        return rows.reshape(-1).view(self.dtype)["params_version"]

    def padding(self, count: int) -> np.ndarray:
        """Returns rows that hold no item, [count, nbytes] uint8."""
        records = np.zeros(count, self.dtype)
        records["key"] = -1
        return records.view(np.uint8).reshape(count, self.nbytes)


def _fields(agent: AgentSpecs) -> dict[str, tuple[Tree, tuple[int, ...]]]:
    """Field of a batch -> (its tree of specs, the time axis of its leaves)."""
    item, step = agent.replay_spec.item, agent.step_spec
    if isinstance(item, Sequence):
        steps, ends = (item.length,), (item.length + 1,)
        return {
            "observation": (step.observation, ends),
            "step_type": (specs.Array((), np.uint8), ends),
            "action": (step.action, steps),
            "reward": (_SCALAR, steps),
            "discount": (_SCALAR, steps),
            "extras": (step.extras, steps),
            "agent_state": (step.agent_state, ()),
        }
    return {
        "observation": (step.observation, ()),
        "action": (step.action, ()),
        "reward": (_SCALAR, ()),
        "discount": (_SCALAR, ()),
        "next_observation": (step.observation, ()),
        "extras": (step.extras, ()),
    }
