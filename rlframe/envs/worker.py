"""The process at the other end of a process pool, and the memory that it shares with it.

A worker steps its share of the environments when it is woken. The memory is anonymous, and children inherit it, so
nothing of it can be left behind. Wake-ups are hints: the counters are the truth. Every counter has one writer.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import setproctitle

from rlframe import streams
from rlframe.envs.codec import Codec
from rlframe.envs.group import EnvGroup, build_group, env_error
from rlframe.envs.layout import BatchBuffer, buffer_shapes
from rlframe.envs.logs import EnvLog, log_shapes
from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.memory import SharedArrays
from rlframe.interprocess.processes import die_soon_after_parent
from rlframe.interprocess.waiting import Futex

# Words of a worker's header, each an int64.
NUM_COMMANDS = 0  # written by the pool: commands given so far
COMMAND = 1  # written by the pool: which
BUFFER = 2  # written by the pool: the frame to write
NUM_DONE = 3  # written by the worker: commands done so far (sync), results given so far (async)
FAILED = 4  # written by the worker: 1 once an exception waits on its connection
NUM_REQUESTED = 5  # written by the pool: environments sent so far (async)
WAKE_AT = 6  # written by the pool in the header of worker 0: results, of all workers together, that wake it (async)
CURRENT_ENV = 7  # written by the worker: the place, in its share, of the environment that it steps (sync)
GO_FUTEX = 12  # wakes the worker; by the pool
DONE_FUTEX = 13  # in the header of worker 0: wakes the pool; by any worker
HEADER = 16  # words: two cache lines, so that no two workers share one

STEP, RESET, CALL, CLOSE = range(4)

NUM_BUFFERS = 4  # three that the caller may hold, and one that is always free

_POLL_INTERVAL = 0.5  # seconds between two looks of an idle worker at whether its parent has died


class PoolMemory:
    """The memory of a pool, seen from the pool or from a worker: headers, rings, actions and frames.

    Attributes:
      headers: one memoryview of HEADER int64 words for each worker.
      go: what each worker sleeps on.
      done: what the pool sleeps on.
      requests, results: [num_workers, num_envs] int32 rings of environment ids (async).
      actions: [num_envs, ...] in the action spec's dtype.
      logs: what the environments of each worker log; its worker writes.
      frames: NUM_BUFFERS of [num_envs, ...].
    """

    def __init__(self, descriptor: int, num_workers: int, num_envs: int, codec: Codec):
        fields: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "headers": ((num_workers, HEADER), np.dtype(np.int64)),
            "requests": ((num_workers, num_envs), np.dtype(np.int32)),
            "results": ((num_workers, num_envs), np.dtype(np.int32)),
            "actions": ((num_envs, *codec.action_spec.shape), np.dtype(codec.action_spec.dtype)),
        }
        for i, (shape, dtype) in enumerate(log_shapes()):
            fields[f"log {i}"] = ((num_workers, *shape), dtype)
        layout = codec.layout
        of_frames = [[f"frame {n} {i}" for i in range(len(buffer_shapes(layout, 1)))] for n in range(NUM_BUFFERS)]
        for names in of_frames:
            fields.update(zip(names, buffer_shapes(layout, num_envs)))
        memory = SharedArrays(descriptor, fields)
        arrays, self.headers = memory.arrays, memory.rows("headers")
        self.go = [Futex(header[GO_FUTEX : GO_FUTEX + 1]) for header in self.headers]
        self.done = Futex(self.headers[0][DONE_FUTEX : DONE_FUTEX + 1])
        self.requests, self.results, self.actions = arrays["requests"], arrays["results"], arrays["actions"]
        self.logs = [EnvLog(names, values) for names, values in zip(arrays["log 0"], arrays["log 1"], strict=True)]
        self.frames = [BatchBuffer(layout, [arrays[name] for name in names]) for names in of_frames]


class WorkerJob(NamedTuple):
    """What a worker is told at its start."""

    builder: bytes  # pickled: index -> SingleEnv
    start: int
    stop: int
    worker: int
    num_workers: int
    num_envs: int
    is_sync: bool


class Descriptors(NamedTuple):
    """What a worker inherits."""

    connection: int
    memory: int


def main(descriptors: Descriptors) -> None:
    """Run until told to close, or until the parent has died: the kernel ends this process 3 s after that."""
    streams.prepare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes its workers
    die_soon_after_parent()
    connection = Connection(descriptors.connection)
    try:
        job: WorkerJob = pickle.loads(connection.recv_bytes())
        setproctitle.setproctitle(f"rlframe: env worker {job.worker}")
        group = _build(job, connection)
        if group is None:
            return
    except (EOFError, OSError):
        return
    gc.collect()
    gc.freeze()  # what was imported so far will not become garbage: spare the collector from looking
    EnvWorker(job, group, connection, descriptors.memory).serve()


class EnvWorker:
    """Serves the commands of one pool."""

    def __init__(self, job: WorkerJob, group: EnvGroup, connection: Connection, memory: int):
        self._job, self._group, self._connection = job, group, connection
        self._parent, self._parent_end = os.getppid(), select.poll()
        self._parent_end.register(connection.fileno(), 0)  # of the connection, only its end is of interest
        block = PoolMemory(memory, job.num_workers, job.num_envs, group.codec)
        self._go, self._done = block.go[job.worker], block.done
        self._headers = block.headers
        self._header = block.headers[job.worker]
        self._requests, self._results = block.requests[job.worker], block.results[job.worker]
        self._actions = block.actions
        group.log_to(block.logs[job.worker])
        group.at = self._header[CURRENT_ENV : CURRENT_ENV + 1]
        self._rows = [frame.rows(job.start, job.stop) for frame in block.frames]

    def serve(self) -> None:
        """Answer commands until CLOSE, or until the parent has died; then close the environments."""
        work = self._serve_sync if self._job.is_sync else self._serve_async
        try:
            work()
        except Exception as error:
            send_error(self._connection, error)
            self._header[FAILED] = 1
            self._done.wake()
        finally:
            # An environment that cannot close must not keep the others, or the process, from ending.
            with contextlib.suppress(Exception):
                self._group.close()

    def _next_command(self, served: int) -> int:
        while True:
            value = self._go.value
            if self._header[NUM_COMMANDS] != served:
                return self._header[COMMAND]
            if not self._go.wait(value, _POLL_INTERVAL) and self._is_orphan():
                return CLOSE

    def _is_orphan(self) -> bool:
        return bool(self._parent_end.poll(0)) or os.getppid() != self._parent

    def _serve_sync(self) -> None:
        header, group, rows = self._header, self._group, self._rows
        actions = self._actions[self._job.start : self._job.stop]
        served = 0
        while (command := self._next_command(served)) != CLOSE:
            served += 1
            if command == STEP:
                group.step(actions, rows[header[BUFFER]])
            elif command == RESET:
                group.reset(rows[header[BUFFER]])
            else:
                method, arguments = self._connection.recv()
                self._connection.send(("ok", getattr(group, method)(*arguments)))
            header[NUM_DONE] = served
            # The last one wakes the pool: with 16 workers it would wake for each of them.
            if min([one[NUM_DONE] for one in self._headers]) == served:
                self._done.wake()

    def _serve_async(self) -> None:
        header, first, capacity = self._header, self._job.start, self._job.num_envs
        all_headers, wanted = self._headers, self._headers[0]
        rows = self._rows[0]
        served = 0
        while True:
            value = self._go.value
            if header[COMMAND] == CLOSE:
                return
            if header[NUM_REQUESTED] == served:
                if not self._go.wait(value, _POLL_INTERVAL) and self._is_orphan():
                    return
                continue
            env_id = int(self._requests[served % capacity])
            self._group.step_one(env_id - first, self._actions[env_id], rows, env_id - first)
            self._results[served % capacity] = env_id
            served += 1
            header[NUM_DONE] = served
            # Waking the pool for each of many light environments would cost more than stepping them.
            if sum([one[NUM_DONE] for one in all_headers]) >= wanted[WAKE_AT]:
                self._done.wake()


def send_error(connection: Connection, error: Exception) -> None:
    """Sends an exception as text: its own class might not be importable, or not survive a pickle."""
    text = getattr(error, "traceback_text", None) or "".join(traceback.format_exception(error))
    kind = "usage" if isinstance(error, UsageError) else "env"
    sentence = str(error) if isinstance(error, RlframeError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        connection.send((kind, sentence, text))


def _build(job: WorkerJob, connection: Connection) -> EnvGroup | None:
    """Builds the environments and sends the pool their codec, or why that failed."""
    try:
        builder: Any = pickle.loads(job.builder)
        group = build_group(builder, job.start, job.stop)
    except Exception as error:
        if not isinstance(error, RlframeError):
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            sentence = f"A worker could not load the builder of the environments: {type(error).__name__}: {error}"
            error = env_error(sentence, text)
        send_error(connection, error)
        return None
    connection.send(("ok", group.codec))
    return group
