"""The memory of a shared replay buffer: anonymous, found through the process that made it, laid out the same by all.

    control     counters and flags of the whole buffer
    headers     of each writer's segment: its cursors, who claimed it, what was sampled of it
    logs        of each segment: which items it completed, in order
    arrays      what is kept of each timestep: [num_writers * rows, ...], so that one gather reads of all segments

The file is sparse: pages that no step was written to take no memory.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np

from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.futex import Futex
from rlframe.interprocess.memory import SUPPORTED, Fields, Name, Seqlock, SharedArrays
from rlframe.interprocess.processes import ProcessId
from rlframe.replay.steps import StepStore
from rlframe.replay.tables import UniformTable
from rlframe.replay.timeline import Timeline
from rlframe.types import ReplaySpec, StepSpec

# Words of the control block, each an int64. Futexes use the lower half of theirs.
SAMPLER_PID, SAMPLER_STARTED = 2, 3  # the process that samples; written under the claims' lock
ORIGIN = 4  # of the buffer whose file filled this one; 0 where none did. Written under the claims' lock
WANTED = 8  # by the sampler: items added, over all segments, that wake it; NOBODY while it does not wait
ADDED_FUTEX = 9  # wakes who waits for items
SAMPLED, SIZE, EVICTED, EVICTED_UNSAMPLED, DROPPED = range(16, 21)  # by the sampler, for `stats` elsewhere
ROOM_FUTEX = 24  # wakes the writers that wait for room

# Words of a segment's header. By its writer: its `Cursors`.
CURSORS = slice(0, Seqlock.words(4))
FLOOR = 9  # timesteps below may be overwritten any time; raised before they are
LOG_RESERVED = 10  # entries of the log up to here may be being written
WAITS = 11  # 1 while the writer waits for room
# Under the claims' lock.
# EPOCH: how often `restore` filled the segment; BEGUN: 1 once it must not any more.
CLAIMS, PID, STARTED, NUM_ENVS, SLOTS, CHUNK, EPOCH, BEGUN = range(16, 24)
# By the sampler of a queue.
SYNCED = 24  # entries of the log that it has read
NEEDED = 25  # the lowest timestep of an item that was not sampled, or not finished; NOTHING where there is none
# (SYNCED, how many of those entries' items were not sampled): where the next process goes on that samples.
TAKEN = slice(26, 26 + Seqlock.words(2))

_WORDS = 32  # 4 cache lines: nobody writes to the line of another process's counters
NOBODY = NOTHING = 2**62
_FILE = "rlframe-replay"
_CLAIM_TIMEOUT = 30.0  # seconds; claims take microseconds


class BufferGoneError(RlframeError):
    """The process that made a shared replay buffer has ended, and its memory with it."""


def create(num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec) -> SharedArrays:
    """Makes the memory of a buffer; it stays until it is closed and nobody maps it."""
    if not SUPPORTED:
        raise UsageError(
            "SharedMemReplayBuffer needs Linux on x86-64 or 64-bit ARM. Use ReplayBuffer in one process instead."
        )
    created = SharedArrays.create(_FILE, _fields(num_writers, rows, spec, step_spec))
    created.arrays["control"][0, WANTED] = NOBODY
    return created


class Block:
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

    def __init__(self, name: Name, num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec):
        self.num_writers, self.rows, self._name, self.token = num_writers, rows, name, name.token
        try:
            self._shared = SharedArrays.attach(name, _FILE, _fields(num_writers, rows, spec, step_spec))
        except PermissionError as error:
            raise UsageError(
                f"The shared replay buffer of process {name.maker.pid} cannot be opened: {error}. "
                "All its processes must run as the same user, in the same container or on the same Ray node; --replay "
                "service needs no such memory."
            ) from None
        except OSError:
            raise self._gone() from None
        self.arrays = dict(self._shared.arrays)
        self.control, *self.headers = self._shared.rows("control")
        self.header_words = self.arrays.pop("control")[1:]
        self.cursors = [Seqlock(header[CURSORS]) for header in self.headers]
        self.taken = [Seqlock(header[TAKEN]) for header in self.headers]
        self.logs = self.arrays.pop("logs")
        self.added, self.room = (Futex(self.control[word : word + 1]) for word in (ADDED_FUTEX, ROOM_FUTEX))

    @property
    def closed(self) -> bool:
        """Whether the buffer was closed where it was made."""
        return self._shared.closed

    def cursors_of(self, rank: int) -> Cursors:
        """How far a segment has come."""
        return Cursors(*self.cursors[rank].read())

    def claims(self) -> contextlib.AbstractContextManager[None]:
        """Held by one process at a time."""

        def overdue() -> Exception:
            return RlframeError(
                f"A process has held the claims of the shared replay buffer for {_CLAIM_TIMEOUT:.0f} s: it was stopped "
                "(SIGSTOP) while it claimed a rank. Let it go on, or kill it."
            )

        return self._shared.lock(_CLAIM_TIMEOUT, overdue)

    def check_maker(self) -> None:
        """Raises `BufferGoneError` once the process that made the buffer has ended."""
        if not self._shared.creator_is_alive:
            raise self._gone()

    def writer(self, rank: int) -> ProcessId:
        """The process that claimed `rank` last."""
        return ProcessId(self.headers[rank][PID], self.headers[rank][STARTED])

    @property
    def sampler(self) -> ProcessId:
        """The process that samples, or sampled last."""
        return ProcessId(self.control[SAMPLER_PID], self.control[SAMPLER_STARTED])

    @property
    def incarnations(self) -> list[int]:
        """Of each rank, how often it was claimed."""
        return [header[CLAIMS] for header in self.headers]

    def added_items(self) -> int:
        """Items that were ever added, to all segments."""
        return sum([cursors.read()[2] for cursors in self.cursors])

    def _gone(self) -> BufferGoneError:
        return BufferGoneError(
            f"The process {self._name.maker.pid} that made this shared replay buffer has ended or closed it. "
            "Its memory ends with it: start the program anew."
        )


class Cursors(NamedTuple):
    """How far a segment has come."""

    head: int  # timesteps
    end: int  # entries of its log
    added: int  # items
    steps: int


def _fields(num_writers: int, rows: int, spec: ReplaySpec, step_spec: StepSpec) -> Fields:
    word = np.dtype(np.int64)
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "control": ((1 + num_writers, _WORDS), word),
        "logs": ((num_writers, 2 * rows), word),
        "present": ((num_writers * rows,), np.dtype(bool)),
    }

    def note(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        shapes[name] = ((num_writers * rows, *shape[1:]), dtype)
        return np.zeros(shape, dtype)

    timeline = Timeline(1, 1)
    StepStore(spec, step_spec, timeline, UniformTable(timeline), allocate=note)
    return shapes
