"""The replay buffer in the learner's own process: one copy in, one copy out."""

from __future__ import annotations

import collections
import os
import threading
from typing import Any

import numpy as np

from rlframe.errors import CheckpointError, UsageError
from rlframe.replay import contents
from rlframe.replay.base import STATS, Draw, KeyedReplayBuffer, check_keys, override, replace_gone
from rlframe.replay.contents import Contents, bytes_needed
from rlframe.replay.dataset import Dataset
from rlframe.replay.memory import check_memory
from rlframe.replay.outputs import Outputs
from rlframe.replay.recorder import Recorder, find_writer
from rlframe.replay.shares import Shares, WriterState
from rlframe.replay.tables import QueueTable
from rlframe.replay.timeline import Writer
from rlframe.types import Batch, Step, StepSpec

_NOTHING = np.zeros(0, np.int64)


class ReplayBuffer(KeyedReplayBuffer):
    """Experience in this process's memory, as the agent's `replay_spec` and `step_spec` say.

    Args:
        agent: an Agent (anything with `replay_spec` and `step_spec`).
        seed: decides the draws.
        single_frame: keep frame-stacked pixels (`uint8 [k, H, W]`) one frame per step. None: where it looks like one.
        overrides: fields of `ReplaySpec` to change.

    It keeps the newest `capacity` timesteps, LAST ones included, over all writers, and up to `slots` of them: room is
    made in whole batches. An item leaves when its first timestep does.

    Raises:
        UsageError: for an unknown option, or where the memory that it would take is not there.
    """

    is_saved_by_learner = True

    def __init__(self, agent: Any, *, seed: int = 0, single_frame: bool | None = None, **overrides: Any):
        self.spec = override(agent.replay_spec, overrides)
        self._step_spec: StepSpec = agent.step_spec
        self._single_frame = single_frame
        self._lock = threading.RLock()
        self._added = threading.Condition(self._lock)
        self._waiting = 0
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._outputs = Outputs()
        self._incarnations: dict[int, int] = {}  # of each rank that was ever claimed
        self._writers: dict[int, Writer] = {}
        self._last: Writer | None = None  # that added
        self._origins: list[tuple[int, int]] = []  # the (rank, incarnation)s that ever wrote
        self._one_writer = np.zeros((0, 3), np.int64)  # keys of a batch, while only one ever wrote
        self._datasets: list[Dataset] = []
        self._contents: Contents | None = None
        self._sampled = self._steps = 0
        self._held: dict[bytes, Batch] = {}  # by their keys: of a queue, what was drawn and is not finished
        self._oldest = -1  # version: older items are dropped
        self._shares = Shares(self.spec.lapse_after)
        self._closed = False
        needed = bytes_needed(self.spec, self._step_spec, self.spec.capacity, 1, single_frame)
        check_memory(needed, self.spec.capacity, "observations and what the agent stores of each step")

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
            self._make_room(num_envs, others + num_envs)
            incarnation = self._incarnations[rank]
            self._writers[rank] = Writer(rank, incarnation, num_envs, self._items.period, self._items.history)
            self._writers[rank].origin = len(self._origins)
            self._writers[rank].margin = num_envs + self._timeline.chunk - self._timeline.slots
            self._last = None
            self._origins.append((rank, incarnation))
            self._recorder.marks_origin = len(self._origins) > 1

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        with self._lock:
            writer, envs = self._find(env_ids)
            self._recorder.add(writer, envs, step)
            self._steps += len(env_ids)
            if self._waiting:
                self._added.notify_all()

    def _find(self, env_ids: np.ndarray) -> tuple[Writer, np.ndarray | None]:
        """Returns the writer that `env_ids` belong to, and the environments' indices (None: all in order)."""
        given = env_ids.tobytes()
        if self._last is not None and given == self._last.id_bytes:
            return self._last, None
        writer, envs = find_writer(self._writers, env_ids)
        if envs is None:
            self._last = writer
        return writer, envs

    # --- reading

    def sample(self) -> Batch | None:
        """Draws a batch, or returns None before `min_size` items were added (a queue: while it holds too few).

        Arrays of a batch are the caller's own; large ones are used again once nothing refers to them.
        """
        with self._lock:
            starts, probabilities = self._draw()
            if not len(starts):
                return None
            slots = self._timeline.relative(starts)
            keys = self._keys(slots, starts)
            data, versions = self._items.assemble(slots, self._observations, self._outputs)
            return Batch(data, keys, probabilities, versions)

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """(the first timesteps of the items that are due, their probabilities); of none while there is too little."""
        count = self._due()
        if count and self._forget():
            count = self._due()
        if not count:
            return _NOTHING, _NOTHING
        self._sampled += count
        return self._table.draw(count, self._rng)

    def draw(self, timeout: float = 0.0) -> Draw | None:
        """See `KeyedReplayBuffer`. What a queue gave is copied at once: its writers, which never wait, go on."""
        with self._added:
            self._wait_until_due(timeout)
            if self.spec.kind == "queue":
                batch = self.sample()
                if batch is None:
                    return None
                self._held[batch.keys.tobytes()] = batch
                return Draw(batch.keys.copy(), batch.probabilities.copy())
            starts, probabilities = self._draw()
            return Draw(self._keys(self._timeline.relative(starts), starts), probabilities) if len(starts) else None

    def fetch(self, keys: np.ndarray, probabilities: np.ndarray) -> Batch | None:
        keys, probabilities = check_keys(keys, probabilities)
        with self._lock:
            if self.spec.kind == "queue":
                return self._held.get(keys.tobytes())
            if self._contents is None:
                return None
            if not replace_gone((keys, probabilities), ~self._timeline.holds(self._numbers(keys))):
                return None
            slots = self._timeline.relative(keys[:, 2])
            data, versions = self._items.assemble(slots, self._observations, self._outputs)
            return Batch(data, keys, probabilities, versions)

    def finish(self, keys: np.ndarray) -> None:
        with self._lock:
            self._held.pop(np.asarray(keys, np.int64).tobytes(), None)

    def _keys(self, slots: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """[B, 3] int64: the rank and incarnation that wrote `slots`, and `starts`."""
        if len(self._origins) > 1:
            written_by = np.asarray(self._origins).take(self._origin.take(slots, mode="wrap"), axis=0)
            return np.concatenate([written_by, starts[:, None]], axis=1)
        if len(self._one_writer) != len(starts):
            self._one_writer = np.tile(np.array([*self._origins[0], 0]), (len(starts), 1))
        keys = self._one_writer.copy()
        keys[:, 2] = starts
        return keys

    def _numbers(self, keys: np.ndarray) -> np.ndarray:
        """The first timesteps of the items `keys`; -1 where another than they say wrote there since."""
        starts = keys[:, 2]
        written_by = np.asarray(self._origins).T
        if len(self._origins) > 1:
            written_by = written_by[:, self._origin[starts % self._timeline.slots]]
        other = (keys[:, 0] != written_by[0]) | (keys[:, 1] != written_by[1])
        return np.where(other, -1, starts) if 1 in other.tobytes() else starts

    def _batch_size(self) -> int:
        if self.spec.batch_size is not None:
            return self.spec.batch_size
        return sum(writer.num_envs for writer in self._writers.values())

    def forget_before(self, version: int) -> None:
        with self._lock:
            self._oldest = max(self._oldest, version)
            if self._contents is not None:
                self._forget()

    def _forget(self) -> int:
        """Drops the items that are too old, and returns how many."""
        if self._oldest < 0 or not isinstance(self._table, QueueTable):
            return 0
        return self._table.forget_before(self._oldest, self._items.params_version)

    def _due(self) -> int:
        """How many items to draw now; 0 while there is too little."""
        count = self._batch_size()
        if self._ready(count):
            return count
        spec = self.spec
        if spec.kind != "queue" or spec.batch_size is not None or not self.size or len(self._writers) == 1:
            return 0
        # A writer that stands still does not hold up the others.
        ranks = np.asarray(self._origins)[self._origin[self._timeline.slot(self._table.numbers())], 0].tolist()
        writers = {
            rank: WriterState(writer.num_envs, (writer.position, writer.positions.tobytes()), lambda: True)
            for rank, writer in self._writers.items()
        }
        count = self._shares.due(writers, collections.Counter(ranks))
        return count if count and self._ready(count) else 0

    def _ready(self, count: int) -> bool:
        if self._contents is None or self._closed:
            return False
        spec, table = self.spec, self._table
        # A full buffer may hold fewer items than its capacity: an episode's last timestep begins none. So what
        # counts towards min_size is what was ever added; of a queue, what is in it.
        if spec.kind == "queue":
            if table.size < max(spec.min_size, count):
                return False
        elif table.added < spec.min_size or not table.size:
            return False
        if spec.samples_per_insert is None:
            return True
        # The first batch is due with the item number min_size; from then on the ratio holds.
        return self._sampled <= spec.samples_per_insert * (table.added - spec.min_size)

    def make_dataset(self, prefetch: int = 2, timeout: float | None = None) -> Dataset:
        """Returns an endless iterator of batches, `prefetch` of which a thread draws ahead.

        Each `next` waits at most `timeout` seconds for its batch; None: see `Dataset`. Close the dataset (or the
        buffer) to end it.
        """
        dataset = Dataset(self, prefetch, timeout)
        self._datasets.append(dataset)
        return dataset

    def wait_for_batch(self, timeout: float) -> Batch | None:
        """Like `sample`, but waits up to `timeout` seconds for enough to be there."""
        with self._added:
            self._wait_until_due(timeout)
            return self.sample()

    def _wait_until_due(self, timeout: float) -> None:
        """Sleeps until something was added, for at most `timeout` seconds; not at all where a batch is due."""
        if timeout > 0 and not self._due():
            self._waiting += 1
            try:
                self._added.wait(timeout)
            finally:
                self._waiting -= 1

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        if self.spec.kind != "prioritised":
            raise UsageError(f"This replay buffer is {self.spec.kind}: it has no priorities to update.")
        keys = np.asarray(keys)
        with self._lock:
            if self._contents is not None:
                self._table.update(self._numbers(keys), np.asarray(priorities))

    @property
    def size(self) -> int:
        return self._table.size if self._contents is not None else 0

    @property
    def slots(self) -> int:
        """Timesteps that there is room for; 0 before the first writer came."""
        return self._timeline.slots if self._contents is not None else 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called: nothing is sampled any more."""
        return self._closed

    def stats(self) -> dict[str, int]:
        with self._lock:
            if self._contents is None:
                return dict.fromkeys(STATS, 0)
            table = self._table
            values = (
                table.size,
                self._steps,
                table.added,
                self._sampled,
                table.evicted,
                table.evicted_unsampled,
                getattr(table, "dropped", 0),
                self._contents.nbytes,
            )
            return dict(zip(STATS, values))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._added.notify_all()
        for dataset in self._datasets:
            dataset.close()
        self._datasets.clear()

    # --- memory and disk

    def _make_room(self, num_envs: int, all_envs: int) -> None:
        """Allocates for the first writer; a later one must fit in."""
        if self._contents is not None:
            enough = contents.needed(self.spec, all_envs) + self._timeline.chunk <= self._timeline.slots
            if enough or self._timeline.head:
                contents.check_room(self.spec, self._timeline.slots, self._timeline.chunk, all_envs)
                return
        slots, chunk = contents.sizes(self.spec, num_envs, all_envs)
        self._install(Contents(self.spec, self._step_spec, slots, chunk, num_envs, self._single_frame))

    def _install(self, made: Contents) -> None:
        self._contents = made
        self._timeline, self._table, self._items = made.timeline, made.table, made.items
        self._observations, self._origin = made.observations, made.origin
        self._recorder = Recorder(self._step_spec, made.timeline, made.table, made.rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes items, open fragments, priorities, counters and the state of the draws to the file `path`.

        The file is streamed and renamed when complete. Adding and sampling wait meanwhile.

        Raises:
            CheckpointError: it could not be written; what was there before is untouched.
        """
        with self._lock:
            if self._contents is None:
                raise CheckpointError(f"The replay buffer cannot be saved to {path}: no writer has claimed a rank yet.")
            state = {
                "rng": self._rng.bit_generator.state,
                "incarnations": list(self._incarnations.items()),
                "origins": self._origins,
                "sampled": self._sampled,
                "steps": self._steps,
            }
            try:
                contents.save(path, self._contents, self._writers, state)
            finally:
                for writer in self._writers.values():
                    writer.gather(self._timeline)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Goes on where `save` was called: the same steps added give the very same batches.

        Writers keep rank and incarnation; one whose environments do not go on where they were claims its rank again.

        Raises:
            CheckpointError: the file is missing, damaged or of another agent; this buffer is as it was.
        """
        with self._lock:
            made, self._writers, state = contents.restore(path, self.spec, self._step_spec, self._single_frame)
            self._install(made)
            self._last, self._one_writer = None, np.zeros((0, 3), np.int64)
            self._held.clear()
            self._rng.bit_generator.state = state["rng"]
            self._incarnations = dict(state["incarnations"])
            self._origins = [tuple(origin) for origin in state["origins"]]
            self._recorder.marks_origin = len(self._origins) > 1
            self._sampled, self._steps = state["sampled"], state["steps"]
            self._added.notify_all()
