"""A writer's segment of a shared replay buffer: a ring of timesteps, and a log of the items that they complete.

The writer runs the code of the in-process buffer on its part of the shared arrays. Where that one would note an item
in its table, this one writes a line into the log, from which readers learn of it. Nothing here waits or locks: data
come first and then the cursor that says they are there; the floor is raised before what is below it is overwritten.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rlframe.errors import UsageError
from rlframe.interprocess.futex import fence
from rlframe.replay import block, steps
from rlframe.replay.block import Block, Cursors
from rlframe.replay.steps import StepStore
from rlframe.replay.tables import ItemTable
from rlframe.replay.timeline import Index, Timeline
from rlframe.types import ReplaySpec, Sequence, Step, StepSpec

# An entry of the log: consecutive timesteps, from `entry >> COUNT_BITS`, of which those that are present begin items.
COUNT_BITS = 20  # more than a rank may have environments
COUNT_MASK = (1 << COUNT_BITS) - 1
# Chunks, those that are overwritten next, that readers leave alone. With one alone, a writer at full speed had them
# look at its log for every other batch, which takes three times as long as the batch.
MARGIN = 4


def entries(starts: np.ndarray) -> np.ndarray:
    """The log's entries for items that start at the timesteps `starts`, in no order."""
    return starts << COUNT_BITS | 1


def segment_sizes(spec: ReplaySpec, num_writers: int, num_envs: int) -> tuple[int, int]:
    """Returns (slots, chunk) of a segment that keeps its share of the capacity, for a writer of `num_envs`.

    A segment of a queue holds what `sample` asks for by itself, so that no other writer must move for it to go on.
    """
    share = -(-spec.capacity // num_writers)
    if spec.kind == "queue":
        batch = 2 * num_envs if spec.batch_size is None else spec.batch_size
        period = spec.item.period if isinstance(spec.item, Sequence) else 2  # every other step may be a LAST
        share = max(share, max(spec.min_size, batch) * period + steps.needed(spec, num_envs))
    spec = dataclasses.replace(spec, capacity=share)
    slots, chunk = steps.sizes(spec, num_envs, num_envs, chunks=16 * MARGIN)
    return slots + MARGIN * chunk, chunk


def segment_rows(spec: ReplaySpec, num_writers: int, max_envs: int) -> int:
    """Enough slots for a writer of up to `max_envs` environments."""
    return segment_sizes(spec, num_writers, max_envs)[0] + 4 * max_envs  # whatever the number is rounded to


def lay_out(memory: Block, rank: int, spec: ReplaySpec, num_envs: int) -> None:
    """Fits a segment to a writer of `num_envs` environments; one that holds something stays as it is."""
    header = memory.headers[rank]
    if memory.cursors_of(rank).head == 0:
        header[block.SLOTS], header[block.CHUNK] = segment_sizes(spec, memory.num_writers, num_envs)
        header[block.NEEDED] = block.NOTHING
    else:
        steps.check_room(spec, header[block.SLOTS], (MARGIN + 1) * header[block.CHUNK], num_envs)
    header[block.NUM_ENVS], header[block.WAITS] = num_envs, 0


class SegmentWriter:
    """Adds the steps of one writer to its segment. One thread at a time.

    Attributes:
        epoch: how often the segment had been restored when it was opened.
        begun: whether this writer has the right to add: from then on it cannot be restored.
    """

    def __init__(
        self, memory: Block, rank: int, incarnation: int, num_envs: int, spec: ReplaySpec, step_spec: StepSpec
    ):
        header = self._header = memory.headers[rank]
        self.epoch, self.begun = header[block.EPOCH], False
        slots, first = header[block.SLOTS], rank * memory.rows
        timeline = self._timeline = Timeline(slots, header[block.CHUNK])
        self._cursors, now = memory.cursors[rank], memory.cursors_of(rank)
        timeline.head, timeline.floor = now.head, header[block.FLOOR]
        self._log = LogTable(timeline, memory.arrays["present"][first : first + slots], memory.logs[rank], header, now)

        def part(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            return memory.arrays[name][first : first + slots]

        self._store = StepStore(spec, step_spec, timeline, self._log, num_envs, allocate=part)
        self._store.marks_origin = incarnation > 0 or self.epoch > 0  # slots hold 0 otherwise
        self.writer = self._store.open(rank, incarnation, num_envs, origin=incarnation)
        self._steps = now.steps

    def add(self, envs: np.ndarray | None, step: Step) -> None:
        """Adds a step of the environments `envs` [B]; None: of all of them, in order."""
        self._store.add(self.writer, envs, step)
        self._steps += self.writer.num_envs if envs is None else len(envs)
        log = self._log
        self._cursors.write(self._timeline.head, log.end, log.added, self._steps)

    def gives_up(self, count: int) -> int:
        """The floor after a step of `count` environments; 0 where it stays."""
        head, timeline = self._timeline.head + 2 * count, self._timeline
        return head - timeline.slots + timeline.chunk if head - timeline.floor > timeline.slots else 0

    def unsampled_below(self, floor: int) -> bool:
        """Whether an item of a queue that starts below `floor` was not sampled."""
        header = self._header
        synced = header[block.SYNCED]  # first: what is needed of the entries before it was written before it
        if self._timeline.floor <= header[block.NEEDED] < floor:
            return True
        return self._log.any_below(synced, floor)


class LogTable(ItemTable):
    """The table of a segment's writer: what is appended goes to the log."""

    def __init__(self, timeline: Timeline, present: np.ndarray, log: np.ndarray, header: memoryview, cursors: Cursors):
        super().__init__(timeline)
        self._present, self._log, self._header = present, log, header
        self.end, self.added = cursors.end, cursors.added

    def _push_block(self, first: int, index: Index, count: int, mask: np.ndarray | None, shared: bool) -> None:
        if shared and mask is not None:
            self._push(first + mask.nonzero()[0])
            return
        at = self.end % len(self._log)
        self.end += 1
        self._header[block.LOG_RESERVED] = self.end
        self._log[at] = first << COUNT_BITS | count

    def _push(self, starts: np.ndarray) -> None:
        places = np.arange(self.end, self.end + len(starts)) % len(self._log)
        self.end += len(starts)
        self._header[block.LOG_RESERVED] = self.end
        fence()
        self._log[places] = entries(starts)

    def evict(self, index: Index) -> None:
        self._header[block.FLOOR] = self._timeline.floor
        fence()
        super().evict(index)

    def any_below(self, position: int, floor: int) -> bool:
        """Whether an item of the log's entries from `position` on starts below `floor`."""
        after = self._log[np.arange(max(position, self.end - len(self._log)), self.end) % len(self._log)]
        starts = after >> COUNT_BITS
        return bool(((starts < floor) & (starts + (after & COUNT_MASK) > self._timeline.floor)).any())

    def numbers(self) -> np.ndarray:
        """The items that are there."""
        low, count = self._timeline.floor, self._timeline.head - self._timeline.floor
        return low + self._present[(low + np.arange(count)) % self._timeline.slots].nonzero()[0]

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Readers draw, not writers."""
        raise UsageError("A writer's log cannot be drawn from.")
