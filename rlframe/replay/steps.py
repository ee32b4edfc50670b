"""A ring of timesteps, and the items that consist of these timesteps.

All buffers use the class `StepStore`. An in-process buffer has one store. In shared memory, each writer has a store for
its segment, and each reader has a store for all segments. A writer to a Reverb server has a small store, which drops
an item when it is complete.

`ItemAssembler` makes items for replays that store whole items, such as a Reverb server or your own replay.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np

from rlframe.errors import UsageError
from rlframe.replay.items import Sequences, Transitions
from rlframe.replay.layout import Allocate, OutputArrays, check_step, process_memory, step_layouts, unallocated_array
from rlframe.replay.tables import ItemTable, PrioritizedTable, QueueTable, UniformTable
from rlframe.replay.timeline import Index, Timeline, WriterFragments
from rlframe.replay.tree_store import TreeStore, check_memory
from rlframe.types import AgentSpecs, Batch, ReplaySpec, Sequence, Step, StepSpec, Transition, split_env_ids

_CHUNK = 1024  # maximum number of timesteps per eviction
_TABLE_BYTES = 1 + 2 * 8  # bytes per slot: one flag for the start of an item, and two table entries
_MAX_SLOWDOWN = 8  # if an environment is slower than the others by a larger factor, it loses its incomplete items


class StepStore:
    """Steps in a ring of slots, with one row per timestep. Writers add steps, and readers read items.

    timeline.py explains these terms with an example: number, slot, block, index, floor, start, span, origin, lockstep.

    Args:
        spec: the agent's `replay_spec`.
        step_spec: the agent's `step_spec`.
        timeline: the timesteps and their slots.
        table: table of the items. The store adds each complete item to the table, and evicts overwritten items.
        num_envs: number of environments of the first writer.
        single_frame: store frame-stacked pixels as one frame per step. None: detect stacked frames.
        allocate: function that returns the arrays.

    Attributes:
        items: the contents of items, except observations.
        observations: the observations. Each observation is stored once.
        origin: [slots] int32, the index of the (rank, incarnation) that wrote the slot.
        marks_origin: True if `origin` must be written.
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
        """Create a store of `slots` timesteps in this process's memory. Raise `UsageError` if memory is too small."""
        check_fits(spec, step_spec, slots, num_envs, single_frame)
        timeline = Timeline(slots, chunk)
        table = make_table(spec.kind, timeline, spec.priority_exponent)
        return cls(spec, step_spec, timeline, table, num_envs, single_frame)

    def open(self, rank: int, incarnation: int, num_envs: int, origin: int) -> WriterFragments:
        """Return new `WriterFragments` for a writer. `origin` is an index, which the writer puts into its slots."""
        fragments = WriterFragments(rank, incarnation, num_envs, self.items.period, self.items.history)
        fragments.origin = origin
        fragments.margin = num_envs + self.timeline.chunk - self.timeline.slots
        return fragments

    def add(self, fragments: WriterFragments, envs: np.ndarray | None, step: Step) -> None:
        """Add a step of the environments `envs` [B] of one writer. None means all environments of the writer, in order.

        Most writers are in lockstep (see `WriterFragments`). Then the step continues all fragments of the writer, and
        this method adds one block. Otherwise it calls `_add_scattered`.
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
        """Add a step that `add` cannot add as one block, because it has some environments only or begins fragments."""
        fragments.leave_lockstep()
        before, after, count = step.timestep, step.next_timestep, len(envs)
        numbers = fragments.open[envs]
        # This call may overwrite two timesteps for each environment. Count those two as already evicted.
        kept = (numbers >= self.timeline.floor_after_allocating(2 * count)) & (
            fragments.types[envs] == before.step_type
        )
        if not kept.all():
            lost = ~kept
            first, index = self._allocate(int(np.count_nonzero(lost)), fragments)
            numbers[lost] = first + np.arange(np.count_nonzero(lost))
            self.observations.write(index, jax.tree.map(lambda leaf: leaf[lost], before.observation), first)
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
        """Allocate `count` timesteps, and evict the items that the new timesteps overwrite."""
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
        """Copy the items that start in `slots` [B]. Return (data, oldest policy version in each item [B])."""
        return self.items.assemble(slots, self.observations, self._outputs)

    @property
    def nbytes(self) -> int:
        """Size of the full store and its table in bytes."""
        return self.items.nbytes + self.observations.nbytes + self.origin.nbytes + _TABLE_BYTES * self.timeline.slots

    def forget_before(self, version: int) -> int:
        """Drop a queue's items with a policy version below `version`. Return the number of dropped items."""
        if version < 0 or not isinstance(self.table, QueueTable) or not self.table.size:
            return 0
        return self.table.forget_before(version, self.items.params_version)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays for a checkpoint, without their unused rows."""
        parts = {"items": self.items, "observations": self.observations, "table": self.table}
        arrays = {f"{part}/{name}": array for part, it in parts.items() for name, array in it.arrays().items()}
        return {**arrays, "origin": self.timeline.used(self.origin)}


class Writer(Protocol):
    """The state of a writer in a buffer."""

    rank: int
    num_envs: int
    id_bytes: bytes  # the ids of all environments of the writer, in order


W = TypeVar("W", bound=Writer)


class Writers(Generic[W]):
    """The writers of a buffer. `find` returns the writer that owns the given environment ids."""

    def __init__(self) -> None:
        self.by_rank: dict[int, W] = {}
        self._last: W | None = None  # the writer that added the last step

    def put(self, writer: W) -> None:
        """Register a writer. It replaces the previous writer of the same rank."""
        self.by_rank[writer.rank], self._last = writer, None

    def drop(self, rank: int) -> None:
        """Remove the writer of a rank, if there is one."""
        self.by_rank.pop(rank, None)
        self._last = None

    def find(self, env_ids: np.ndarray) -> tuple[W, np.ndarray | None]:
        """Return (writer of `env_ids`, indices of the environments).

        The indices are None if `env_ids` are all environments of the writer, in order.

        Raises:
            UsageError: the ids do not belong to one writer.
        """
        given, last = env_ids.tobytes(), self._last
        if last is not None and given == last.id_bytes:
            return last, None
        for writer in list(self.by_rank.values()):  # a copy, because other threads may add or remove writers
            if given == writer.id_bytes:
                self._last = writer
                return writer, None
        ranks, envs = split_env_ids(np.asarray(env_ids, np.int64))
        owner = self.by_rank.get(int(ranks[0])) if len(ranks) else None
        if owner is None or (ranks != ranks[0]).any() or (envs >= owner.num_envs).any():
            claimed = ", ".join(f"{w.rank} ({w.num_envs} environments)" for w in self.by_rank.values()) or "none"
            raise UsageError(
                f"add() got the env_ids {env_ids!r}. They must all belong to one claimed rank. Claimed: {claimed}. "
                "Call claim_rank(num_envs) first and use rlframe.types.global_env_ids(rank, indices)."
            )
        return owner, envs


def make_table(kind: str, timeline: Timeline, priority_exponent: float) -> ItemTable:
    """Return the table for the items of `timeline`. `kind` determines how items are drawn."""
    if kind == "prioritized":
        return PrioritizedTable(timeline, priority_exponent)
    return QueueTable(timeline) if kind == "queue" else UniformTable(timeline)


def ring_sizes(spec: ReplaySpec, num_envs: int, all_envs: int, chunks: int = 16) -> tuple[int, int]:
    """Return (number of slots, chunk size) of a ring that always contains the newest `spec.capacity` timesteps.

    Each eviction removes one chunk. The capacity has at least `chunks` chunks. A chunk is a multiple of `num_envs`.
    """
    chunk = -(-min(_CHUNK, max(1, spec.capacity // chunks)) // num_envs) * num_envs
    slots = -(-max(spec.capacity + num_envs, timesteps_needed(spec, all_envs)) // num_envs) * num_envs + chunk
    return slots, chunk


def timesteps_needed(spec: ReplaySpec, all_envs: int) -> int:
    """Return the minimum number of slots: enough for one item of each environment and one call of `add`."""
    item = spec.item
    return all_envs * ((item.n_step if isinstance(item, Transition) else item.length) + 4)


def bytes_needed(
    spec: ReplaySpec, step_spec: StepSpec, slots: int, num_envs: int = 1, single_frame: bool | None = False
) -> int:
    """Return the size of a full buffer in bytes."""
    table = UniformTable(Timeline(1, 1))
    return StepStore(spec, step_spec, Timeline(slots, 1), table, num_envs, single_frame, unallocated_array).nbytes


def check_fits(
    spec: ReplaySpec, step_spec: StepSpec, slots: int, num_envs: int = 1, single_frame: bool | None = False
) -> None:
    """Raise `UsageError` if a buffer of `slots` timesteps does not fit into the available memory."""
    size = bytes_needed(spec, step_spec, slots, num_envs, single_frame)
    check_memory(size, slots, "observations and the agent's data of each step")


def check_room(spec: ReplaySpec, slots: int, chunk: int, all_envs: int) -> None:
    """Raise `UsageError` if an existing buffer is too small for `all_envs` environments."""
    needed = timesteps_needed(spec, all_envs)
    if needed + chunk > slots:
        raise UsageError(
            f"The replay buffer holds {slots - chunk} timesteps, but {all_envs} environments need {needed} for one "
            f"item each. Set the buffer's capacity to at least {needed}."
        )


class ItemAssembler:
    """Combines the steps of this process's writers into items. `add` returns each item when it is complete.

    The assembler handles n-step returns, the ends of episodes, environments that are stepped in any order, and broken
    fragments. Only one thread may call the assembler at a time.

    Args:
        agent: an Agent, or any object with `replay_spec` and `step_spec`.
    """

    def __init__(self, agent: AgentSpecs) -> None:
        self._agent = agent
        self._writers = Writers[WriterFragments]()
        self._stores: dict[int, tuple[StepStore, QueueTable]] = {}
        self._next: dict[int, int] = {}

    def open(self, rank: int, incarnation: int, num_envs: int) -> None:
        """Register a writer. If its rank was registered before, drop the rank's open fragments."""
        spec = self._agent.replay_spec
        length = spec.item.length if isinstance(spec.item, Sequence) else spec.item.n_step
        spec = dataclasses.replace(spec, capacity=_MAX_SLOWDOWN * num_envs * (length + 4))
        slots, chunk = ring_sizes(spec, num_envs, num_envs)
        timeline = Timeline(slots, chunk)
        table = QueueTable(timeline)
        store = StepStore(spec, self._agent.step_spec, timeline, table, num_envs, None)
        self._stores[rank], self._next[rank] = (store, table), 0
        self._writers.put(store.open(rank, incarnation, num_envs, origin=0))

    def drop(self, rank: int) -> None:
        """Remove a writer and its open fragments."""
        self._writers.drop(rank)

    def rank_of(self, env_ids: np.ndarray) -> int:
        """Return the rank of the writer that owns `env_ids`. Raise `UsageError` if no writer owns these ids."""
        return self._writers.find(env_ids)[0].rank

    def add(self, env_ids: np.ndarray, step: Step) -> Batch | None:
        """Add a step. Return the items that this step completes, oldest first, or None if it completes no item.

        The third part of a key is the item's number among the writer's items (see `renumber`). The batch's
        `probabilities` have no meaning.
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
        """Change the item numbers in the keys of `batch`, which the last `add` returned. The first becomes `at_least`.

        Later items continue from these numbers. If the first number is already higher, do nothing.
        """
        more = at_least - int(batch.keys[0, 2])
        if more > 0:
            batch.keys[:, 2] += more
            self._next[int(batch.keys[0, 0])] += more
