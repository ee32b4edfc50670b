"""Everything that a replay buffer in memory holds: built to size, counted, saved and restored."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rlframe.errors import CheckpointError, UsageError
from rlframe.replay import checkpoint
from rlframe.replay.items import Sequences, Transitions
from rlframe.replay.layout import TreeLayout
from rlframe.replay.memory import check_memory
from rlframe.replay.prioritised import PrioritisedTable
from rlframe.replay.stores import Allocate, ObservationStore, observation_bytes, own_memory
from rlframe.replay.tables import ItemTable, QueueTable, UniformTable
from rlframe.replay.timeline import Timeline, Writer
from rlframe.types import ReplaySpec, StepSpec, Transition

_CHUNK = 1024  # timesteps that are given up at once
_BOOKKEEPING = 1 + 2 * 8 + 4  # bytes per slot: whether an item starts there, the table's entries, and the writer


class Rows:
    """What is kept of each timestep, a row per slot of `timeline`.

    Attributes:
        items: actions, rewards and what else an item is made of.
        observations: each once.
        origin: [slots] int32, which of the (rank, incarnation)s wrote the slot.
    """

    def __init__(
        self,
        spec: ReplaySpec,
        step_spec: StepSpec,
        timeline: Timeline,
        table: ItemTable,
        num_envs: int,
        single_frame: bool | None,
        allocate: Allocate = own_memory,
    ):
        self.items: Transitions | Sequences
        if isinstance(spec.item, Transition):
            self.items = Transitions(spec.item, step_spec, timeline, table, allocate)
        else:
            self.items = Sequences(spec.item, step_spec, timeline, table, allocate)
        layout = TreeLayout("observation", step_spec.observation)
        self.observations = ObservationStore(layout, timeline, single_frame, num_envs, allocate)
        self.origin = allocate("origin", (timeline.slots,), np.dtype(np.int32))


class Contents:
    """The arrays behind a buffer of `slots` timesteps."""

    def __init__(
        self, spec: ReplaySpec, step_spec: StepSpec, slots: int, chunk: int, num_envs: int, single_frame: bool | None
    ):
        self.spec, self.num_envs = spec, num_envs
        self._step_spec = step_spec
        check_memory(bytes_needed(spec, step_spec, slots, num_envs, single_frame), slots, _what(step_spec))
        self.timeline = Timeline(slots, chunk)
        self.table = make_table(spec.kind, self.timeline, spec.priority_exponent)
        self.rows = Rows(spec, step_spec, self.timeline, self.table, num_envs, single_frame)
        self.items, self.observations, self.origin = self.rows.items, self.rows.observations, self.rows.origin

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when it is full."""
        return _row_bytes(self.spec, self._step_spec) * self.timeline.slots + self.observations.nbytes

    def arrays(self) -> dict[str, np.ndarray]:
        """The used part of everything that is indexed by slots."""
        parts = {"items": self.items, "observations": self.observations, "table": self.table}
        arrays = {f"{part}/{name}": array for part, it in parts.items() for name, array in it.arrays().items()}
        return {**arrays, "origin": self.timeline.used(self.origin)}


def sizes(spec: ReplaySpec, num_envs: int, all_envs: int, chunks: int = 16) -> tuple[int, int]:
    """Returns (slots, chunk) so that the newest `spec.capacity` timesteps are always there, in whole batches.

    A chunk, which is given up at once, is one of at least `chunks` that they are in.
    """
    chunk = -(-min(_CHUNK, max(1, spec.capacity // chunks)) // num_envs) * num_envs
    slots = -(-max(spec.capacity + num_envs, needed(spec, all_envs)) // num_envs) * num_envs + chunk
    return slots, chunk


def needed(spec: ReplaySpec, all_envs: int) -> int:
    """Timesteps for an item of each environment, the open ones, and those that one call may allocate."""
    item = spec.item
    return all_envs * ((item.n_step if isinstance(item, Transition) else item.length) + 4)


def bytes_needed(spec: ReplaySpec, step_spec: StepSpec, slots: int, num_envs: int, single_frame: bool | None) -> int:
    """Bytes that a full buffer takes."""
    layout = TreeLayout("observation", step_spec.observation)
    return _row_bytes(spec, step_spec) * slots + observation_bytes(layout, single_frame, slots, num_envs)


def _row_bytes(spec: ReplaySpec, step_spec: StepSpec) -> int:
    """Of one slot, its observation aside."""
    kind = Transitions if isinstance(spec.item, Transition) else Sequences
    return kind.row_bytes(step_spec) + _BOOKKEEPING


def save(path: str | os.PathLike[str], contents: Contents, writers: dict[int, Writer], state: dict[str, Any]) -> None:
    """Writes everything to `path`, atomically. Raises `CheckpointError` where that fails."""
    timeline, table = contents.timeline, contents.table
    header = {
        "spec": repr(contents.spec),
        "slots": timeline.slots,
        "chunk": timeline.chunk,
        "num_envs": contents.num_envs,
        "head": timeline.head,
        "floor": timeline.floor,
        "table": table.state(),
        "items": contents.items.state(),
        "framed": contents.observations.framed(),
        "writers": [[w.rank, w.incarnation, w.num_envs, w.origin] for w in writers.values()],
        "state": state,
    }
    arrays = contents.arrays()
    arrays.update({f"extra/{name}": array for name, array in contents.observations.extra().items()})
    for writer in writers.values():
        arrays.update({f"writer {writer.rank}/{name}": array for name, array in writer.arrays().items()})
    checkpoint.write(path, header, arrays)


def restore(
    path: str | os.PathLike[str], spec: ReplaySpec, step_spec: StepSpec, single_frame: bool | None
) -> tuple[Contents, dict[int, Writer], dict[str, Any]]:
    """The inverse of `save`. Raises `CheckpointError` where the file is missing, damaged or another agent's."""
    made: dict[str, Any] = {}

    def places(header: dict[str, Any], shapes: checkpoint.Shapes) -> dict[str, np.ndarray]:
        if header["spec"] != repr(spec):
            raise CheckpointError(f"{path} was saved by a replay buffer with {header['spec']}; this one has {spec!r}.")
        if "slots" not in header:
            raise CheckpointError(f"{path} was saved by a SharedMemReplayBuffer; this is the in-process ReplayBuffer.")
        contents = Contents(spec, step_spec, header["slots"], header["chunk"], header["num_envs"], single_frame)
        contents.observations.restore_framed(header["framed"])
        timeline = contents.timeline
        timeline.head, timeline.floor = header["head"], header["floor"]
        contents.table.set_state(header["table"])
        contents.items.set_state(header["items"])
        writers = {}
        for rank, incarnation, num_envs, origin in header["writers"]:
            writer = Writer(rank, incarnation, num_envs, contents.items.period, contents.items.history)
            writer.origin, writers[rank] = origin, writer
            writer.margin = num_envs + timeline.chunk - timeline.slots
        extra = {name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items() if name.startswith("extra/")}
        made.update(contents=contents, writers=writers, extra=extra)
        arrays = {**contents.arrays(), **extra}
        for writer in writers.values():
            arrays.update({f"writer {writer.rank}/{name}": array for name, array in writer.arrays().items()})
        for name in arrays.keys() | shapes.keys():
            here = [arrays[name].dtype.str, list(arrays[name].shape)] if name in arrays else "nothing of that name"
            if here != shapes.get(name):
                there = shapes.get(name)
                raise CheckpointError(f"{path} was saved by another agent: {name} is {there} there, {here} here.")
        return arrays

    header = checkpoint.read(path, places)
    contents, writers = made["contents"], made["writers"]
    contents.observations.set_extra({name[len("extra/") :]: array for name, array in made["extra"].items()})
    for writer in writers.values():
        writer.gather(contents.timeline)
    return contents, writers, header["state"]


def make_table(kind: str, timeline: Timeline, priority_exponent: float) -> ItemTable:
    """The table of the items of `timeline`, drawn as `kind` says."""
    if kind == "prioritised":
        return PrioritisedTable(timeline, priority_exponent)
    return QueueTable(timeline) if kind == "queue" else UniformTable(timeline)


def _what(step_spec: StepSpec) -> str:
    names = [leaf.name for leaf in TreeLayout("observation", step_spec.observation).leaves]
    return f"{', '.join(names)} and what the agent stores of each step"


def check_room(spec: ReplaySpec, slots: int, chunk: int, all_envs: int) -> None:
    """Raises `UsageError` where a buffer in use is too small for `all_envs` environments."""
    if needed(spec, all_envs) + chunk > slots:
        raise UsageError(
            f"The replay buffer keeps {slots - chunk} timesteps, but {all_envs} environments need "
            f"{needed(spec, all_envs)} for one item each. Give it a capacity of at least {needed(spec, all_envs)}."
        )
