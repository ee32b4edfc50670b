"""What a process pool and its workers share: one block of memory, and semaphores to wake each other.

The block is anonymous (a memfd that children inherit), so nothing of it can be left behind. Wake-ups are hints:
the counters in the block are the truth. Every counter has one writer.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import tempfile
from typing import Any

import numpy as np

from rlframe.envs.frames import Frame, frame_shapes
from rlframe.envs.logs import EnvLog, log_shapes
from rlframe.envs.spaces import Layout

# Words of a worker's header, each an int64.
GO = 0  # written by the pool: commands given so far
COMMAND = 1  # written by the pool: which
FRAME = 2  # written by the pool: the frame to write
DONE = 3  # written by the worker: commands done so far (sync), results given so far (async)
FAILED = 4  # written by the worker: 1 once an exception waits on its connection
REQUESTED = 5  # written by the pool: environments sent so far (async)
WANTED = 6  # written by the pool in the header of worker 0: results, of all workers together, that wake it (async)
AT = 7  # written by the worker: the place, in its share, of the environment that it steps (sync)
HEADER = 16  # words: two cache lines, so that no two workers share one

STEP, RESET, CALL, CLOSE = range(4)

NUM_FRAMES = 4  # three that the caller may hold, and one that is always free

_ONE = (1).to_bytes(8, sys.byteorder)


class Semaphore:
    """A counting semaphore that children inherit: an eventfd, or a pipe of permits where there are none."""

    def __init__(self, descriptors: tuple[int, int] | None = None):
        if descriptors is not None:
            self.reader, self.writer = descriptors
        elif hasattr(os, "eventfd"):
            self.reader = self.writer = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self.reader, self.writer = os.pipe()
            os.set_blocking(self.reader, False)
        self._is_eventfd = self.reader == self.writer
        self._poll = select.poll()
        self._poll.register(self.reader, select.POLLIN)

    @property
    def descriptors(self) -> tuple[int, int]:
        return self.reader, self.writer

    def post(self) -> None:
        """Adds a permit."""
        os.write(self.writer, _ONE if self._is_eventfd else b"\1")

    def wait(self, timeout: float) -> int:
        """Takes all permits there are, asleep for at most `timeout` seconds until there is one; how many it took."""
        if not self._poll.poll(timeout * 1000.0):
            return 0
        try:
            permits = os.read(self.reader, 8 if self._is_eventfd else 4096)
        except BlockingIOError:
            return 0
        return int.from_bytes(permits, sys.byteorder) if self._is_eventfd else len(permits)

    def close(self) -> None:
        for descriptor in {self.reader, self.writer}:
            os.close(descriptor)
        self.reader = self.writer = -1  # a late post must fail, not write to whatever gets the number next


def anonymous_file() -> int:
    """A file descriptor of memory that has no name and vanishes with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlframe-envs", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Block:
    """The memory of a pool, seen from the pool or from a worker: headers, rings, actions and frames.

    Attributes:
      headers: one memoryview of HEADER int64 words for each worker.
      requests, results: [num_workers, num_envs] int32 rings of environment ids (async).
      actions: [num_envs, ...] in the action spec's dtype.
      logs: what the environments of each worker log; its worker writes.
      frames: NUM_FRAMES of [num_envs, ...].
    """

    def __init__(self, descriptor: int, num_workers: int, num_envs: int, layout: Layout, action_spec: Any):
        shapes: list[tuple[tuple[int, ...], Any]] = [((num_workers, HEADER), np.int64)]
        shapes += [((num_workers, num_envs), np.int32)] * 2 + [((num_envs, *action_spec.shape), action_spec.dtype)]
        shapes += [((num_workers, *shape), dtype) for shape, dtype in log_shapes()]
        shapes += frame_shapes(layout, num_envs) * NUM_FRAMES
        offsets, size = _lay_out(shapes)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._mmap = mmap.mmap(descriptor, size)
        # Not frombuffer and reshape: views of that refer to an array that is not the one in the frame, so the
        # frame's reference counts would not know of them.
        arrays: list[np.ndarray] = [
            np.ndarray(shape, dtype, self._mmap, offset) for (shape, dtype), offset in zip(shapes, offsets, strict=True)
        ]
        # Scalars of a memoryview are read and written in a third of the time that an array takes.
        self.headers = [memoryview(row) for row in arrays[0]]
        self.requests, self.results, self.actions = arrays[1:4]
        self.logs = [EnvLog(names, values) for names, values in zip(arrays[4], arrays[5], strict=True)]
        per_frame = len(frame_shapes(layout, num_envs))
        self.frames = [Frame(layout, arrays[start : start + per_frame]) for start in range(6, len(arrays), per_frame)]


def _lay_out(shapes: list[tuple[tuple[int, ...], Any]]) -> tuple[list[int], int]:
    """(offset of each array, total size) in bytes, each array on a cache line of its own."""
    offsets, position = [], 0
    for shape, dtype in shapes:
        offsets.append(position)
        position += -(-max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1) // 64) * 64
    return offsets, position
