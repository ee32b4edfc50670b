"""The worker process of a process pool, and the memory that all workers share with the pool.

A worker sleeps until the pool wakes it, and then steps its environments. The shared memory is an anonymous file, which
the workers inherit. The kernel frees it when the last process ends. A process can wake up without a reason, so it reads
the counters after each wake-up. Only one process writes each counter.
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

# Indices of the int64 words in a worker's header. "Sync" and "async" mean that only this kind of pool uses the word.
NUM_COMMANDS = 0  # written by the pool: number of commands so far
COMMAND = 1  # written by the pool: the newest command
BUFFER = 2  # written by the pool: index of the buffer to which the worker writes
NUM_DONE = 3  # written by the worker: number of finished commands (sync) or of results (async)
FAILED = 4  # written by the worker: 1 after it sent an exception
NUM_REQUESTED = 5  # written by the pool: number of requested steps (async)
WAKE_AT = 6  # written by the pool, only for worker 0: total number of results that wakes the pool (async)
CURRENT_ENV = 7  # written by the worker: index of the stepping environment in the group (sync)
GO_FUTEX = 12  # futex with which the pool wakes the worker
DONE_FUTEX = 13  # in the header of worker 0 only: futex with which any worker wakes the pool
HEADER = 16  # words in a header: two cache lines, so that two workers never share a cache line

STEP, RESET, CALL, CLOSE = range(4)

NUM_BUFFERS = 4  # three buffers that the caller may refer to, and one that is always free

_POLL_INTERVAL = 0.5  # seconds after which an idle worker checks that its parent is alive


class PoolMemory:
    """The memory that a pool shares with its workers: headers, ring buffers, actions and batches.

    Attributes:
      headers: for each worker, a memoryview of HEADER int64 words.
      go: for each worker, the futex on which the worker sleeps.
      done: the futex on which the pool sleeps.
      requests, results: int32 ring buffers [num_workers, num_envs] of environment ids, for asynchronous pools.
      actions: array [num_envs, ...] in the action spec's dtype.
      logs: for each worker, the log of its environments. Only this worker writes to the log.
      buffers: NUM_BUFFERS batches for observations, [num_envs, ...] each.
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
        field_names = [[f"buffer {n} {i}" for i in range(len(buffer_shapes(layout, 1)))] for n in range(NUM_BUFFERS)]
        for names in field_names:
            fields.update(zip(names, buffer_shapes(layout, num_envs)))
        memory = SharedArrays(descriptor, fields)
        arrays, self.headers = memory.arrays, memory.rows("headers")
        self.go = [Futex(header[GO_FUTEX : GO_FUTEX + 1]) for header in self.headers]
        self.done = Futex(self.headers[0][DONE_FUTEX : DONE_FUTEX + 1])
        self.requests, self.results, self.actions = arrays["requests"], arrays["results"], arrays["actions"]
        self.logs = [EnvLog(names, values) for names, values in zip(arrays["log 0"], arrays["log 1"], strict=True)]
        self.buffers = [BatchBuffer(layout, [arrays[name] for name in names]) for names in field_names]


class WorkerJob(NamedTuple):
    """The first message from the pool to a worker."""

    builder: bytes  # pickled function (index) -> SingleEnv
    start: int
    stop: int
    worker: int
    num_workers: int
    num_envs: int
    is_sync: bool


class Descriptors(NamedTuple):
    """The file descriptors that a worker inherits."""

    connection: int
    memory: int


def main(descriptors: Descriptors) -> None:
    """Run a worker until the pool closes it. If the parent process dies, the kernel kills this process 3 s later."""
    streams.prepare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes its workers
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
    gc.freeze()  # save time: the garbage collector then ignores imported objects
    EnvWorker(job, group, connection, descriptors.memory).serve()


class EnvWorker:
    """Executes the commands of its pool."""

    def __init__(self, job: WorkerJob, group: EnvGroup, connection: Connection, memory: int):
        self._job, self._group, self._connection = job, group, connection
        self._parent, self._parent_end = os.getppid(), select.poll()
        self._parent_end.register(connection.fileno(), 0)  # detect only that the parent closed the connection
        pool_memory = PoolMemory(memory, job.num_workers, job.num_envs, group.codec)
        self._go, self._done = pool_memory.go[job.worker], pool_memory.done
        self._headers = pool_memory.headers
        self._header = pool_memory.headers[job.worker]
        self._requests, self._results = pool_memory.requests[job.worker], pool_memory.results[job.worker]
        self._actions = pool_memory.actions
        group.log_to(pool_memory.logs[job.worker])
        group.current = self._header[CURRENT_ENV : CURRENT_ENV + 1]
        self._rows = [buffer.rows(job.start, job.stop) for buffer in pool_memory.buffers]

    def serve(self) -> None:
        """Execute commands until CLOSE or until the parent dies. Then close the environments."""
        work = self._serve_sync if self._job.is_sync else self._serve_async
        try:
            work()
        except Exception as error:
            send_error(self._connection, error)
            self._header[FAILED] = 1
            self._done.wake()
        finally:
            # Ignore errors, because the process must end even if an environment cannot be closed.
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
            # Wake the pool only if this worker is the last to finish, because each wake-up takes time.
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
            # Wake the pool only for enough results, because a wake-up takes longer than a step of a light environment.
            if sum([one[NUM_DONE] for one in all_headers]) >= wanted[WAKE_AT]:
                self._done.wake()


def send_error(connection: Connection, error: Exception) -> None:
    """Send an exception as text, because the pool can be unable to unpickle the exception."""
    text = getattr(error, "traceback_text", None) or "".join(traceback.format_exception(error))
    kind = "usage" if isinstance(error, UsageError) else "env"
    sentence = str(error) if isinstance(error, RlframeError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        connection.send((kind, sentence, text))


def _build(job: WorkerJob, connection: Connection) -> EnvGroup | None:
    """Build the environments, and send their codec or an error to the pool."""
    try:
        builder: Any = pickle.loads(job.builder)
        group = build_group(builder, job.start, job.stop)
    except Exception as error:
        if not isinstance(error, RlframeError):
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            sentence = f"A worker could not load the environment builder: {type(error).__name__}: {error}"
            error = env_error(sentence, text)
        send_error(connection, error)
        return None
    connection.send(("ok", group.codec))
    return group
