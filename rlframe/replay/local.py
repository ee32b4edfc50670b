"""The replay buffer in the learner's own process: no copies but one in and one out."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from rlframe.errors import UsageError
from rlframe.replay.base import BaseReplayBuffer, override
from rlframe.replay.dataset import Dataset
from rlframe.replay.items import Sequences, Transitions
from rlframe.replay.layout import TreeLayout, check_array, check_memory, Leaf
from rlframe.replay.outputs import Outputs
from rlframe.replay.stores import TreeStore
from rlframe.replay.tables import QueueTable, UniformTable
from rlframe.replay.timeline import Index, Timeline, Writer
from rlframe.types import Batch, Step, StepSpec, Transition, split_env_ids

_CHUNK = 1024  # timesteps that are given up at once
_TABLES = {"uniform": UniformTable, "queue": QueueTable}


class ReplayBuffer(BaseReplayBuffer):
    """Experience in this process's memory, as the agent's `replay_spec` and `step_spec` say.

    Args:
        agent: an Agent (anything with `replay_spec` and `step_spec`).
        seed: decides the draws.
        single_frame: keep frame-stacked pixels (`uint8 [k, H, W]`) one frame per step. None: where it looks like one.
        overrides: fields of `ReplaySpec` to change.

    It keeps the newest `capacity` timesteps, LAST ones included, over all writers (`slots`: rounded up to whole batches of the
    first writer, with room for the open ones). An item leaves when its first timestep does.

    Raises:
        UsageError: for an unknown option, or where the memory that it would take is not there.
    """

    def __init__(self, agent: Any, *, seed: int = 0, single_frame: bool | None = None, **overrides: Any):
        self.spec = override(agent.replay_spec, overrides)
        self._step_spec: StepSpec = agent.step_spec
        self._layouts = {name: TreeLayout(name, getattr(self._step_spec, name)) for name in StepSpec._fields}
        self._single_frame = single_frame
        self._lock = threading.RLock()
        self._added = threading.Condition(self._lock)
        self._waiting = 0
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._outputs = Outputs()
        self._writers: dict[int, Writer] = {}
        self._incarnations: dict[int, int] = {}  # of each claimed rank
        self._origins: list[tuple[int, int]] = []
        self._datasets: list[Dataset] = []
        self._timeline: Timeline | None = None
        self._sampled = self._dropped = self._steps = 0
        self._closed = False
        check_memory(self._bytes_needed(self.spec.capacity), self.spec.capacity, "all leaves of the agent's step_spec")

    # --- writing

    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        with self._lock:
            if rank is None:
                rank = next(r for r in range(len(self._incarnations) + 1) if r not in self._incarnations)
            self._incarnations[rank] = self._incarnations.get(rank, -1) + 1
            if num_envs is not None:
                self.open_segment(rank, num_envs)
            return rank, self._incarnations[rank]

    def open_segment(self, rank: int, num_envs: int) -> None:
        if num_envs < 1:
            raise UsageError(f"A writer needs at least one environment, got num_envs={num_envs}.")
        with self._lock:
            others = sum(writer.num_envs for writer in self._writers.values() if writer.rank != rank)
            self._allocate(num_envs, others + num_envs)
            incarnation = self._incarnations[rank]
            self._writers[rank] = Writer(rank, incarnation, num_envs, self._items.period, self._items.history)
            self._writers[rank].origin = len(self._origins)
            self._origins.append((rank, incarnation))

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        with self._lock:
            writer, envs = self._find(env_ids)
            types, after = step.timestep.step_type.tobytes(), step.next_timestep
            if not writer.checked:
                self._check(writer, len(env_ids), step)
            if envs is None and writer.type_bytes == types and writer.block >= self._timeline.safe(writer.num_envs):
                after_types = after.step_type.tobytes()
                new, index = self._take(writer.num_envs, writer)
                self._observations.write(index, after.observation)
                self._items.put(writer, writer.block, new, step, types, after_types)
                writer.block, writer.index, writer.type_bytes = new, index, after_types
                writer.position += 1
            else:
                self._add_scattered(writer, writer.range if envs is None else envs, step)
            self._steps += len(env_ids)
            if self._waiting:
                self._added.notify_all()

    def _add_scattered(self, writer: Writer, envs: np.ndarray, step: Step) -> None:
        """Adds a step of some of a writer's environments, or of ones whose fragments are broken."""
        writer.scatter()
        before, after, count = step.timestep, step.next_timestep, len(envs)
        now = writer.open[envs]
        # What this call may overwrite (two timesteps for each environment) counts as gone.
        kept = (now >= self._timeline.safe(2 * count)) & (writer.types[envs] == before.step_type)
        if not kept.all():
            lost = ~kept
            first, index = self._take(int(np.count_nonzero(lost)), writer)
            now[lost] = first + np.arange(np.count_nonzero(lost))
            self._observations.write(index, self._layouts["observation"].map(before.observation, lost))
            self._items.open(index, before.step_type[lost])
            self._items.discard(writer, envs[lost])
        first, index = self._take(count, writer)
        new = first + np.arange(count)
        self._observations.write(index, after.observation)
        self._items.put_scattered(writer, envs, now, new, step)
        writer.open[envs], writer.types[envs] = new, after.step_type
        writer.positions[envs] += 1
        if count == writer.num_envs and (envs == writer.range).all():
            writer.gather()
            writer.index = index

    def _take(self, count: int, writer: Writer) -> tuple[int, Index]:
        """Allocates `count` timesteps, and drops the items that are given up for them."""
        first, given_up = self._timeline.take(count)
        for index in given_up:
            self._table.evict(index)
        index = self._timeline.index(first, count)
        if writer.origin or len(self._origins) > 1:
            self._origin[index] = writer.origin
        return first, index

    def _find(self, env_ids: np.ndarray) -> tuple[Writer, np.ndarray | None]:
        """Returns the writer that `env_ids` belong to, and the environments' indices (None: all in order)."""
        given = env_ids.tobytes()
        for writer in self._writers.values():
            if given == writer.id_bytes:
                return writer, None
        ranks, envs = split_env_ids(np.asarray(env_ids, np.int64))
        writer = self._writers.get(int(ranks[0])) if len(ranks) else None
        if writer is None or (ranks != ranks[0]).any() or (envs >= writer.num_envs).any():
            claimed = ", ".join(f"{w.rank} ({w.num_envs} environments)" for w in self._writers.values()) or "none"
            raise UsageError(
                f"add() got the env_ids {env_ids!r}; they must be of one claimed rank. Claimed: {claimed}. "
                "Call claim_rank(num_envs) first and use rlframe.types.global_env_ids(rank, indices)."
            )
        return writer, envs

    def _check(self, writer: Writer, count: int, step: Step) -> None:
        """Compares the first step of a writer with the agent's step_spec."""
        scalars = {"step_type": np.uint8, "reward": np.float32, "discount": np.float32}
        for which in ("timestep", "next_timestep"):
            timestep = getattr(step, which)
            self._layouts["observation"].check(timestep.observation, count)
            for name, dtype in scalars.items():
                check_array(Leaf(f"{which}.{name}", (), np.dtype(dtype)), getattr(timestep, name), count)
        self._layouts["action"].check(step.agent_output.action, count)
        self._layouts["extras"].check(step.agent_output.extras, count)
        self._layouts["agent_state"].check(step.agent_state, count)
        writer.checked = True

    # --- reading

    def sample(self) -> Batch | None:
        """Draws a batch, or returns None while there are fewer than `min_size` items (a queue: than a batch).

        Arrays of a batch are the caller's own; large ones are used again once nothing refers to them.
        """
        with self._lock:
            count = self._batch_size()
            if not self._ready(count):
                return None
            starts, probabilities = self._table.draw(count, self._rng)
            self._sampled += count
            slots = self._timeline.relative(starts)
            keys = np.empty((count, 3), np.int64)
            if len(self._origins) == 1:
                keys[:, 0], keys[:, 1] = self._origins[0]
            else:
                keys[:, :2] = np.asarray(self._origins).take(self._origin.take(slots, mode="wrap"), axis=0)
            keys[:, 2] = starts
            data = self._items.assemble(starts, self._observations, self._outputs)
            return Batch(data, keys, probabilities, self._items.params_version.take(slots, mode="wrap"))

    def _batch_size(self) -> int:
        if self.spec.batch_size is not None:
            return self.spec.batch_size
        return sum(writer.num_envs for writer in self._writers.values())

    def _ready(self, count: int) -> bool:
        if self._timeline is None or self._closed:
            return False
        spec, table = self.spec, self._table
        if table.size < max(spec.min_size, count if spec.kind == "queue" else 1):
            return False
        if spec.samples_per_insert is None:
            return True
        # The first batch is due with the item number min_size; from then on the ratio holds.
        return self._sampled <= spec.samples_per_insert * (table.added - spec.min_size)

    def make_dataset(self, prefetch: int = 2, timeout: float = 600.0) -> Dataset:
        """Returns an endless iterator of batches, `prefetch` of which a thread draws ahead.

        Each `next` waits at most `timeout` seconds for its batch. Close the dataset (or the buffer) to end it.
        """
        dataset = Dataset(self, prefetch, timeout)
        self._datasets.append(dataset)
        return dataset

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Like `sample`, but waits up to `timeout` seconds for enough to be there."""
        with self._added:
            if not self._ready(self._batch_size()):
                self._waiting += 1
                try:
                    self._added.wait(timeout)
                finally:
                    self._waiting -= 1
            return self.sample()

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        raise UsageError(f"This replay buffer is {self.spec.kind}: it has no priorities to update.")

    @property
    def size(self) -> int:
        return self._table.size if self._timeline is not None else 0

    @property
    def slots(self) -> int:
        """Timesteps that are kept; 0 before the first writer came."""
        return self._timeline.slots if self._timeline is not None else 0

    def stats(self) -> dict[str, int]:
        with self._lock:
            if self._timeline is None:
                names = ("items", "steps", "added", "sampled", "evicted", "evicted_unsampled", "dropped_priorities", "bytes")
                return dict.fromkeys(names, 0)
            table = self._table
            return {
                "items": table.size,
                "steps": self._steps,
                "added": table.added,
                "sampled": self._sampled,
                "evicted": table.evicted,
                "evicted_unsampled": table.evicted_unsampled,
                "dropped_priorities": self._dropped,
                "bytes": self._bytes_needed(self._timeline.slots),
            }

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._added.notify_all()
        for dataset in self._datasets:
            dataset.close()
        self._datasets.clear()

    # --- memory

    def _bytes_needed(self, slots: int) -> int:
        kind = Transitions if isinstance(self.spec.item, Transition) else Sequences
        observation = sum(leaf.nbytes for leaf in self._layouts["observation"].leaves)
        bookkeeping = 1 + 16 + 4  # whether an item starts there, the table's entries, and the writer
        return slots * (observation + kind.row_bytes(self._step_spec) + bookkeeping)

    def _allocate(self, num_envs: int, all_envs: int) -> None:
        """Allocates for the first writer; a later one must fit in."""
        item = self.spec.item
        # An item of each environment, the open timesteps, and those that one call may allocate.
        needed = all_envs * ((item.n_step if isinstance(item, Transition) else item.length) + 4)
        if self._timeline is not None and needed + self._timeline.chunk <= self._timeline.slots:
            return
        if self._timeline is not None and self._timeline.head:
            raise UsageError(
                f"The replay buffer keeps {self._timeline.slots} timesteps, but {all_envs} environments need {needed} for one "
                f"item each. Give it a capacity of at least {needed}."
            )
        chunk = -(-min(_CHUNK, max(1, self.spec.capacity // 16)) // num_envs) * num_envs
        slots = -(-max(self.spec.capacity + num_envs, needed) // num_envs) * num_envs + chunk
        check_memory(self._bytes_needed(slots), slots, f"{all_envs} environments")
        timeline = self._timeline = Timeline(slots, chunk)
        kind = Transitions if isinstance(item, Transition) else Sequences
        self._table = _TABLES[self.spec.kind](timeline)
        self._items = kind(item, self._step_spec, timeline, self._table)
        self._observations = TreeStore(self._layouts["observation"], slots)
        self._origin = np.zeros(slots, np.int32)
