"""A ring of timesteps and the items that they form: one class for own and for shared memory, for writers and readers.

A buffer in this process has one of its own. In shared memory each writer has one over its segment, and each reader one
over all of them. A writer to a Reverb server has a small one, which its items leave as soon as they are complete.

`ItemAssembler` is for stores that keep whole items: a Reverb server, or your own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from rlframe.errors import UsageError
from rlframe.replay.items import Sequences, Transitions
from rlframe.replay.layout import Allocate, OutputArrays, check_step, process_memory, step_layouts, unallocated_array
from rlframe.replay.tables import ItemTable, PrioritizedTable, QueueTable, UniformTable
from rlframe.replay.timeline import Index, Timeline, WriterFragments
from rlframe.replay.tree_store import TreeStore, check_memory
from rlframe.types import AgentSpecs, Batch, ReplaySpec, Sequence, Step, StepSpec, Transition, split_env_ids

_CHUNK = 1024  # timesteps that are given up at once
_TABLE_BYTES = 1 + 2 * 8  # bytes per slot: whether an item starts there, and the table's entries
_MAX_SLOWDOWN = 8  # an environment may be so many times slower than its actor's others without losing its open items


class StepStore:
    """Steps in a ring of slots, one row per timestep. Writers add steps; readers read items.

    The words are those of timeline.py, which explains them with an example: number, slot, block, index, floor, start,
    span, origin, and lockstep.

    Args:
        spec: what the agent learns from.
        step_spec: what a step holds.
        timeline: which timesteps there are, and where.
        table: which items there are; the store reports each complete or overwritten one to it.
        num_envs: environments of the first writer.
        single_frame: keep frame-stacked pixels one frame per step; None: where they look like it.
        allocate: gives the arrays.

    Attributes:
        items: actions, rewards and what else an item is made of.
        observations: each once.
        origin: [slots] int32, which of the (rank, incarnation)s wrote the slot.
        marks_origin: whether `origin` must be written.
    """

    def __init__(
        self,
        spec: ReplaySpec,
        step_spec: StepSpec,
        timeline: Timeline,
        table: ItemTable,
        num_envs: int = 1,
        single_frame: bool | None = False,
        allocate: Allocate = process_memory,
    ) -> None:
        self.timeline, self.table = timeline, table
        kind = Transitions if isinstance(spec.item, Transition) else Sequences
        self.items: Transitions | Sequences = kind(spec.item, step_spec, timeline, table, allocate)  # type: ignore[arg-type]
        self._layouts = step_layouts(step_spec)
        self.observations = TreeStore(self._layouts["observation"], timeline, allocate, single_frame, num_envs)
        self.origin = allocate("origin", (timeline.slots,), np.dtype(np.int32))
        self.marks_origin = False
        self._outputs = OutputArrays()

    @classmethod
    def in_process_memory(
        cls, spec: ReplaySpec, step_spec: StepSpec, slots: int, chunk: int, num_envs: int, single_frame: bool | None
    ) -> StepStore:
        """Make a store of `slots` timesteps in this process's memory. Raise `UsageError` if it does not fit."""
        check_fits(spec, step_spec, slots, num_envs, single_frame)
        timeline = Timeline(slots, chunk)
        table = make_table(spec.kind, timeline, spec.priority_exponent)
        return cls(spec, step_spec, timeline, table, num_envs, single_frame)

    def open(self, rank: int, incarnation: int, num_envs: int, origin: int) -> WriterFragments:
        """Return the open fragments of a writer, which `origin` stands for in the slots that it writes."""
        fragments = WriterFragments(rank, incarnation, num_envs, self.items.period, self.items.history)
        fragments.origin = origin
        fragments.margin = num_envs + self.timeline.chunk - self.timeline.slots
        return fragments

    def add(self, fragments: WriterFragments, envs: np.ndarray | None, step: Step) -> None:
        """Add a step of the environments `envs` [B] of one writer; None: of all of them, in order.

        A writer that is not in lockstep (see `WriterFragments`) adds by `_add_scattered`. A writer in lockstep, as most
        are, does the same here for a whole block: its open timesteps are the ones that the step begins with.
        """
        after, observations = step.next_timestep, self.observations
        if not fragments.checked:
            check_step(self._layouts, step, fragments.num_envs if envs is None else len(envs))
            fragments.checked = True
        if (
            envs is None
            and fragments.type_bytes == step.timestep.step_type.tobytes()
            and fragments.open_block >= self.timeline.head + fragments.margin
        ):
            next_block, index = self._allocate(fragments.num_envs, fragments)
            if observations.only_array is not None:
                observations.only_array[index] = after.observation
            else:
                observations.write(index, after.observation, next_block, fragments.open_block)
            self.items.put(fragments, None, fragments.open_block, next_block, step)
            fragments.open_block, fragments.type_bytes = next_block, after.step_type.tobytes()
            fragments.position += 1
        else:
            self._add_scattered(fragments, fragments.range if envs is None else envs, step)

    def _add_scattered(self, fragments: WriterFragments, envs: np.ndarray, step: Step) -> None:
        """Add a step of some of a writer's environments, or of all where a fragment begins or is broken."""
        fragments.leave_lockstep()
        before, after, count = step.timestep, step.next_timestep, len(envs)
        numbers = fragments.open[envs]
        # What this call may overwrite (two timesteps for each environment) counts as gone.
        kept = (numbers >= self.timeline.floor_after_allocating(2 * count)) & (
            fragments.types[envs] == before.step_type
        )
        if not kept.all():
            lost = ~kept
            first, index = self._allocate(int(np.count_nonzero(lost)), fragments)
            numbers[lost] = first + np.arange(np.count_nonzero(lost))
            self.observations.write(index, self._layouts["observation"].map(before.observation, lost), first)
            self.items.open(index, before.step_type[lost])
            self.items.discard(fragments, envs[lost])
        first, index = self._allocate(count, fragments)
        next_numbers = first + np.arange(count)
        self.observations.write(index, after.observation, first, numbers)
        self.items.put(fragments, envs, numbers, next_numbers, step)
        fragments.open[envs], fragments.types[envs] = next_numbers, after.step_type
        fragments.positions[envs] += 1
        if count == fragments.num_envs and (envs == fragments.range).all():
            fragments.enter_lockstep()

    def _allocate(self, count: int, fragments: WriterFragments) -> tuple[int, Index]:
        """Allocate `count` timesteps, and drop the items that are given up for them."""
        timeline = self.timeline
        first = timeline.head
        if first + count - timeline.floor > timeline.slots:
            for index in timeline.raise_floor(count):
                self.table.evict(index)
        timeline.head = first + count
        index = timeline.index(first, count)
        if self.marks_origin:
            self.origin[index] = fragments.origin
        return first, index

    def read(self, slots: np.ndarray) -> tuple[Any, np.ndarray]:
        """Copy out the items that start in `slots` [B]: (their data, [B] the oldest version that acted in each)."""
        return self.items.assemble(slots, self.observations, self._outputs)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when it is full, with the table."""
        return self.items.nbytes + self.observations.nbytes + self.origin.nbytes + _TABLE_BYTES * self.timeline.slots

    def forget_before(self, version: int) -> int:
        """Drop the items of a queue that a version below `version` acted in, and return how many."""
        if version < 0 or not isinstance(self.table, QueueTable) or not self.table.size:
            return 0
        return self.table.forget_before(version, self.items.params_version)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must hold: their used rows."""
        parts = {"items": self.items, "observations": self.observations, "table": self.table}
        arrays = {f"{part}/{name}": array for part, it in parts.items() for name, array in it.arrays().items()}
        return {**arrays, "origin": self.timeline.used(self.origin)}


class Writer(Protocol):
    """The state of a writer in a buffer."""

    rank: int
    num_envs: int
    id_bytes: bytes  # of the ids of all its environments, in order


W = TypeVar("W", bound=Writer)


class Writers(Generic[W]):
    """The writers of a buffer, found by the ids of their environments."""

    def __init__(self) -> None:
        self.by_rank: dict[int, W] = {}
        self._last: W | None = None  # that added

    def put(self, writer: W) -> None:
        """Take over a rank."""
        self.by_rank[writer.rank], self._last = writer, None

    def drop(self, rank: int) -> None:
        """Forget the writer of a rank, if there is one."""
        self.by_rank.pop(rank, None)
        self._last = None

    def find(self, env_ids: np.ndarray) -> tuple[W, np.ndarray | None]:
        """Return the writer that `env_ids` belong to, and the environments' indices (None: all of its, in order).

        Raises:
            UsageError: they are not all of one writer.
        """
        given, last = env_ids.tobytes(), self._last
        if last is not None and given == last.id_bytes:
            return last, None
        for writer in list(self.by_rank.values()):  # threads may come and go
            if given == writer.id_bytes:
                self._last = writer
                return writer, None
        ranks, envs = split_env_ids(np.asarray(env_ids, np.int64))
        owner = self.by_rank.get(int(ranks[0])) if len(ranks) else None
        if owner is None or (ranks != ranks[0]).any() or (envs >= owner.num_envs).any():
            claimed = ", ".join(f"{w.rank} ({w.num_envs} environments)" for w in self.by_rank.values()) or "none"
            raise UsageError(
                f"add() got the env_ids {env_ids!r}; they must be of one claimed rank. Claimed: {claimed}. "
                "Call claim_rank(num_envs) first and use rlframe.types.global_env_ids(rank, indices)."
            )
        return owner, envs


def make_table(kind: str, timeline: Timeline, priority_exponent: float) -> ItemTable:
    """Return the table of the items of `timeline`, drawn as `kind` says."""
    if kind == "prioritized":
        return PrioritizedTable(timeline, priority_exponent)
    return QueueTable(timeline) if kind == "queue" else UniformTable(timeline)


def sizes(spec: ReplaySpec, num_envs: int, all_envs: int, chunks: int = 16) -> tuple[int, int]:
    """Return (slots, chunk) so that the newest `spec.capacity` timesteps are always there, in whole batches.

    A chunk, which is given up at once, is one of at least `chunks` that they are in.
    """
    chunk = -(-min(_CHUNK, max(1, spec.capacity // chunks)) // num_envs) * num_envs
    slots = -(-max(spec.capacity + num_envs, timesteps_needed(spec, all_envs)) // num_envs) * num_envs + chunk
    return slots, chunk


def timesteps_needed(spec: ReplaySpec, all_envs: int) -> int:
    """Return how many timesteps one item of each environment needs, with those that one call may allocate."""
    item = spec.item
    return all_envs * ((item.n_step if isinstance(item, Transition) else item.length) + 4)


def bytes_needed(
    spec: ReplaySpec, step_spec: StepSpec, slots: int, num_envs: int = 1, single_frame: bool | None = False
) -> int:
    """Return the bytes that a full buffer takes."""
    table = UniformTable(Timeline(1, 1))
    return StepStore(spec, step_spec, Timeline(slots, 1), table, num_envs, single_frame, unallocated_array).nbytes


def check_fits(
    spec: ReplaySpec, step_spec: StepSpec, slots: int, num_envs: int = 1, single_frame: bool | None = False
) -> None:
    """Raise `UsageError` if a buffer of `slots` timesteps does not fit into the memory that is left."""
    size = bytes_needed(spec, step_spec, slots, num_envs, single_frame)
    check_memory(size, slots, "observations and what the agent stores of each step")


def check_room(spec: ReplaySpec, slots: int, chunk: int, all_envs: int) -> None:
    """Raise `UsageError` if a buffer in use is too small for `all_envs` environments."""
    needed = timesteps_needed(spec, all_envs)
    if needed + chunk > slots:
        raise UsageError(
            f"The replay buffer keeps {slots - chunk} timesteps, but {all_envs} environments need {needed} for one "
            f"item each. Give it a capacity of at least {needed}."
        )


class ItemAssembler:
    """Completes the items of this process's writers, and gives them up as soon as they are complete.

    It knows all that is difficult about items: n-step returns, episodes that end, environments that answer in any
    order, fragments that break off. One thread at a time.

    Args:
        agent: an Agent (anything with `replay_spec` and `step_spec`).
    """

    def __init__(self, agent: AgentSpecs) -> None:
        self._agent = agent
        self._writers = Writers[WriterFragments]()
        self._stores: dict[int, tuple[StepStore, QueueTable]] = {}
        self._next: dict[int, int] = {}

    def open(self, rank: int, incarnation: int, num_envs: int) -> None:
        """Take a writer in, or take it in again: what its predecessor left open is dropped."""
        spec = self._agent.replay_spec
        length = spec.item.length if isinstance(spec.item, Sequence) else spec.item.n_step
        spec = dataclasses.replace(spec, capacity=_MAX_SLOWDOWN * num_envs * (length + 4))
        slots, chunk = sizes(spec, num_envs, num_envs)
        timeline = Timeline(slots, chunk)
        table = QueueTable(timeline)
        store = StepStore(spec, self._agent.step_spec, timeline, table, num_envs, None)
        self._stores[rank], self._next[rank] = (store, table), 0
        self._writers.put(store.open(rank, incarnation, num_envs, origin=0))

    def drop(self, rank: int) -> None:
        """Forget a writer and its open fragments."""
        self._writers.drop(rank)

    def rank_of(self, env_ids: np.ndarray) -> int:
        """Return the rank of the writer that `env_ids` belong to. Raise `UsageError` if there is no such writer."""
        return self._writers.find(env_ids)[0].rank

    def add(self, env_ids: np.ndarray, step: Step) -> Batch | None:
        """Add a step, and return the items that it completed, the oldest first; None if there are none.

        Their keys number the items of each writer (see `renumber`). Their `probabilities` mean nothing.
        """
        fragments, envs = self._writers.find(env_ids)
        store, table = self._stores[fragments.rank]
        store.add(fragments, envs, step)
        count = table.size
        if not count:
            return None
        starts, probabilities = table.draw(count)
        data, versions = store.read(store.timeline.slots_of(starts))
        keys = np.full((count, 3), (fragments.rank, fragments.incarnation, 0), np.int64)
        keys[:, 2] = np.arange(self._next[fragments.rank], self._next[fragments.rank] + count)
        self._next[fragments.rank] += count
        return Batch(data, keys, probabilities, versions)

    def renumber(self, batch: Batch, at_least: int) -> None:
        """Number the items that `add` just returned, and later ones, from `at_least` on, if that is higher."""
        more = at_least - int(batch.keys[0, 2])
        if more > 0:
            batch.keys[:, 2] += more
            self._next[int(batch.keys[0, 0])] += more
