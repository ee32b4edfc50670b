"""The memory that a process pool and its workers share.

It is anonymous, and children inherit it, so nothing of it can be left behind. Wake-ups are hints: the counters are the
truth. Every counter has one writer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.envs.frames import Frame, frame_shapes
from rlframe.envs.logs import EnvLog, log_shapes
from rlframe.envs.spaces import Layout
from rlframe.interprocess.futex import Futex
from rlframe.interprocess.memory import SharedArrays

# Words of a worker's header, each an int64.
GO = 0  # written by the pool: commands given so far
COMMAND = 1  # written by the pool: which
FRAME = 2  # written by the pool: the frame to write
DONE = 3  # written by the worker: commands done so far (sync), results given so far (async)
FAILED = 4  # written by the worker: 1 once an exception waits on its connection
REQUESTED = 5  # written by the pool: environments sent so far (async)
WANTED = 6  # written by the pool in the header of worker 0: results, of all workers together, that wake it (async)
AT = 7  # written by the worker: the place, in its share, of the environment that it steps (sync)
GO_FUTEX = 12  # wakes the worker; by the pool
DONE_FUTEX = 13  # in the header of worker 0: wakes the pool; by any worker
HEADER = 16  # words: two cache lines, so that no two workers share one

STEP, RESET, CALL, CLOSE = range(4)

NUM_FRAMES = 4  # three that the caller may hold, and one that is always free

class Block:
    """The memory of a pool, seen from the pool or from a worker: headers, rings, actions and frames.

    Attributes:
      headers: one memoryview of HEADER int64 words for each worker.
      go: what each worker sleeps on.
      done: what the pool sleeps on.
      requests, results: [num_workers, num_envs] int32 rings of environment ids (async).
      actions: [num_envs, ...] in the action spec's dtype.
      logs: what the environments of each worker log; its worker writes.
      frames: NUM_FRAMES of [num_envs, ...].
    """

    def __init__(self, descriptor: int, num_workers: int, num_envs: int, layout: Layout, action_spec: Any):
        fields: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "headers": ((num_workers, HEADER), np.dtype(np.int64)),
            "requests": ((num_workers, num_envs), np.dtype(np.int32)),
            "results": ((num_workers, num_envs), np.dtype(np.int32)),
            "actions": ((num_envs, *action_spec.shape), np.dtype(action_spec.dtype)),
        }
        for i, (shape, dtype) in enumerate(log_shapes()):
            fields[f"log {i}"] = ((num_workers, *shape), dtype)
        of_frames = [[f"frame {n} {i}" for i in range(len(frame_shapes(layout, 1)))] for n in range(NUM_FRAMES)]
        for names in of_frames:
            fields.update(zip(names, frame_shapes(layout, num_envs)))
        arrays = SharedArrays(descriptor, fields).arrays
        # Scalars of a memoryview are read and written in a third of the time that an array takes.
        self.headers = [memoryview(row) for row in arrays["headers"]]
        self.go = [Futex(header[GO_FUTEX : GO_FUTEX + 1]) for header in self.headers]
        self.done = Futex(self.headers[0][DONE_FUTEX : DONE_FUTEX + 1])
        self.requests, self.results, self.actions = arrays["requests"], arrays["results"], arrays["actions"]
        self.logs = [EnvLog(names, values) for names, values in zip(arrays["log 0"], arrays["log 1"], strict=True)]
        self.frames = [Frame(layout, [arrays[name] for name in names]) for names in of_frames]
