"""What one process has of a shared replay buffer: the memory, its own writers and how they wait, and what it reads."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlframe.errors import RlframeError, StoppedError, UsageError
from rlframe.interprocess.memory import Name
from rlframe.interprocess.processes import this_process
from rlframe.replay import block, segments
from rlframe.replay.block import Block
from rlframe.replay.contents import bytes_needed
from rlframe.replay.memory import check_memory
from rlframe.replay.mirror import Mirror
from rlframe.replay.recorder import find_writer
from rlframe.replay.sampler import Sampler
from rlframe.replay.segments import SegmentWriter
from rlframe.types import Batch, ReplaySpec, Step, StepSpec

_LOOK = 0.2  # seconds between two looks of a writer that waits; wake-ups make the usual wait much shorter
_DEATH = 10.0  # seconds that a rank's last process has to end, once it is claimed again


class WriterTimeoutError(RlframeError, TimeoutError):
    """A writer waited too long for its replay buffer to have room."""


class Plan(NamedTuple):
    """What all processes must know of a buffer to find their way in its memory."""

    name: Name
    spec: ReplaySpec
    step_spec: StepSpec
    num_writers: int
    max_envs: int
    rows: int  # of each segment
    seed: int
    timeout: float
    in_threads: bool
    run_ahead: int
    come_and_go: bool


class Share:
    """This process's part in the buffer of `plan`.

    Attributes:
        memory: mapped.
        lock: held while this process adds or samples, never while it waits.
        sampler: what it reads with.
    """

    def __init__(self, plan: Plan):
        self._plan, self._spec = plan, plan.spec
        self.memory = Block(plan.name, plan.num_writers, plan.rows, plan.spec, plan.step_spec)
        self.lock = threading.RLock()
        self.sampler = Sampler(self.memory, plan.spec, plan.step_spec, plan.seed, come_and_go=plan.come_and_go)
        self._pid = this_process().pid
        self._has_pace = plan.spec.kind == "queue" or plan.spec.samples_per_insert is not None
        self._is_makers = plan.name.maker == this_process()
        self._incarnations: dict[int, int] = {}  # of the ranks that this process claimed
        self._segments: dict[int, SegmentWriter] = {}
        self._told_to_stop: set[int] = set()  # ranks
        self._last: SegmentWriter | None = None  # that added
        self._fetcher: Mirror | None = None  # which follows no log
        self._fetching = threading.Lock()

    def fetch(self, keys: np.ndarray, probabilities: np.ndarray) -> tuple[Batch, np.ndarray]:
        """Copies the items `keys` [B, 3] out: (batch, [B] bool: which are gone)."""
        with self._fetching:
            if self._fetcher is None:
                self._fetcher = Mirror(self.memory, self._spec, self._plan.step_spec, "uniform")
            return self._fetcher.fetch(keys, probabilities)

    # --- ranks

    def claim(self, num_envs: int | None, rank: int | None) -> tuple[int, int]:
        """Returns (rank, incarnation); see `SharedMemReplayBuffer.claim_rank`."""
        memory, count = self.memory, self._plan.num_writers
        if rank is not None and not 0 <= rank < count:
            raise UsageError(
                f"Rank {rank} was claimed, but this replay buffer was made for num_writers={count} (ranks 0 to "
                f"{count - 1}). Make it with a greater num_writers."
            )
        if num_envs is not None:
            self._check_envs(num_envs)
        deadline = time.monotonic() + _DEATH
        while True:
            with self.lock, memory.claims():
                chosen = self._free_rank() if rank is None else rank
                holder, header = memory.writer(chosen), memory.headers[chosen]
                if holder == this_process() or not holder.is_alive:
                    header[block.PID], header[block.STARTED] = this_process()
                    header[block.CLAIMS] += 1
                    self._incarnations[chosen] = header[block.CLAIMS] - 1
                    if num_envs is not None:
                        self.open(chosen, num_envs)
                    return chosen, self._incarnations[chosen]
            if time.monotonic() > deadline:
                raise UsageError(f"Rank {chosen} was claimed, but process {holder.pid} has it, which still runs.")
            time.sleep(0.02)

    def _free_rank(self) -> int:
        holders = [self.memory.writer(rank) for rank in range(self._plan.num_writers)]
        for rank, holder in enumerate(holders):
            if not holder.is_alive:
                return rank
        raise UsageError(
            f"Another writer came, but this replay buffer was made for num_writers={len(holders)}, and all ranks are "
            f"taken (by processes {', '.join(str(holder.pid) for holder in holders)}). Make it with a greater "
            "num_writers."
        )

    def open(self, rank: int, num_envs: int) -> None:
        """Lays the segment out for a writer of `num_envs` environments; the caller holds the claims."""
        plan, memory = self._plan, self.memory
        self._check_envs(num_envs)
        if rank not in self._incarnations or memory.writer(rank) != this_process():
            raise UsageError(f"Rank {rank} is not this process's: call claim_rank first.")
        segments.lay_out(memory, rank, plan.spec, num_envs)
        # Pages are taken as they fill: all that the segments have yet to take must be there.
        heads = [cursors.read()[0] for cursors in memory.cursors]
        left = sum(max(0, header[block.SLOTS] - head) for header, head in zip(memory.headers, heads))
        needed = bytes_needed(plan.spec, plan.step_spec, left, 1, False)
        check_memory(needed, left, "what all writers' segments have yet to take")
        self._begin(rank, num_envs)

    def _check_envs(self, num_envs: int) -> None:
        if not 1 <= num_envs <= self._plan.max_envs:
            raise UsageError(
                f"A writer has 1 to max_envs={self._plan.max_envs} environments here, got num_envs={num_envs}. "
                "Make the replay buffer with a greater max_envs."
            )

    def _begin(self, rank: int, num_envs: int) -> SegmentWriter:
        plan, self._last = self._plan, None
        self._told_to_stop.discard(rank)
        incarnation = self._incarnations[rank]
        segment = SegmentWriter(self.memory, rank, incarnation, num_envs, plan.spec, plan.step_spec)
        self._segments[rank] = segment
        return segment

    # --- adding

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Adds one step of the environments `env_ids`, once there is room."""
        segment, envs = self._last, None
        if segment is None or env_ids.tobytes() != segment.writer.id_bytes:
            segment, envs = self._find(env_ids)
        if self._has_pace and self.waits:
            self._pace(segment, len(env_ids))
        with self.lock:
            if not segment.begun:
                segment = self._take_possession(segment)
            segment.add(envs, step)
        memory = self.memory
        wanted = memory.control[block.WANTED]
        if wanted != block.NOBODY and memory.added_items() >= wanted:
            memory.control[block.WANTED] = block.NOBODY
            memory.added.wake()

    def _find(self, env_ids: np.ndarray) -> tuple[SegmentWriter, np.ndarray | None]:
        """Returns the segment of the writer of `env_ids`, and the environments' indices (None: all in order)."""
        writer, envs = find_writer({rank: segment.writer for rank, segment in self._segments.items()}, env_ids)
        segment = self._segments[writer.rank]
        if envs is None:
            self._last = segment
        return segment, envs

    def _take_possession(self, segment: SegmentWriter) -> SegmentWriter:
        """Before a writer's first step: `restore` may have filled its segment since it was opened, but not later."""
        rank = segment.writer.rank
        with self.memory.claims():
            if segment.epoch != self.memory.headers[rank][block.EPOCH]:
                segment = self._begin(rank, segment.writer.num_envs)
            self.memory.headers[rank][block.BEGUN] = 1
        segment.begun = True
        return segment

    # --- waiting for the sampler

    @property
    def waits(self) -> bool:
        """Whether this process's writers wait for the sampler; see `SharedMemReplayBuffer`."""
        control = self.memory.control
        sampler = control[block.SAMPLER_PID]
        if self.memory.closed:
            return False
        if self._plan.in_threads:
            return True
        if sampler == self._pid:
            return False
        return sampler != 0 or not self._is_makers

    def end_waits(self, rank: int) -> None:
        """Ends what the writer `rank` of this process waits for."""
        self._told_to_stop.add(rank)
        self.memory.room.wake()

    def _pace(self, segment: SegmentWriter, count: int) -> None:
        """Waits while the writer is too far ahead."""
        memory, spec = self.memory, self._spec
        if spec.kind == "queue":
            floor = segment.gives_up(count)
            if floor and segment.unsampled_below(floor):
                what = "for items that it has not sampled yet to leave a full queue"
                self._wait(segment, lambda: segment.unsampled_below(floor), what)
        ratio = spec.samples_per_insert
        if ratio is None:
            return
        envs = sum([header[block.NUM_ENVS] for header in memory.headers])
        ahead = self._plan.run_ahead * max(spec.batch_size or envs, ratio * envs)

        def is_ahead() -> bool:
            return ratio * (memory.added_items() - spec.min_size) > memory.control[block.SAMPLED] + ahead

        if is_ahead():
            self._wait(segment, is_ahead, f"for it to sample {ratio:g} items for each that was added")

    def _wait(self, segment: SegmentWriter, blocked: Callable[[], bool], what: str) -> None:
        memory, rank, timeout = self.memory, segment.writer.rank, self._plan.timeout
        deadline = time.monotonic() + timeout
        memory.headers[rank][block.WAITS] = 1
        try:
            while True:
                value = memory.room.value
                if memory.control[block.WANTED] != block.NOBODY:
                    memory.added.wake()  # so that the sampler looks at what it may let go of
                if not blocked() or not self.waits:
                    return
                if rank in self._told_to_stop:
                    raise StoppedError(f"Writer {rank} of the replay buffer was told to stop while it waited {what}.")
                memory.check_maker()
                if time.monotonic() > deadline:
                    sampler = memory.sampler
                    state = f"process {sampler.pid}, which " + ("still runs" if sampler.is_alive else "has ended")
                    raise WriterTimeoutError(
                        f"Writer {rank} of the replay buffer waited {timeout:g} s for the sampler "
                        f"({state if sampler.pid else 'none has come yet'}) {what}. Does the learner still learn?"
                    )
                memory.room.wait(value, _LOOK)
        finally:
            memory.headers[rank][block.WAITS] = 0


def share_of(plan: Plan) -> Share:
    """What this process has of a buffer; the same for all its copies here."""
    with _opening:
        share = _shares.get(plan.name.token)
        if share is None:
            share = _shares[plan.name.token] = Share(plan)
        return share


_opening = threading.Lock()
_shares: weakref.WeakValueDictionary[int, Share] = weakref.WeakValueDictionary()
