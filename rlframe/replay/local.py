"""The replay buffer in the process of the learner. Each step and each batch is copied only once."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlframe.errors import CheckpointError, UsageError
from rlframe.replay import replay_files, steps
from rlframe.replay.base import STATS, Draw, KeyedReplayBuffer, check_keys, override, replace_evicted
from rlframe.replay.layout import check_added
from rlframe.replay.rate_limiter import ItemCounts, RateLimiter, WriterState
from rlframe.replay.steps import StepStore, Writers
from rlframe.replay.timeline import WriterFragments
from rlframe.types import Batch, Step, StepSpec

_NO_STARTS = np.zeros(0, np.int64)


class ReplayBuffer(KeyedReplayBuffer):
    """A replay buffer in this process's memory. The agent's `replay_spec` and `step_spec` determine its contents.

    The buffer keeps at least the newest `capacity` timesteps of all its writers. LAST timesteps count too. It can have
    up to `slots` timesteps, because it evicts several at once. An item is evicted together with its first timestep.

    Args:
        agent: an Agent, or any object with `replay_spec` and `step_spec`.
        seed: seed of the random draws.
        single_frame: store one frame per step of frame-stacked pixels (`uint8 [k, H, W]`). None means to detect them.
        overrides: fields of `ReplaySpec` to change.

    Raises:
        UsageError: an option is unknown, or there is not enough memory.
    """

    is_saved_by_learner = True

    def __init__(self, agent: Any, *, seed: int = 0, single_frame: bool | None = None, **overrides: Any):
        self.spec = override(agent.replay_spec, overrides)
        self._step_spec: StepSpec = agent.step_spec
        self._single_frame = single_frame
        self._lock = threading.RLock()
        self._added = threading.Condition(self._lock)
        self._num_waiting = 0
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._incarnations: dict[int, int] = {}  # rank -> newest incarnation
        self._writers = Writers[WriterFragments]()
        self._origins: list[tuple[int, int]] = []  # (rank, incarnation) of each call of `open_segment`
        self._single_writer_keys = np.zeros((0, 3), np.int64)  # keys of a batch if there is only one writer
        self._store: Any = None  # a StepStore; None before the first `open_segment`
        self._sampled = self._steps = 0
        self._drawn_batches: dict[bytes, Batch] = {}  # keys -> batch of a queue that is drawn, but not released
        self._min_version = -1  # items with an older parameter version are dropped
        self._limiter = RateLimiter(self.spec)
        steps.check_fits(self.spec, self._step_spec, self.spec.capacity, 1, single_frame)

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
            others = sum(writer.num_envs for writer in self._writers.by_rank.values() if writer.rank != rank)
            store = self._allocate_store(num_envs, others + num_envs)
            incarnation = self._incarnations[rank]
            self._writers.put(store.open(rank, incarnation, num_envs, origin=len(self._origins)))
            self._origins.append((rank, incarnation))
            store.marks_origin = len(self._origins) > 1

    def note_claims(self, newest: Mapping[int, int]) -> None:
        """Register incarnations that were claimed before: rank -> newest incarnation. Later claims are above these."""
        with self._lock:
            for rank, incarnation in newest.items():
                self._incarnations[rank] = max(self._incarnations.get(rank, -1), incarnation)

    def resume_rank(self, rank: int, incarnation: int, num_envs: int) -> None:
        """Register a writer that has claimed its rank in another process, or that has lost steps.

        The open fragments of the writer are dropped.
        """
        with self._lock:
            self._incarnations[rank] = incarnation
            self.open_segment(rank, num_envs)

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        check_added(env_ids, step)
        with self._lock:
            fragments, envs = self._writers.find(env_ids)
            self._store.add(fragments, envs, step)
            self._steps += len(env_ids)
            if self._num_waiting:
                self._added.notify_all()

    # --- reading

    def sample(self) -> Batch | None:
        """Draw a batch. Return None if fewer than `min_size` items were added, or if a queue has too few items.

        The caller owns the arrays of the batch. The buffer reuses a large array after all references to it are gone.
        """
        with self._lock:
            starts, probabilities = self._draw()
            if not len(starts):
                return None
            store = self._store
            slots = store.timeline.slots_of(starts)
            data, versions = store.read(slots)
            return Batch(data, self._keys_of(slots, starts), probabilities, versions)

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw a batch. Return the numbers of the items' first timesteps, and the probabilities of the items.

        The arrays are empty if there are too few items.
        """
        count = self._items_to_sample()
        if count and self._store.forget_before(self._min_version):
            count = self._items_to_sample()
        if not count:
            return _NO_STARTS, _NO_STARTS
        self._sampled += count
        return self._store.table.draw(count, self._rng)

    def draw(self, timeout: float = 0.0) -> Draw | None:
        """See `KeyedReplayBuffer`. Copy the items of a queue now, because later steps can overwrite them."""
        with self._added:
            self._wait_for_items(timeout)
            if self.spec.kind == "queue":
                batch = self.sample()
                if batch is None:
                    return None
                self._drawn_batches[batch.keys.tobytes()] = batch
                return Draw(batch.keys.copy(), batch.probabilities.copy())
            starts, probabilities = self._draw()
            return (
                Draw(self._keys_of(self._store.timeline.slots_of(starts), starts), probabilities)
                if len(starts)
                else None
            )

    def fetch(self, keys: np.ndarray, probabilities: np.ndarray) -> Batch | None:
        keys, probabilities = check_keys(keys, probabilities)
        with self._lock:
            if self.spec.kind == "queue":
                return self._drawn_batches.get(keys.tobytes())
            store = self._store
            if store is None or not replace_evicted(
                (keys, probabilities), ~store.timeline.holds(self._starts_of(keys))
            ):
                return None
            data, versions = store.read(store.timeline.slots_of(keys[:, 2]))
            return Batch(data, keys, probabilities, versions)

    def release(self, keys: np.ndarray) -> None:
        with self._lock:
            self._drawn_batches.pop(np.asarray(keys, np.int64).tobytes(), None)

    def _keys_of(self, slots: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return keys [B, 3] int64. A key is the rank and the incarnation that wrote the slot, and the start."""
        if len(self._origins) > 1:
            written_by = np.asarray(self._origins).take(self._store.origin.take(slots, mode="wrap"), axis=0)
            return np.concatenate([written_by, starts[:, None]], axis=1)
        if len(self._single_writer_keys) != len(starts):
            self._single_writer_keys = np.tile(np.array([*self._origins[0], 0]), (len(starts), 1))
        keys = self._single_writer_keys.copy()
        keys[:, 2] = starts
        return keys

    def _starts_of(self, keys: np.ndarray) -> np.ndarray:
        """Return the first timestep of each item in `keys`, or -1 if another writer has overwritten its slot."""
        starts = keys[:, 2]
        written_by = np.asarray(self._origins).T
        if len(self._origins) > 1:
            written_by = written_by[:, self._store.origin[starts % self._store.timeline.slots]]
        other = (keys[:, 0] != written_by[0]) | (keys[:, 1] != written_by[1])
        # `1 in tobytes()` is `other.any()`, but several times as fast for short arrays.
        return np.where(other, -1, starts) if 1 in other.tobytes() else starts

    def forget_before(self, version: int) -> None:
        with self._lock:
            self._min_version = max(self._min_version, version)
            if self._store is not None:
                self._store.forget_before(self._min_version)

    def _items_to_sample(self) -> int:
        """Return the size of the next batch, or 0 if there are too few items."""
        if self._store is None or self._closed:
            return 0
        table = self._store.table
        counts = ItemCounts(table.size, table.added, self._sampled)
        return self._limiter.items_to_sample(counts, self._writer_states, self._items_by_rank)

    def _writer_states(self) -> dict[int, WriterState]:
        return {
            rank: WriterState(
                writer.num_envs, writer.checked and (writer.position, writer.positions.tobytes()), lambda: True
            )
            for rank, writer in self._writers.by_rank.items()
        }

    def _items_by_rank(self) -> dict[int, int]:
        """Return a dict from rank to the number of items of this rank in the queue."""
        store = self._store
        starts = store.table.starts()
        return collections.Counter(np.asarray(self._origins)[store.origin[store.timeline.slots_of(starts)], 0].tolist())

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Wait up to `timeout` seconds until a step is added, and return the result of `sample`."""
        with self._added:
            self._wait_for_items(timeout)
            return self.sample()

    def _wait_for_items(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until a step is added. If a batch is available, do not wait."""
        if timeout > 0 and not self._items_to_sample():
            self._num_waiting += 1
            try:
                self._added.wait(timeout)
            finally:
                self._num_waiting -= 1

    def _set_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        with self._lock:
            if self._store is not None:
                self._store.table.update(self._starts_of(keys), priorities)

    @property
    def size(self) -> int:
        return self._store.table.size if self._store is not None else 0

    @property
    def weight(self) -> float:
        """The total weight of all items. The probability of a shard is proportional to this weight."""
        with self._lock:
            return self._store.table.weight if self._store is not None else 0.0

    @property
    def slots(self) -> int:
        """The number of timesteps that fit into the buffer, or 0 if there is no writer."""
        return self._store.timeline.slots if self._store is not None else 0

    def stats(self) -> dict[str, int]:
        with self._lock:
            if self._store is None:
                return dict.fromkeys(STATS, 0)
            return self._store.table.stats(self._steps, self._sampled, self._store.nbytes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._added.notify_all()
        super().close()

    # --- memory and disk

    def _allocate_store(self, num_envs: int, all_envs: int) -> StepStore:
        """Allocate the memory when the first writer comes. For later writers, check that their items fit."""
        spec = self.spec
        if self._store is not None:
            timeline = self._store.timeline
            if steps.timesteps_needed(spec, all_envs) + timeline.chunk <= timeline.slots or timeline.head:
                steps.check_room(spec, timeline.slots, timeline.chunk, all_envs)
                return self._store
        slots, chunk = steps.ring_sizes(spec, num_envs, all_envs)
        self._num_envs = num_envs
        self._store = StepStore.in_process_memory(spec, self._step_spec, slots, chunk, num_envs, self._single_frame)
        return self._store

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the items, open fragments, priorities, counters and the random state in the file `path`.

        The file is renamed when it is complete. Until then, calls of `add` and `sample` wait.

        Raises:
            CheckpointError: the file could not be written. The old file is unchanged.
        """
        with self._lock:
            store, writers = self._store, self._writers.by_rank.values()
            if store is None:
                raise CheckpointError(f"The replay buffer cannot be saved to {path}: no writer has claimed a rank yet.")
            timeline, observations = store.timeline, store.observations
            header = {
                "slots": timeline.slots,
                "chunk": timeline.chunk,
                "num_envs": self._num_envs,
                "head": timeline.head,
                "floor": timeline.floor,
                "table": store.table.state(),
                "framed": observations.single_frame_leaves(),
                "writers": [[w.rank, w.incarnation, w.num_envs, w.origin] for w in writers],
                "state": {
                    "rng": self._rng.bit_generator.state,
                    "incarnations": list(self._incarnations.items()),
                    "origins": self._origins,
                    "sampled": self._sampled,
                    "steps": self._steps,
                },
            }
            arrays = store.arrays()
            arrays.update({f"extra/{name}": array for name, array in observations.variable_arrays().items()})
            try:
                for writer in writers:
                    arrays.update(_writer_arrays(writer))
                replay_files.write(path, self.spec, header, arrays)
            finally:
                for writer in writers:
                    writer.enter_lockstep()

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Restore a saved buffer exactly: equal steps after this call give equal batches.

        Writers keep their rank and incarnation. A writer whose environments lost their state must claim its rank again.

        Raises:
            CheckpointError: the file is missing, damaged, or from another agent. This buffer is unchanged.
        """
        with self._lock, replay_files.open_saved(path, self.spec) as saved:
            header, shapes = saved.header, saved.shapes
            if "slots" not in header:
                raise CheckpointError(
                    f"{path} was saved by a SharedMemReplayBuffer; this is the in-process ReplayBuffer."
                )
            # Allocate a new store, and fill its arrays from the file.
            sizes = header["slots"], header["chunk"], header["num_envs"]
            store = StepStore.in_process_memory(self.spec, self._step_spec, *sizes, self._single_frame)
            store.observations.restore_single_frame_leaves(header["framed"])
            store.timeline.head, store.timeline.floor = header["head"], header["floor"]
            store.table.set_state(header["table"])
            arrays, writers = store.arrays(), Writers[WriterFragments]()
            for writer in header["writers"]:
                writers.put(store.open(*writer))
                arrays.update(_writer_arrays(writers.by_rank[writer[0]]))
            variable_arrays = {
                name: np.empty(size, dtype) for name, (dtype, size) in shapes.items() if name.startswith("extra/")
            }
            arrays.update(variable_arrays)
            saved.check_shapes(arrays)
            saved.read(arrays)
            # Change this buffer only now, because the next lines cannot fail.
            state = header["state"]
            store.observations.set_variable_arrays(
                {name[len("extra/") :]: array for name, array in variable_arrays.items()}
            )
            for fragments in writers.by_rank.values():
                fragments.enter_lockstep()
            self._store, self._writers, self._num_envs = store, writers, header["num_envs"]
            self._single_writer_keys = np.zeros((0, 3), np.int64)
            self._drawn_batches.clear()
            self._rng.bit_generator.state = state["rng"]
            self._incarnations = dict(state["incarnations"])
            self._origins = [tuple(origin) for origin in state["origins"]]
            store.marks_origin = len(self._origins) > 1
            self._sampled, self._steps = state["sampled"], state["steps"]
            self._added.notify_all()


def _writer_arrays(writer: WriterFragments) -> dict[str, np.ndarray]:
    """Return the arrays of a writer that a checkpoint must contain."""
    return {f"writer {writer.rank}/{name}": array for name, array in writer.arrays().items()}
