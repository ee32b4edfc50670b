"""The memory of a shared replay buffer. It has no file name, so processes open it through the process that created it.

    control     counters and flags of the whole buffer
    headers     for each writer's segment: the cursors, the claim of the rank, and the sampler's position in the segment
    logs        for each segment: the completed items, in order
    arrays      the data of each timestep [num_writers * rows, ...], so that one gather reads from all segments

The memory's file is sparse, so pages without steps use no memory.

A writer's segment is a ring of timesteps, and a log of the items that these timesteps complete. The writer runs the
code of the in-process buffer on its part of the shared arrays. Instead of adding an item to a table, it writes an entry
to the log, which readers read. No process waits or takes a lock, because data is written before the cursor that
announces the data, and the floor is raised before the data below the floor is overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import NamedTuple

import numpy as np

from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.memory import SUPPORTED, Fields, MemoryName, Seqlock, SharedArrays
from rlframe.interprocess.processes import ProcessId
from rlframe.interprocess.waiting import Futex, fence
from rlframe.replay import steps
from rlframe.replay.layout import unallocated_array
from rlframe.replay.steps import StepStore
from rlframe.replay.tables import ItemTable, UniformTable
from rlframe.replay.timeline import Index, Mask, Timeline, numbers_of
from rlframe.types import ReplaySpec, Sequence, Step, StepSpec

# Indexes of the int64 words in the control block. A futex uses the lower half of its word.
SAMPLER_PID, SAMPLER_STARTED = 2, 3  # the process that samples; written under the claims lock
RESTORED_FROM = 4  # token of the buffer that saved the restored file, or 0; written under the claims lock
WAKE_AT = 8  # the sampler wakes up at this total number of added items; NEVER if the sampler does not wait
ADDED_FUTEX = 9  # wakes readers that wait for items
# Counters that the sampler writes, for `stats` in other processes.
SAMPLED, SIZE, EVICTED, EVICTED_UNSAMPLED, DROPPED = range(16, 21)
ROOM_FUTEX = 24  # wakes writers that wait for room

# Indexes of the words in a segment's header. The segment's writer writes these words. CURSORS are its `Cursors`.
CURSORS = slice(0, Seqlock.words(4))
FLOOR = 9  # timesteps below the floor may be overwritten; the floor is raised before they are overwritten
LOG_RESERVED = 10  # entries of the log below this number may be incomplete
IS_WAITING = 11  # 1 while the writer waits for room
# Words that are written under the claims lock. NUM_RESTORES counts how often `restore` filled the segment. IN_USE is 1
# from the writer's first step on, because then `restore` must not fill the segment.
NUM_CLAIMS, PID, STARTED, NUM_ENVS, SLOTS, CHUNK, NUM_RESTORES, IN_USE = range(16, 24)
# Words that the sampler of a queue writes.
SYNCED = 24  # number of log entries that the sampler has read
LOWEST_NEEDED = 25  # the lowest timestep of an unsampled or unreleased item; NO_ITEM if there is no such item
# (SYNCED, number of unsampled items in the entries up to SYNCED), where the next sampling process continues.
READ_POSITION = slice(26, 26 + Seqlock.words(2))

_WORDS = 32  # 4 cache lines, so that different processes write to different cache lines
NEVER = NO_ITEM = 2**62
_FILE = "rlframe-replay"
_CLAIM_TIMEOUT = 30.0  # seconds; a claim takes microseconds


class BufferGoneError(RlframeError):
    """The process that created a shared replay buffer has exited, so the memory is gone."""


def create(num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec) -> SharedArrays:
    """Create the memory of a buffer. The memory exists until it is closed and no process maps it."""
    if not SUPPORTED:
        raise UsageError(
            "SharedMemReplayBuffer needs Linux on x86-64 or 64-bit ARM. Use ReplayBuffer in one process instead."
        )
    created = SharedArrays.create(_FILE, _fields(num_writers, rows, spec, step_spec))
    created.arrays["control"][0, WAKE_AT] = NEVER
    return created


class BufferMemory:
    """The memory of the buffer `name`, mapped into this process.

    Attributes:
        control: the control block, as a memoryview of int64 words.
        headers: the header of each segment, as a memoryview of int64 words.
        header_words: the words of all headers, as an array [num_writers, words].
        cursors: the `Cursors` of each segment.
        read_positions: the READ_POSITION of each segment.
        logs: the logs of all segments, [num_writers, 2 * rows] int64.
        arrays: name -> array [num_writers * rows, ...].
        added: futex on which readers sleep.
        room: futex on which writers sleep.

    Raises:
        BufferGoneError: the process that created the memory has exited.
    """

    def __init__(self, name: MemoryName, num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec):
        self.num_writers, self.rows, self._name, self.token = num_writers, rows, name, name.token
        try:
            self._shared = SharedArrays.attach(name, _FILE, _fields(num_writers, rows, spec, step_spec))
        except PermissionError as error:
            raise UsageError(
                f"The shared replay buffer of process {name.creator.pid} cannot be opened: {error}. "
                "All processes that use it must run as the same user, in the same container or on the same Ray node. "
                "The option --replay service needs no shared memory."
            ) from None
        except OSError:
            raise self._creator_gone_error() from None
        self.arrays = dict(self._shared.arrays)
        self.control, *self.headers = self._shared.rows("control")
        self.header_words = self.arrays.pop("control")[1:]
        self.cursors = [Seqlock(header[CURSORS]) for header in self.headers]
        self.read_positions = [Seqlock(header[READ_POSITION]) for header in self.headers]
        self.logs = self.arrays.pop("logs")
        self.added, self.room = (Futex(self.control[word : word + 1]) for word in (ADDED_FUTEX, ROOM_FUTEX))

    @property
    def closed(self) -> bool:
        """True if the process that created the buffer has closed it."""
        return self._shared.closed

    def cursors_of(self, rank: int) -> Cursors:
        """Return the cursors of a segment."""
        return Cursors(*self.cursors[rank].read())

    def claims(self) -> contextlib.AbstractContextManager[None]:
        """Hold the claims lock. Only one process can hold this lock at a time."""
        overdue = RlframeError(
            f"A process has held the claims lock of the shared replay buffer for {_CLAIM_TIMEOUT:.0f} s: it was "
            "stopped (SIGSTOP) while it claimed a rank. Continue it (SIGCONT), or kill it."
        )
        return self._shared.lock(_CLAIM_TIMEOUT, overdue)

    def check_creator(self) -> None:
        """Raise `BufferGoneError` if the process that created the buffer has exited."""
        if not self._shared.creator_is_alive:
            raise self._creator_gone_error()

    def writer(self, rank: int) -> ProcessId:
        """Return the process that last claimed `rank`."""
        return ProcessId(self.headers[rank][PID], self.headers[rank][STARTED])

    @property
    def sampler(self) -> ProcessId:
        """The process that samples, or that was the last to sample."""
        return ProcessId(self.control[SAMPLER_PID], self.control[SAMPLER_STARTED])

    @property
    def incarnations(self) -> list[int]:
        """The number of claims of each rank."""
        return [header[NUM_CLAIMS] for header in self.headers]

    def added_items(self) -> int:
        """Return the number of items that were ever added to all segments."""
        return sum([cursors.read()[2] for cursors in self.cursors])

    def _creator_gone_error(self) -> BufferGoneError:
        return BufferGoneError(
            f"Process {self._name.creator.pid}, which created this shared replay buffer, has exited or closed it. "
            "The buffer's memory is gone. Start the program again."
        )


class Cursors(NamedTuple):
    """The current ends of a segment's data."""

    head: int  # number of the next timestep
    end: int  # number of the next entry of the log
    added: int  # number of items so far
    steps: int


def _fields(num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec) -> Fields:
    word, slots = np.dtype(np.int64), num_writers * rows
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "control": ((1 + num_writers, _WORDS), word),
        "logs": ((num_writers, 2 * rows), word),
        "present": ((slots,), np.dtype(bool)),
    }

    def note(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        shapes[name] = shape, dtype
        return unallocated_array(name, shape, dtype)

    StepStore(spec, step_spec, Timeline(slots, 1), UniformTable(Timeline(1, 1)), allocate=note)
    return shapes


# An entry of the log describes consecutive timesteps, from `entry >> COUNT_BITS` on. Items begin at those of the
# timesteps that are marked as present.
COUNT_BITS = 20  # enough for the environments of any rank
COUNT_MASK = (1 << COUNT_BITS) - 1
# Readers skip this many of the chunks that are overwritten next. If readers skipped only one chunk, they would read the
# log of a writer at full speed for every second batch, which takes three times as long as the batch.
MARGIN_CHUNKS = 4


def log_entries(starts: np.ndarray) -> np.ndarray:
    """Return the log's entries for items that start at the timesteps `starts`, in any order."""
    return starts << COUNT_BITS | 1


def segment_sizes(spec: ReplaySpec, num_writers: int, num_envs: int) -> tuple[int, int]:
    """Return (slots, chunk) of a segment with its share of the capacity, for a writer of `num_envs` environments.

    Each segment of a queue has room for a whole batch, so that no writer waits for another writer.
    """
    share = -(-spec.capacity // num_writers)
    if spec.kind == "queue":
        batch = 2 * num_envs if spec.batch_size is None else spec.batch_size
        period = spec.item.period if isinstance(spec.item, Sequence) else 2  # every second step may be at LAST
        share = max(share, max(spec.min_size, batch) * period + steps.timesteps_needed(spec, num_envs))
    spec = dataclasses.replace(spec, capacity=share)
    slots, chunk = steps.ring_sizes(spec, num_envs, num_envs, chunks=16 * MARGIN_CHUNKS)
    return slots + MARGIN_CHUNKS * chunk, chunk


def segment_rows(spec: ReplaySpec, num_writers: int, max_envs: int) -> int:
    """Return a number of slots that is enough for a writer with up to `max_envs` environments."""
    return segment_sizes(spec, num_writers, max_envs)[0] + 4 * max_envs  # added for rounding


def init_segment(memory: BufferMemory, rank: int, spec: ReplaySpec, num_envs: int) -> None:
    """Set up a segment for a writer of `num_envs` environments. A segment with items keeps its layout."""
    header = memory.headers[rank]
    if memory.cursors_of(rank).head == 0:
        header[SLOTS], header[CHUNK] = segment_sizes(spec, memory.num_writers, num_envs)
        header[LOWEST_NEEDED] = NO_ITEM
    else:
        steps.check_room(spec, header[SLOTS], (MARGIN_CHUNKS + 1) * header[CHUNK], num_envs)
    header[NUM_ENVS], header[IS_WAITING] = num_envs, 0


class SegmentWriter:
    """Adds the steps of one writer to its segment. Only one thread may call this object at a time.

    Attributes:
        num_restores: how often the segment was restored before it was opened.
        owns_segment: True if this writer may add steps. Then the segment can no longer be restored.
    """

    def __init__(
        self, memory: BufferMemory, rank: int, incarnation: int, num_envs: int, spec: ReplaySpec, step_spec: StepSpec
    ):
        header = self._header = memory.headers[rank]
        self.num_restores, self.owns_segment = header[NUM_RESTORES], False
        slots, first = header[SLOTS], rank * memory.rows
        timeline = self._timeline = Timeline(slots, header[CHUNK])
        self._cursors, now = memory.cursors[rank], memory.cursors_of(rank)
        timeline.head, timeline.floor = now.head, header[FLOOR]
        self._log = LogTable(timeline, memory.arrays["present"][first : first + slots], memory.logs[rank], header, now)

        def part(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            return memory.arrays[name][first : first + slots]

        self._store = StepStore(spec, step_spec, timeline, self._log, num_envs, allocate=part)
        self._store.marks_origin = incarnation > 0 or self.num_restores > 0  # otherwise, all slots contain 0
        self.writer = self._store.open(rank, incarnation, num_envs, origin=incarnation)
        self._steps = now.steps

    def add(self, envs: np.ndarray | None, step: Step) -> None:
        """Add a step of the environments `envs` [B]. None means all environments, in order."""
        self._store.add(self.writer, envs, step)
        self._steps += self.writer.num_envs if envs is None else len(envs)
        log = self._log
        self._cursors.write(self._timeline.head, log.end, log.added, self._steps)

    def floor_after(self, count: int) -> int:
        """Return the floor after a step of `count` environments. 0 if the floor does not change."""
        head, timeline = self._timeline.head + 2 * count, self._timeline
        return head - timeline.slots + timeline.chunk if head - timeline.floor > timeline.slots else 0

    def unsampled_below(self, floor: int) -> bool:
        """Return True if a queue has an unsampled item that starts below `floor`."""
        header = self._header
        synced = header[SYNCED]  # read SYNCED first, because the sampler writes it after LOWEST_NEEDED
        if self._timeline.floor <= header[LOWEST_NEEDED] < floor:
            return True
        return self._log.any_below(synced, floor)


class LogTable(ItemTable):
    """The table of a segment's writer, which writes items to the log."""

    def __init__(self, timeline: Timeline, present: np.ndarray, log: np.ndarray, header: memoryview, cursors: Cursors):
        super().__init__(timeline)
        self._present, self._log, self._header = present, log, header
        self.end, self.added = cursors.end, cursors.added

    def _push_block(self, first: int, index: Index, count: int, mask: Mask, shared: bool) -> None:
        if shared and not isinstance(mask, bool):
            self._push(numbers_of(first, count, mask))
            return
        at = self.end % len(self._log)
        self.end += 1
        self._header[LOG_RESERVED] = self.end
        self._log[at] = first << COUNT_BITS | count

    def _push(self, starts: np.ndarray) -> None:
        places = np.arange(self.end, self.end + len(starts)) % len(self._log)
        self.end += len(starts)
        self._header[LOG_RESERVED] = self.end
        fence()
        self._log[places] = log_entries(starts)

    def evict(self, index: Index) -> None:
        self._header[FLOOR] = self._timeline.floor
        fence()
        super().evict(index)

    def any_below(self, position: int, floor: int) -> bool:
        """Return True if the log from `position` on has an item that is not evicted and starts below `floor`."""
        after = self._log[np.arange(max(position, self.end - len(self._log)), self.end) % len(self._log)]
        starts = after >> COUNT_BITS
        return bool(((starts < floor) & (starts + (after & COUNT_MASK) > self._timeline.floor)).any())
