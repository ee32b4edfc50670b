"""The memory of a shared replay buffer. It is anonymous: processes open it through the process that created it.

    control     counters and flags of the whole buffer
    headers     for each writer's segment: its cursors, the claim of its rank, and the sampler's position in it
    logs        for each segment: the items that it completed, in order
    arrays      the data of each timestep: [num_writers * rows, ...], so that one gather reads from all segments

The memory's file is sparse: pages without steps take no memory.

A writer's segment is a ring of timesteps, and a log of the items that they complete. The writer runs the code of the
in-process buffer on its part of the shared arrays. Instead of adding an item to a table, it writes an entry to the log,
which readers follow. No process waits or takes a lock: data is written before the cursor that announces it, and the
floor is raised before the data below it is overwritten.
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

# Words of the control block, each an int64. A futex uses the lower half of its word.
SAMPLER_PID, SAMPLER_STARTED = 2, 3  # the process that samples; written under the claims lock
RESTORED_FROM = 4  # token of the buffer whose file filled this one, else 0; written under the claims lock
WAKE_AT = 8  # written by the sampler: total number of added items that wakes it; NEVER if it does not wait
ADDED_FUTEX = 9  # wakes readers that wait for items
# Written by the sampler, for `stats` in other processes.
SAMPLED, SIZE, EVICTED, EVICTED_UNSAMPLED, DROPPED = range(16, 21)
ROOM_FUTEX = 24  # wakes writers that wait for room

# Words of a segment's header. Written by its writer, first its `Cursors`.
CURSORS = slice(0, Seqlock.words(4))
FLOOR = 9  # timesteps below this may be overwritten at any time; raised before they are
LOG_RESERVED = 10  # entries of the log below this may be incomplete
IS_WAITING = 11  # 1 while the writer waits for room
# Written under the claims lock. NUM_RESTORES counts how often `restore` filled the segment. IN_USE is 1 once `restore`
# must not fill it any more.
NUM_CLAIMS, PID, STARTED, NUM_ENVS, SLOTS, CHUNK, NUM_RESTORES, IN_USE = range(16, 24)
# Written by the sampler of a queue.
SYNCED = 24  # number of log entries that it has read
LOWEST_NEEDED = 25  # the lowest timestep of an unsampled or unreleased item; NO_ITEM if there is none
# (SYNCED, number of unsampled items in those entries): the position where the next sampling process continues.
READ_POSITION = slice(26, 26 + Seqlock.words(2))

_WORDS = 32  # 4 cache lines: no cache line has counters that different processes write
NEVER = NO_ITEM = 2**62
_FILE = "rlframe-replay"
_CLAIM_TIMEOUT = 30.0  # seconds; a claim takes microseconds


class BufferGoneError(RlframeError):
    """The process that created a shared replay buffer has exited, so the memory is gone."""


def create(num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec) -> SharedArrays:
    """Create the memory of a buffer. It exists until it is closed and no process maps it."""
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
        control: memoryview of int64 words.
        headers: one memoryview of int64 words for each segment.
        header_words: the same words as an array, [num_writers, words].
        cursors: the `Cursors` of each segment.
        read_positions: the READ_POSITION of each segment.
        logs: [num_writers, 2 * rows] int64.
        arrays: name -> [num_writers * rows, ...].
        added, room: futexes on which readers and writers sleep.

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
                "All its processes must run as the same user, in the same container or on the same Ray node. "
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
        """Hold the claims lock. Only one process has it at a time."""
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
        """The process that samples, or sampled last."""
        return ProcessId(self.control[SAMPLER_PID], self.control[SAMPLER_STARTED])

    @property
    def incarnations(self) -> list[int]:
        """The number of claims of each rank."""
        return [header[NUM_CLAIMS] for header in self.headers]

    def added_items(self) -> int:
        """Return the number of items that were ever added, in all segments."""
        return sum([cursors.read()[2] for cursors in self.cursors])

    def _creator_gone_error(self) -> BufferGoneError:
        return BufferGoneError(
            f"Process {self._name.creator.pid}, which created this shared replay buffer, has exited or closed it. "
            "The buffer's memory is gone. Start the program again."
        )


class Cursors(NamedTuple):
    """The current ends of a segment's data."""

    head: int  # next timestep
    end: int  # next entry of its log
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


# An entry of the log describes consecutive timesteps, from `entry >> COUNT_BITS` on. Items begin at those that are
# marked present.
COUNT_BITS = 20  # enough for the environments of any rank
COUNT_MASK = (1 << COUNT_BITS) - 1
# Readers skip the chunks that are overwritten next. If they skipped only one, then with a writer at full speed they
# would read its log for every second batch, which takes three times as long as the batch.
MARGIN_CHUNKS = 4


def log_entries(starts: np.ndarray) -> np.ndarray:
    """Return the log's entries for items that start at the timesteps `starts`, in any order."""
    return starts << COUNT_BITS | 1


def segment_sizes(spec: ReplaySpec, num_writers: int, num_envs: int) -> tuple[int, int]:
    """Return (slots, chunk) of a segment with its share of the capacity, for a writer of `num_envs` environments.

    A segment of a queue can hold a whole batch on its own, so that no writer waits for another writer.
    """
    share = -(-spec.capacity // num_writers)
    if spec.kind == "queue":
        batch = 2 * num_envs if spec.batch_size is None else spec.batch_size
        period = spec.item.period if isinstance(spec.item, Sequence) else 2  # every other step may be at LAST
        share = max(share, max(spec.min_size, batch) * period + steps.timesteps_needed(spec, num_envs))
    spec = dataclasses.replace(spec, capacity=share)
    slots, chunk = steps.ring_sizes(spec, num_envs, num_envs, chunks=16 * MARGIN_CHUNKS)
    return slots + MARGIN_CHUNKS * chunk, chunk


def segment_rows(spec: ReplaySpec, num_writers: int, max_envs: int) -> int:
    """Return enough slots for a writer with up to `max_envs` environments."""
    return segment_sizes(spec, num_writers, max_envs)[0] + 4 * max_envs  # for any rounding


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
    """Adds the steps of one writer to its segment. Only one thread may call it at a time.

    Attributes:
        num_restores: how often the segment had been restored when it was opened.
        owns_segment: True if this writer may add. From then on, the segment cannot be restored.
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
        """Add a step of the environments `envs` [B]; None: of all of them, in order."""
        self._store.add(self.writer, envs, step)
        self._steps += self.writer.num_envs if envs is None else len(envs)
        log = self._log
        self._cursors.write(self._timeline.head, log.end, log.added, self._steps)

    def floor_after(self, count: int) -> int:
        """Return the floor after a step of `count` environments; 0 if it does not change."""
        head, timeline = self._timeline.head + 2 * count, self._timeline
        return head - timeline.slots + timeline.chunk if head - timeline.floor > timeline.slots else 0

    def unsampled_below(self, floor: int) -> bool:
        """Return True if a queue's item that starts below `floor` was not sampled yet."""
        header = self._header
        synced = header[SYNCED]  # read first, because it is written after the LOWEST_NEEDED of its entries
        if self._timeline.floor <= header[LOWEST_NEEDED] < floor:
            return True
        return self._log.any_below(synced, floor)


class LogTable(ItemTable):
    """The table of a segment's writer. It writes items to the log."""

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
        """Return True if the log, from `position` on, has a present item that starts below `floor`."""
        after = self._log[np.arange(max(position, self.end - len(self._log)), self.end) % len(self._log)]
        starts = after >> COUNT_BITS
        return bool(((starts < floor) & (starts + (after & COUNT_MASK) > self._timeline.floor)).any())
