"""The memory of a shared replay buffer. The memory has no file name. Processes open it through its creator process.

    control     counters and flags of the whole buffer
    headers     one header per segment: the cursors, the process that claimed the rank, and the sampler's position
    logs        one log per segment: the completed items, in order
    arrays      the data of all timesteps [num_writers * rows, ...]. One gather operation can read from all segments

The memory's file is sparse, so pages without steps use no memory.

Each writer has a segment. A segment is a ring of timesteps with a log. The log lists the complete items in the ring.
The writer runs the code of the in-process buffer on its part of the shared arrays. But for each complete item, the
writer adds an entry to the log instead of a table. Readers read the log.

No process waits or takes a lock. This is safe because of the order of the writes. A writer first writes data, and then
moves the cursor past the data. Before a writer overwrites data, it raises the floor above this data.
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
SAMPLER_PID, SAMPLER_STARTED = 2, 3  # the process that samples; protected by the claims lock
RESTORED_FROM = 4  # token of the buffer that saved the restored file, or 0; protected by the claims lock
WAKE_AT = 8  # total number of added items at which the sampler wakes up; NEVER if the sampler does not wait
ADDED_FUTEX = 9  # wakes readers that wait for items
# Counters that the sampler writes, for `stats` in other processes.
SAMPLED, SIZE, EVICTED, EVICTED_UNSAMPLED, DROPPED = range(16, 21)
ROOM_FUTEX = 24  # wakes writers that wait for free slots

# Indexes of the words in a segment's header. The segment's writer sets these words. CURSORS holds a `Cursors`.
CURSORS = slice(0, Seqlock.words(4))
FLOOR = 9  # a writer overwrites only timesteps below the floor, and raises the floor first
LOG_RESERVED = 10  # log entries below this number may be incomplete
IS_WAITING = 11  # 1 while the writer waits for free slots
# Words that the claims lock protects. NUM_RESTORES counts how often `restore` filled the segment. IN_USE becomes 1 at
# the writer's first step. After that, `restore` must not fill the segment.
NUM_CLAIMS, PID, STARTED, NUM_ENVS, SLOTS, CHUNK, NUM_RESTORES, IN_USE = range(16, 24)
# Words that the sampler of a queue sets.
SYNCED = 24  # number of log entries that the sampler has read
LOWEST_NEEDED = 25  # the lowest timestep of an unsampled or unreleased item; NO_ITEM if there is no such item
# The pair (SYNCED, number of unsampled items in the entries up to SYNCED). A new sampler process continues from here.
READ_POSITION = slice(26, 26 + Seqlock.words(2))

_WORDS = 32  # 4 cache lines; two processes never write to the same cache line
NEVER = NO_ITEM = 2**62
_FILE = "rlframe-replay"
_CLAIM_TIMEOUT = 30.0  # seconds to wait for the claims lock; a process normally holds it for microseconds


class BufferGoneError(RlframeError):
    """The process that created a shared replay buffer has exited, so the memory is gone."""


def create(num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec) -> SharedArrays:
    """Create the memory of a buffer. The memory is freed when it is closed and no process maps it."""
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
            f"A process has held the claims lock of the shared replay buffer for {_CLAIM_TIMEOUT:.0f} s. Probably, it "
            "was stopped (SIGSTOP) while it claimed a rank. Continue the process (SIGCONT), or kill it."
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
        """The current sampler process, or the last one if no process samples now."""
        return ProcessId(self.control[SAMPLER_PID], self.control[SAMPLER_STARTED])

    @property
    def incarnations(self) -> list[int]:
        """For each rank, the number of times that a process claimed it."""
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
    """A segment's write positions and counters."""

    head: int  # number of the next timestep
    end: int  # number of the next log entry
    added: int  # number of items added so far
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


# A log entry describes consecutive timesteps. The first one is `entry >> COUNT_BITS`, and `entry & COUNT_MASK` is their
# number. If the array `present` is True for a timestep, an item begins at this timestep.
COUNT_BITS = 20  # enough bits for the number of environments of any rank
COUNT_MASK = (1 << COUNT_BITS) - 1
# Readers do not draw from the next chunks to be overwritten. This is the number of these chunks. With only one chunk,
# readers would have to read a fast writer's log for every second batch. That takes three times the time of a batch.
MARGIN_CHUNKS = 4


def log_entries(starts: np.ndarray) -> np.ndarray:
    """Return log entries for items that start at the timesteps `starts`. The order of `starts` does not matter."""
    return starts << COUNT_BITS | 1


def segment_sizes(spec: ReplaySpec, num_writers: int, num_envs: int) -> tuple[int, int]:
    """Return (number of slots, chunk size) of one segment, for a writer of `num_envs` environments.

    A segment gets an equal share of the buffer's capacity. In a queue, each segment can hold a whole batch, so a writer
    never has to wait for another writer.
    """
    share = -(-spec.capacity // num_writers)
    if spec.kind == "queue":
        batch = 2 * num_envs if spec.batch_size is None else spec.batch_size
        period = spec.item.period if isinstance(spec.item, Sequence) else 2  # with episodes of one step: FIRST, LAST
        share = max(share, max(spec.min_size, batch) * period + steps.timesteps_needed(spec, num_envs))
    spec = dataclasses.replace(spec, capacity=share)
    slots, chunk = steps.ring_sizes(spec, num_envs, num_envs, chunks=16 * MARGIN_CHUNKS)
    return slots + MARGIN_CHUNKS * chunk, chunk


def segment_rows(spec: ReplaySpec, num_writers: int, max_envs: int) -> int:
    """Return a number of slots that is sufficient for a writer with up to `max_envs` environments."""
    return segment_sizes(spec, num_writers, max_envs)[0] + 4 * max_envs  # 4 * max_envs covers rounding


def init_segment(memory: BufferMemory, rank: int, spec: ReplaySpec, num_envs: int) -> None:
    """Set up a segment for a writer of `num_envs` environments. If the segment has steps, keep its layout."""
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
        num_restores: number of times that the segment was restored before this writer opened it.
        owns_segment: True if this writer may add steps. While it is True, the segment cannot be restored.
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
        # If the last writer was killed during an eviction, evicted slots can still have the flag.
        kept = np.zeros(slots, bool)
        kept[np.arange(timeline.floor, now.head) % slots] = True
        memory.arrays["present"][first : first + slots] &= kept
        self._log = LogTable(timeline, memory.arrays["present"][first : first + slots], memory.logs[rank], header, now)

        def part(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            return memory.arrays[name][first : first + slots]

        self._store = StepStore(spec, step_spec, timeline, self._log, num_envs, allocate=part)
        self._store.marks_origin = incarnation > 0 or self.num_restores > 0  # a new segment's slots already contain 0
        self.writer = self._store.open(rank, incarnation, num_envs, origin=incarnation)
        self._steps = now.steps

    def add(self, envs: np.ndarray | None, step: Step) -> None:
        """Add a step of the environments `envs` [B]. None means all environments, in order."""
        self._store.add(self.writer, envs, step)
        self._steps += self.writer.num_envs if envs is None else len(envs)
        log = self._log
        self._cursors.write(self._timeline.head, log.end, log.added, self._steps)

    def floor_after(self, count: int) -> int:
        """Return the floor after a step of `count` environments. Return 0 if the step does not change the floor."""
        head, timeline = self._timeline.head + 2 * count, self._timeline
        return head - timeline.slots + timeline.chunk if head - timeline.floor > timeline.slots else 0

    def unsampled_below(self, floor: int) -> bool:
        """Return True if this segment of a queue has an unsampled item that starts below `floor`."""
        header = self._header
        synced = header[SYNCED]  # read SYNCED first, because the sampler writes it after LOWEST_NEEDED
        if self._timeline.floor <= header[LOWEST_NEEDED] < floor:
            return True
        return self._log.any_below(synced, floor)


class LogTable(ItemTable):
    """The table of a segment's writer. It stores no items, but writes them to the segment's log."""

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
        """Return True if the log, from `position` on, contains an item below `floor` that is not evicted."""
        after = self._log[np.arange(max(position, self.end - len(self._log)), self.end) % len(self._log)]
        starts = after >> COUNT_BITS
        return bool(((starts < floor) & (starts + (after & COUNT_MASK) > self._timeline.floor)).any())
