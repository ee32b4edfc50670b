"""The worker processes of a process pool: `WorkerProcesses` starts, calls, monitors and ends them."""

from __future__ import annotations

import abc
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rlframe.envs.codec import Codec
from rlframe.envs.group import (
    ANSWER_TIMEOUT,
    POLL_INTERVAL,
    StepWatch,
    describe_envs,
    different_specs_error,
    env_error,
    timeout_error,
)
from rlframe.envs.worker import CLOSE, COMMAND, FAILED, NUM_COMMANDS, Descriptors, PoolMemory, WorkerJob
from rlframe.errors import EnvError, UsageError
from rlframe.interprocess.heartbeat import SuspendAwareClock
from rlframe.interprocess.memory import SUPPORTED, anonymous_file
from rlframe.interprocess.processes import start_process
from rlframe.metrics.rows import Sums, add_sums
from rlframe.user_code.directories import import_path
from rlframe.user_code.files import pickle_with_code

_CLOSE_TIMEOUT = 5.0  # maximum seconds for closing the environments; then the worker is killed

_COMMAND = (
    "import sys; sys.path[:] = {path!r}; "
    "from rlframe.envs.worker import Descriptors, main; main(Descriptors(*{descriptors!r}))"
)


class WorkerProcesses(abc.ABC):
    """A pool with worker processes that share memory with the pool. A subclass steps the environments.

    Args:
      builder: a picklable `names.Builder`. Code that a worker cannot import is pickled by value.
      slices: for each worker, (start, stop) of its environments.
      answer_timeout: maximum seconds of a step; after that, a worker counts as hung. A start may take ANSWER_TIMEOUT.
      is_sync: whether all environments step together.
    """

    def __init__(self, builder: Any, slices: list[tuple[int, int]], answer_timeout: float, is_sync: bool):
        self._slices, self.num_envs = slices, slices[-1][1]
        self._answer_timeout, self._watch = answer_timeout, StepWatch(answer_timeout)
        if not SUPPORTED:
            raise UsageError("Pools of type 'process' need Linux on x86-64 or 64-bit ARM. Use type 'thread' instead.")
        descriptor = anonymous_file("rlframe-envs")
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._finalizer = weakref.finalize(self, _shut_down, self.processes, self._connections, descriptor, None)
        try:
            self._start(pickle_builder(builder), is_sync, descriptor)
        except BaseException:
            self.close()
            raise

    def _start(self, builder: bytes, is_sync: bool, descriptor: int) -> None:
        for worker, (start, stop) in enumerate(self._slices):
            ours, theirs = Pipe()
            self._connections.append(ours)
            descriptors = Descriptors(theirs.fileno(), descriptor)
            self.processes.append(_spawn(descriptors))
            theirs.close()
            job = WorkerJob(builder, start, stop, worker, len(self._slices), self.num_envs, is_sync)
            self._send(worker, pickle.dumps(job))
        codecs = [self._receive(worker, ANSWER_TIMEOUT) for worker in range(len(self._slices))]
        self.codec: Codec = codecs[0]
        for (start, _), codec in zip(self._slices, codecs, strict=True):
            if codec != self.codec:
                raise different_specs_error(0, self.codec, start, codec)
        memory = self._memory = PoolMemory(descriptor, len(self._slices), self.num_envs, self.codec)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _shut_down, self.processes, self._connections, descriptor, memory)

    def _send(self, worker: int, message: bytes) -> None:
        try:
            self._connections[worker].send_bytes(message)
        except OSError:
            raise self._death_error(worker) from None

    def _receive(self, worker: int, timeout: float) -> Any:
        """Return the worker's next message. Raise the worker's error, or EnvError if the worker died or timed out."""
        clock = SuspendAwareClock()
        deadline = clock() + timeout
        connection = self._connections[worker]
        try:
            while not connection.poll(POLL_INTERVAL):
                if self.processes[worker].poll() is not None and not connection.poll(0):
                    raise self._death_error(worker)
                if clock.tick() > deadline:
                    raise timeout_error([self._slices[worker]], timeout)
            message = connection.recv()
        except (EOFError, OSError):
            raise self._death_error(worker) from None
        if message[0] == "ok":
            return message[1]
        kind, sentence, text = message
        raise UsageError(sentence) if kind == "usage" else env_error(sentence, text)

    def _check_workers(self) -> None:
        """If a worker raised, died or hangs, close the pool and raise. Call this periodically while the pool waits."""
        try:
            for worker, (header, process) in enumerate(zip(self._memory.headers, self.processes, strict=True)):
                if header[FAILED]:
                    self._receive(worker, self._answer_timeout)
                if process.poll() is not None:
                    raise self._death_error(worker)
            self._watch.check(self._current_steps())
        except BaseException:
            self.close()
            raise

    @abc.abstractmethod
    def _current_steps(self) -> dict[int, tuple[int, Any]]:
        """Return the current step of each busy worker, as `StepWatch.check` expects it."""

    def _death_error(self, worker: int) -> EnvError:
        process = self.processes[worker]
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        how = f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return EnvError(
            f"The worker process {worker} (pid {process.pid}) of {describe_envs([self._slices[worker]])} {how}."
        )

    def sums(self) -> Sums:
        """See `SyncEnv.sums`."""
        return add_sums(log.sums() for log in self._memory.logs)

    @property
    def is_closed(self) -> bool:
        """True if the workers have ended, because `close` was called or a step failed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End every worker. Kill each worker that does not end in time."""
        self._finalizer()


def _spawn(descriptors: Descriptors) -> subprocess.Popen[bytes]:
    code = _COMMAND.format(path=import_path(), descriptors=tuple(descriptors))
    # Limit the threads of numerical libraries, which otherwise start one thread per core in every worker.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
    # Use a new session, so that Ctrl-C at the terminal reaches only the pool. The pool then closes its workers.
    return start_process(
        [sys.executable, "-c", code],
        pass_fds=descriptors,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def pickle_builder(builder: Any) -> bytes:
    """Pickle a `names.Builder` for a worker process. Raise UsageError if this is not possible."""
    try:
        return pickle_with_code(builder, builder.code)
    except Exception as error:
        raise UsageError(
            f"The environment builder cannot be sent to a worker process: {type(error).__name__}: {error}. "
            "Create objects that cannot be pickled inside the builder, or use type 'thread'."
        ) from error


def _shut_down(
    processes: list[subprocess.Popen[bytes]],
    connections: list[Connection],
    descriptor: int,
    memory: PoolMemory | None,
) -> None:
    """End the workers and close every descriptor. This runs once: on `close`, garbage collection or exit."""
    if memory is not None:
        for header, go in zip(memory.headers, memory.go, strict=True):
            header[COMMAND] = CLOSE
            header[NUM_COMMANDS] += 1
            go.wake()
    deadline = time.monotonic() + _CLOSE_TIMEOUT
    for connection, process in zip(connections, processes, strict=True):
        if memory is None:
            process.kill()  # the pool has no shared memory yet, so the worker cannot receive CLOSE
        try:
            process.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        connection.close()
    os.close(descriptor)
