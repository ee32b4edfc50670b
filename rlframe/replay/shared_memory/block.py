"""The memory of a shared replay buffer: anonymous, found through the process that made it, laid out the same by all.

    control     counters and flags of the whole buffer
    headers     of each writer's segment: its cursors, who claimed it, what was sampled of it
    logs        of each segment: which items it completed, in order
    arrays      what is kept of each timestep: [num_writers * rows, ...], so that one gather reads of all segments

The file is sparse: pages that no step was written to take no memory.

A writer's segment is a ring of timesteps and a log of the items that they complete. The writer runs the code of the
in-process buffer on its part of the shared arrays. Instead of noting an item in a table, it writes a line into the log,
which readers follow. Nothing waits or locks: data come first, then the cursor that announces them; the floor is raised
before what is below it is overwritten.
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

# Words of the control block, each an int64. Futexes use the lower half of theirs.
SAMPLER_PID, SAMPLER_STARTED = 2, 3  # the process that samples; written under the claims' lock
RESTORED_FROM = 4  # of the buffer whose file filled this one; 0 where none did. Written under the claims' lock
WAKE_AT = 8  # by the sampler: items added, over all segments, that wake it; NOBODY while it does not wait
ADDED_FUTEX = 9  # wakes who waits for items
SAMPLED, SIZE, EVICTED, EVICTED_UNSAMPLED, DROPPED = range(16, 21)  # by the sampler, for `stats` elsewhere
ROOM_FUTEX = 24  # wakes the writers that wait for room

# Words of a segment's header. By its writer: its `Cursors`.
CURSORS = slice(0, Seqlock.words(4))
FLOOR = 9  # timesteps below may be overwritten any time; raised before they are
LOG_RESERVED = 10  # entries of the log up to here may be being written
IS_WAITING = 11  # 1 while the writer waits for room
# Under the claims' lock.
# EPOCH: how often `restore` filled the segment; BEGUN: 1 once it must not any more.
NUM_CLAIMS, PID, STARTED, NUM_ENVS, SLOTS, CHUNK, NUM_RESTORES, IN_USE = range(16, 24)
# By the sampler of a queue.
SYNCED = 24  # entries of the log that it has read
LOWEST_NEEDED = 25  # the lowest timestep of an item that was not sampled, or not released; NOTHING where there is none
# (SYNCED, how many of those entries' items were not sampled): where the next process goes on that samples.
READ_POSITION = slice(26, 26 + Seqlock.words(2))

_WORDS = 32  # 4 cache lines: nobody writes to the line of another process's counters
NEVER = NO_ITEM = 2**62
_FILE = "rlframe-replay"
_CLAIM_TIMEOUT = 30.0  # seconds; claims take microseconds


class BufferGoneError(RlframeError):
    """The process that made a shared replay buffer has ended, and its memory with it."""


def create(num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec) -> SharedArrays:
    """Make the memory of a buffer; it stays until it is closed and nobody maps it."""
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
        header_words: the same, [num_writers, words].
        cursors: of each segment, its `Cursors`.
        taken: of each segment, see TAKEN.
        logs: [num_writers, 2 * rows] int64.
        arrays: name -> [num_writers * rows, ...].
        added, room: what readers and writers sleep on.

    Raises:
        BufferGoneError: the process that made it has ended.
    """

    def __init__(self, name: MemoryName, num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec):
        self.num_writers, self.rows, self._name, self.token = num_writers, rows, name, name.token
        try:
            self._shared = SharedArrays.attach(name, _FILE, _fields(num_writers, rows, spec, step_spec))
        except PermissionError as error:
            raise UsageError(
                f"The shared replay buffer of process {name.creator.pid} cannot be opened: {error}. "
                "All its processes must run as the same user, in the same container or on the same Ray node; --replay "
                "service needs no such memory."
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
        """Whether the buffer was closed where it was made."""
        return self._shared.closed

    def cursors_of(self, rank: int) -> Cursors:
        """Return how far a segment has come."""
        return Cursors(*self.cursors[rank].read())

    def claims(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of claims, which one process has at a time."""
        overdue = RlframeError(
            f"A process has held the claims of the shared replay buffer for {_CLAIM_TIMEOUT:.0f} s: it was stopped "
            "(SIGSTOP) while it claimed a rank. Continue it (SIGCONT), or kill it."
        )
        return self._shared.lock(_CLAIM_TIMEOUT, overdue)

    def check_creator(self) -> None:
        """Raise `BufferGoneError` once the process that made the buffer has ended."""
        if not self._shared.creator_is_alive:
            raise self._creator_gone_error()

    def writer(self, rank: int) -> ProcessId:
        """Return the process that claimed `rank` last."""
        return ProcessId(self.headers[rank][PID], self.headers[rank][STARTED])

    @property
    def sampler(self) -> ProcessId:
        """The process that samples, or sampled last."""
        return ProcessId(self.control[SAMPLER_PID], self.control[SAMPLER_STARTED])

    @property
    def incarnations(self) -> list[int]:
        """Of each rank, how often it was claimed."""
        return [header[NUM_CLAIMS] for header in self.headers]

    def added_items(self) -> int:
        """Return how many items that were ever added, to all segments."""
        return sum([cursors.read()[2] for cursors in self.cursors])

    def _creator_gone_error(self) -> BufferGoneError:
        return BufferGoneError(
            f"The process {self._name.creator.pid} that made this shared replay buffer has ended or closed it. "
            "Its memory ends with it: start the program anew."
        )


class Cursors(NamedTuple):
    """How far a segment has come."""

    head: int  # timesteps
    end: int  # entries of its log
    added: int  # items
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


# An entry of the log: consecutive timesteps, from `entry >> COUNT_BITS`, of which those that are present begin items.
COUNT_BITS = 20  # more than a rank may have environments
COUNT_MASK = (1 << COUNT_BITS) - 1
# Chunks, those that are overwritten next, that readers leave alone. With one alone, a writer at full speed had them
# look at its log for every other batch, which takes three times as long as the batch.
MARGIN_CHUNKS = 4


def log_entries(starts: np.ndarray) -> np.ndarray:
    """Return the log's entries for items that start at the timesteps `starts`, in no order."""
    return starts << COUNT_BITS | 1


def segment_sizes(spec: ReplaySpec, num_writers: int, num_envs: int) -> tuple[int, int]:
    """Return (slots, chunk) of a segment that keeps its share of the capacity, for a writer of `num_envs`.

    A segment of a queue holds what `sample` asks for by itself, so that no writer waits for another one.
    """
    share = -(-spec.capacity // num_writers)
    if spec.kind == "queue":
        batch = 2 * num_envs if spec.batch_size is None else spec.batch_size
        period = spec.item.period if isinstance(spec.item, Sequence) else 2  # every other step may be a LAST
        share = max(share, max(spec.min_size, batch) * period + steps.timesteps_needed(spec, num_envs))
    spec = dataclasses.replace(spec, capacity=share)
    slots, chunk = steps.ring_sizes(spec, num_envs, num_envs, chunks=16 * MARGIN_CHUNKS)
    return slots + MARGIN_CHUNKS * chunk, chunk


def segment_rows(spec: ReplaySpec, num_writers: int, max_envs: int) -> int:
    """Enough slots for a writer of up to `max_envs` environments."""
    return segment_sizes(spec, num_writers, max_envs)[0] + 4 * max_envs  # whatever the number is rounded to


def init_segment(memory: BufferMemory, rank: int, spec: ReplaySpec, num_envs: int) -> None:
    """Fit a segment to a writer of `num_envs` environments; one that holds items is left unchanged."""
    header = memory.headers[rank]
    if memory.cursors_of(rank).head == 0:
        header[SLOTS], header[CHUNK] = segment_sizes(spec, memory.num_writers, num_envs)
        header[LOWEST_NEEDED] = NO_ITEM
    else:
        steps.check_room(spec, header[SLOTS], (MARGIN_CHUNKS + 1) * header[CHUNK], num_envs)
    header[NUM_ENVS], header[IS_WAITING] = num_envs, 0


class SegmentWriter:
    """Adds the steps of one writer to its segment. One thread at a time.

    Attributes:
        epoch: how often the segment had been restored when it was opened.
        begun: whether this writer has the right to add: from then on it cannot be restored.
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
        self._store.marks_origin = incarnation > 0 or self.num_restores > 0  # slots hold 0 otherwise
        self.writer = self._store.open(rank, incarnation, num_envs, origin=incarnation)
        self._steps = now.steps

    def add(self, envs: np.ndarray | None, step: Step) -> None:
        """Add a step of the environments `envs` [B]; None: of all of them, in order."""
        self._store.add(self.writer, envs, step)
        self._steps += self.writer.num_envs if envs is None else len(envs)
        log = self._log
        self._cursors.write(self._timeline.head, log.end, log.added, self._steps)

    def floor_after(self, count: int) -> int:
        """Return the floor after a step of `count` environments; 0 if it stays."""
        head, timeline = self._timeline.head + 2 * count, self._timeline
        return head - timeline.slots + timeline.chunk if head - timeline.floor > timeline.slots else 0

    def unsampled_below(self, floor: int) -> bool:
        """Return whether an item of a queue that starts below `floor` was not sampled."""
        header = self._header
        synced = header[SYNCED]  # read first: it is written after NEEDED of the entries before it
        if self._timeline.floor <= header[LOWEST_NEEDED] < floor:
            return True
        return self._log.any_below(synced, floor)


class LogTable(ItemTable):
    """The table of a segment's writer: what is appended goes to the log."""

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
        """Return whether an item of the log's entries from `position` on starts below `floor`."""
        after = self._log[np.arange(max(position, self.end - len(self._log)), self.end) % len(self._log)]
        starts = after >> COUNT_BITS
        return bool(((starts < floor) & (starts + (after & COUNT_MASK) > self._timeline.floor)).any())
