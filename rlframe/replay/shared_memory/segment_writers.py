"""The writers in one process to a shared replay buffer. They claim ranks, fill segments, and wait for the sampler.

The end of the file saves and restores the buffer. Writers continue during a save, so they can overwrite rows while
these rows are streamed to the file. Therefore the segments' floors are saved last. Rows above the floor were not
overwritten. Incomplete items exist only in the writers' processes, and are not saved.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlframe.errors import CheckpointError, RlframeError, StoppedError, UsageError
from rlframe.interprocess.memory import MemoryName
from rlframe.interprocess.processes import this_process
from rlframe.replay import replay_files, steps
from rlframe.replay.layout import check_added
from rlframe.replay.rate_limiter import RateLimiter, items_of_rounds
from rlframe.replay.shared_memory import block
from rlframe.replay.shared_memory.block import BufferMemory, SegmentWriter
from rlframe.replay.shared_memory.sampler import Sampler
from rlframe.replay.shared_memory.segment_reader import NUMBER_MASK, RANK_BITS
from rlframe.replay.steps import Writers
from rlframe.replay.tables import PrioritizedTable
from rlframe.replay.timeline import WriterFragments
from rlframe.replay.tree_store import check_memory
from rlframe.types import ReplaySpec, Step, StepSpec

_CHECK_INTERVAL = 0.2  # seconds between two checks of a waiting writer; usually the sampler wakes the writer sooner
_EXIT_TIMEOUT = 10.0  # seconds that a claim waits until the previous process of the rank has exited


class WriterTimeoutError(RlframeError, TimeoutError):
    """A writer waited too long for free slots in its replay buffer."""


class BufferPlan(NamedTuple):
    """The description of a buffer: the memory's name and layout, and the options. All processes get the same plan."""

    name: MemoryName
    spec: ReplaySpec
    step_spec: StepSpec
    num_writers: int
    max_envs: int
    rows: int  # number of slots of each segment
    seed: int
    timeout: float
    in_threads: bool
    rounds_ahead: int
    elastic_writers: bool


class SegmentWriters:
    """This process's writers to a buffer.

    Args:
        plan: the description of the buffer.
        memory: the buffer's memory, mapped into this process.
        lock: this process holds the lock while it adds or samples. While it waits, it does not hold the lock.
    """

    def __init__(self, plan: BufferPlan, memory: BufferMemory, lock: threading.RLock):
        self._plan, self._memory, self._lock = plan, memory, lock
        self._limiter = RateLimiter(plan.spec)
        self._waits_for_room = plan.spec.kind == "queue" or self._limiter.ratio is not None
        self._pid = this_process().pid
        self._is_creator = plan.name.creator == this_process()
        self._incarnations: dict[int, int] = {}  # rank -> incarnation, for each rank that this process claimed
        self._segments: dict[int, SegmentWriter] = {}
        self._writers = Writers[WriterFragments]()
        self._stopped_ranks: set[int] = set()  # see `end_waits`

    # --- ranks

    def claim(self, num_envs: int | None, rank: int | None) -> tuple[int, int]:
        """Claim a rank, and return (rank, incarnation). See `SharedMemReplayBuffer.claim_rank`."""
        memory, count = self._memory, self._plan.num_writers
        if rank is not None and not 0 <= rank < count:
            raise UsageError(
                f"Rank {rank} was claimed, but this replay buffer was created with num_writers={count} (ranks 0 to "
                f"{count - 1}). Create the buffer with a larger num_writers."
            )
        if num_envs is not None:
            self._check_envs(num_envs)
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while True:
            with self._lock, memory.claims():
                chosen = self._free_rank() if rank is None else rank
                holder, header = memory.writer(chosen), memory.headers[chosen]
                if holder == this_process() or not holder.is_alive:
                    header[block.PID], header[block.STARTED] = this_process()
                    header[block.NUM_CLAIMS] += 1
                    self._incarnations[chosen] = header[block.NUM_CLAIMS] - 1
                    if num_envs is not None:
                        self.open(chosen, num_envs)
                    return chosen, self._incarnations[chosen]
            if time.monotonic() > deadline:
                raise UsageError(
                    f"Rank {chosen} cannot be claimed: process {holder.pid} holds it and is still running."
                )
            time.sleep(0.02)

    def _free_rank(self) -> int:
        holders = [self._memory.writer(rank) for rank in range(self._plan.num_writers)]
        for rank, holder in enumerate(holders):
            if not holder.is_alive:
                return rank
        raise UsageError(
            f"No rank is free: this replay buffer was created with num_writers={len(holders)}, and all ranks are "
            f"taken (by processes {', '.join(str(holder.pid) for holder in holders)}). Create the buffer with a larger "
            "num_writers."
        )

    def open(self, rank: int, num_envs: int) -> None:
        """Set up a segment for a writer of `num_envs` environments.

        The caller must hold the lock and the claims lock.
        """
        plan, memory = self._plan, self._memory
        self._check_envs(num_envs)
        if rank not in self._incarnations or memory.writer(rank) != this_process():
            raise UsageError(f"This process has not claimed rank {rank}. Call claim_rank first.")
        block.init_segment(memory, rank, plan.spec, num_envs)
        # The system reserves memory only when data is written. So check that the memory for all free slots exists.
        heads = [cursors.read()[0] for cursors in memory.cursors]
        left = sum(max(0, header[block.SLOTS] - head) for header, head in zip(memory.headers, heads))
        needed = steps.bytes_needed(plan.spec, plan.step_spec, left)
        check_memory(needed, left, "the unfilled part of all writers' segments")
        self._open_segment(rank, num_envs)

    def _check_envs(self, num_envs: int) -> None:
        if not 1 <= num_envs <= self._plan.max_envs:
            raise UsageError(
                f"A writer must have 1 to max_envs={self._plan.max_envs} environments, got num_envs={num_envs}. "
                "Create the replay buffer with a larger max_envs."
            )

    def _open_segment(self, rank: int, num_envs: int) -> SegmentWriter:
        plan = self._plan
        self._stopped_ranks.discard(rank)
        incarnation = self._incarnations[rank]
        segment = SegmentWriter(self._memory, rank, incarnation, num_envs, plan.spec, plan.step_spec)
        self._segments[rank] = segment
        self._writers.put(segment.writer)
        return segment

    # --- adding

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Add one step of the environments `env_ids`. Wait if the writer is too far ahead of the sampler."""
        check_added(env_ids, step)
        writer, envs = self._writers.find(env_ids)
        segment = self._segments[writer.rank]
        if self._waits_for_room and self.waits:
            self._wait_for_room(segment, len(env_ids))
        with self._lock:
            if not segment.owns_segment:
                segment = self._acquire_segment(segment)
            segment.add(envs, step)
        memory = self._memory
        inserts_needed = memory.control[block.WAKE_AT]
        if inserts_needed != block.NEVER and memory.added_items() >= inserts_needed:
            memory.control[block.WAKE_AT] = block.NEVER
            memory.added.wake()

    def _acquire_segment(self, segment: SegmentWriter) -> SegmentWriter:
        """Mark the segment as in use before the writer's first step. After this, `restore` must not fill it.

        If `restore` has filled the segment after it was opened, open it again.
        """
        rank = segment.writer.rank
        with self._memory.claims():
            if segment.num_restores != self._memory.headers[rank][block.NUM_RESTORES]:
                segment = self._open_segment(rank, segment.writer.num_envs)
            self._memory.headers[rank][block.IN_USE] = 1
        segment.owns_segment = True
        return segment

    # --- waiting for the sampler

    @property
    def waits(self) -> bool:
        """True if this process's writers wait for the sampler, as `SharedMemReplayBuffer` describes."""
        control = self._memory.control
        sampler = control[block.SAMPLER_PID]
        if self._memory.closed:
            return False
        if self._plan.in_threads:
            return True
        if sampler == self._pid:
            return False
        return sampler != 0 or not self._is_creator

    def end_waits(self, rank: int) -> None:
        """End the current wait of this process's writer `rank`, and prevent further waits."""
        self._stopped_ranks.add(rank)
        self._memory.room.wake()

    def _wait_for_room(self, segment: SegmentWriter, count: int) -> None:
        """Wait while the writer is too far ahead to add `count` timesteps."""
        memory, spec, limiter = self._memory, self._plan.spec, self._limiter
        if spec.kind == "queue":
            floor = segment.floor_after(count)
            if floor and segment.unsampled_below(floor):
                what = "to sample the oldest items of a full queue"
                self._wait(segment, lambda: segment.unsampled_below(floor), what)
        if limiter.ratio is None:
            return
        envs = sum([header[block.NUM_ENVS] for header in memory.headers])
        run_ahead = items_of_rounds(spec, envs, self._plan.rounds_ahead) or 0

        def is_ahead() -> bool:
            return not limiter.may_insert(memory.added_items(), memory.control[block.SAMPLED], run_ahead)

        if is_ahead():
            self._wait(segment, is_ahead, f"to sample {limiter.ratio:g} items per insert")

    def _wait(self, segment: SegmentWriter, blocked: Callable[[], bool], what: str) -> None:
        memory, rank, timeout = self._memory, segment.writer.rank, self._plan.timeout
        deadline = time.monotonic() + timeout
        memory.headers[rank][block.IS_WAITING] = 1
        try:
            while True:
                value = memory.room.value
                if memory.control[block.WAKE_AT] != block.NEVER:
                    memory.added.wake()  # the sampler then checks which items it can release
                if not blocked() or not self.waits:
                    return
                if rank in self._stopped_ranks:
                    raise StoppedError(
                        f"Writer {rank} of the replay buffer was stopped while it waited for the sampler {what}."
                    )
                memory.check_creator()
                if time.monotonic() > deadline:
                    sampler = memory.sampler
                    state = f"process {sampler.pid}, which " + (
                        "is still running" if sampler.is_alive else "has exited"
                    )
                    raise WriterTimeoutError(
                        f"Writer {rank} of the replay buffer waited {timeout:g} s for the sampler "
                        f"({state if sampler.pid else 'no process has sampled yet'}) {what}. "
                        "Is the learner still learning?"
                    )
                memory.room.wait(value, _CHECK_INTERVAL)
        finally:
            memory.headers[rank][block.IS_WAITING] = 0


def save(path: str | os.PathLike[str], memory: BufferMemory, sampler: Sampler, spec: ReplaySpec) -> None:
    """Write the segments and the sampler's state to `path`, atomically.

    Raises:
        CheckpointError: the file could not be written. The old file is unchanged.
    """
    reader = sampler.reader
    reader.sync()
    table = reader.table
    described = {}
    arrays: dict[str, np.ndarray] = {}
    for rank, words in enumerate(memory.headers):
        if not words[block.SLOTS]:
            continue
        cursors, slots = reader.cursors[rank], words[block.SLOTS]
        described[rank] = [slots, words[block.CHUNK], words[block.NUM_CLAIMS], cursors]
        arrays.update(_rows(memory, rank, cursors.head, slots))
    arrays["numbers"] = table.starts()
    if isinstance(table, PrioritizedTable):
        arrays["leaves"] = table.leaves(arrays["numbers"])
    # `write` reads the headers last. The headers contain the floors, and rows above the floors are intact.
    arrays["headers"] = memory.header_words
    header = {
        "shared": [memory.num_writers, memory.token],
        "segments": described,
        "sampled": sampler.sampled,
        "evicted_unsampled": table.evicted_unsampled,
        "priorities": {name: getattr(table, name, 0) for name in ("highest", "dropped")},
        "rng": sampler.rng.bit_generator.state,
    }
    replay_files.write(path, spec, header, arrays)


def restore(path: str | os.PathLike[str], memory: BufferMemory, sampler: Sampler, spec: ReplaySpec) -> None:
    """Restore a file that `save` wrote. The caller must hold the claims lock.

    If this buffer has saved the file, or was already restored from it, the items in memory are newer than the file.
    Then only the priorities are restored.

    Raises:
        CheckpointError: the file is missing, damaged or from another agent, or writers have already added steps.
    """
    with replay_files.open_saved(path, spec) as saved:
        header, shapes = saved.header, saved.shapes
        num_writers, token = header.get("shared", (None, None))
        if num_writers != memory.num_writers:
            raise CheckpointError(
                f"{path} was saved by a replay buffer with num_writers={num_writers}, but this one has num_writers="
                f"{memory.num_writers}. (None means an in-process buffer.)"
            )
        is_same = token in (memory.token, memory.control[block.RESTORED_FROM])
        dtypes = {name: shapes[name] for name in ("numbers", "leaves", "headers") if name in shapes}
        made: dict[str, np.ndarray] = {name: np.empty(shape, dtype) for name, (dtype, shape) in dtypes.items()}
        arrays = dict(made)
        if not is_same:
            for rank, (slots, chunk, _, cursors) in header["segments"].items():
                _check_free(path, memory, int(rank), slots, chunk, spec)
                arrays.update(_rows(memory, int(rank), block.Cursors(*cursors).head, slots))
            saved.check_shapes(arrays)
        saved.read(arrays)
    starts = made["numbers"]
    if not is_same:
        memory.control[block.RESTORED_FROM] = header["shared"][1]
        for rank, (slots, chunk, claims, cursors) in header["segments"].items():
            floor = int(made["headers"][int(rank), block.FLOOR])
            there = starts[(starts >> RANK_BITS == int(rank))] & NUMBER_MASK
            _fill(memory, int(rank), slots, chunk, block.Cursors(*cursors), there[there >= floor], floor)
            words = memory.headers[int(rank)]
            words[block.NUM_CLAIMS] = max(claims, words[block.NUM_CLAIMS])
            words[block.NUM_RESTORES] += 1
        sampler.resume(starts, header["sampled"], header["rng"], header["evicted_unsampled"])
    table = sampler.reader.table
    if isinstance(table, PrioritizedTable):
        held = table.holds(starts)
        table.set_leaves(starts[held], made["leaves"][held])
        table.set_state({**table.state(), **header["priorities"]})
    sampler.publish(True)


def _rows(memory: BufferMemory, rank: int, head: int, slots: int) -> dict[str, np.ndarray]:
    """Return the used rows of a segment. The flags in `present` are not needed: `_fill` sets them."""
    rows = slice(rank * memory.rows, rank * memory.rows + min(head, slots))
    return {f"{rank}/{name}": array[rows] for name, array in memory.arrays.items() if name != "present"}


def _fill(
    memory: BufferMemory, rank: int, slots: int, chunk: int, cursors: block.Cursors, starts: np.ndarray, floor: int
) -> None:
    """Set the header, the log and the flags of a segment whose rows are restored. `starts` are its items' starts."""
    words, present = memory.headers[rank], memory.arrays["present"][rank * memory.rows :][:slots]
    present[:] = False
    present[starts % slots] = True
    memory.logs[rank][: len(starts)] = block.log_entries(starts)
    words[block.SLOTS], words[block.CHUNK], words[block.FLOOR] = slots, chunk, floor
    words[block.LOG_RESERVED] = len(starts)
    memory.cursors[rank].write(*cursors._replace(end=len(starts)))


def _check_free(
    path: str | os.PathLike[str], memory: BufferMemory, rank: int, slots: int, chunk: int, spec: ReplaySpec
) -> None:
    header = memory.headers[rank]
    if header[block.IN_USE] or memory.cursors_of(rank).head:
        raise CheckpointError(
            f"The replay buffer cannot be restored from {path}: writer {rank} has already added steps. "
            "Restore the buffer before writers add steps."
        )
    if slots > memory.rows:
        raise CheckpointError(f"{path} was saved with a larger max_envs: one of its segments has {slots} slots.")
    try:
        steps.check_room(spec, slots, (block.MARGIN_CHUNKS + 1) * chunk, header[block.NUM_ENVS])
    except UsageError as error:
        raise CheckpointError(f"{path} does not fit the writers of this buffer: {error}") from None
