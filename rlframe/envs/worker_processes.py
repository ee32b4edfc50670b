"""The processes of a process pool: starting them, talking to them, noticing that one died, ending them."""

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

from rlframe.envs import snapshot
from rlframe.envs.codec import Codec
from rlframe.envs.group import (
    ANSWER_TIMEOUT,
    POLL_INTERVAL,
    StepWatch,
    different_specs_error,
    env_error,
    span,
    timeout_error,
)
from rlframe.envs.worker import CLOSE, COMMAND, FAILED, NUM_COMMANDS, Descriptors, PoolMemory, WorkerJob
from rlframe.errors import EnvError, UsageError
from rlframe.interprocess.heartbeat import SuspendAwareClock
from rlframe.interprocess.memory import SUPPORTED, anonymous_file
from rlframe.interprocess.processes import start_process
from rlframe.metrics.rows import Sums, add_sums
from rlframe.user_code.directories import import_path

_CLOSE_TIMEOUT = 5.0  # seconds for the environments' own close(); then the worker is killed

_COMMAND = (
    "import sys; sys.path[:] = {path!r}; "
    "from rlframe.envs.worker import Descriptors, main; main(Descriptors(*{descriptors!r}))"
)


class WorkerProcesses(abc.ABC):
    """A pool of worker processes, and the memory that it shares with them. A subclass steps the environments.

    Args:
      builder: a `names.Builder`; what it refers to must be picklable, by value if need be.
      slices: (start, stop) of each worker's environments.
      answer_timeout: seconds after which one that says nothing counts as hung, but at its start.
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
            self._start(_pickle(builder), is_sync, descriptor)
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
            self._tell(worker, pickle.dumps(job))
        answers = [self._answer(worker, ANSWER_TIMEOUT) for worker in range(len(self._slices))]
        self.codec: Codec = answers[0]
        for (start, _), codec in zip(self._slices, answers, strict=True):
            if codec != self.codec:
                raise different_specs_error(0, self.codec, start, codec)
        memory = self._memory = PoolMemory(descriptor, len(self._slices), self.num_envs, self.codec)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _shut_down, self.processes, self._connections, descriptor, memory)

    def _tell(self, worker: int, message: bytes) -> None:
        try:
            self._connections[worker].send_bytes(message)
        except OSError:
            raise self._death(worker) from None

    def _answer(self, worker: int, timeout: float) -> Any:
        """The worker's next message. Raises what it raised, or EnvError where it died or says nothing."""
        clock = SuspendAwareClock()
        deadline = clock() + timeout
        connection = self._connections[worker]
        try:
            while not connection.poll(POLL_INTERVAL):
                if self.processes[worker].poll() is not None and not connection.poll(0):
                    raise self._death(worker)
                if clock.tick() > deadline:
                    raise timeout_error([self._slices[worker]], timeout)
            message = connection.recv()
        except (EOFError, OSError):
            raise self._death(worker) from None
        if message[0] == "ok":
            return message[1]
        kind, sentence, text = message
        raise UsageError(sentence) if kind == "usage" else env_error(sentence, text)

    def _look(self) -> None:
        """Raise what a worker raised, or that one died or hangs, and close the pool; called while waiting."""
        try:
            for worker, (header, process) in enumerate(zip(self._memory.headers, self.processes, strict=True)):
                if header[FAILED]:
                    self._answer(worker, self._answer_timeout)
                if process.poll() is not None:
                    raise self._death(worker)
            self._watch.look(self._stepped())
        except BaseException:
            self.close()
            raise

    @abc.abstractmethod
    def _stepped(self) -> dict[int, tuple[int, Any]]:
        """Return the environment that each busy worker steps, for `StepWatch.look`."""

    def _death(self, worker: int) -> EnvError:
        process = self.processes[worker]
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        how = f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return EnvError(f"The worker process {worker} (pid {process.pid}) of {span([self._slices[worker]])} {how}.")

    def sums(self) -> Sums:
        """What the environments logged; see `SyncEnv.sums`."""
        return add_sums(log.sums() for log in self._memory.logs)

    @property
    def is_closed(self) -> bool:
        """Whether the workers have ended: `close` was called, or a step failed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Ends every worker: those that do not end by themselves in time are killed."""
        self._finalizer()


def _spawn(descriptors: Descriptors) -> subprocess.Popen[bytes]:
    code = _COMMAND.format(path=import_path(), descriptors=tuple(descriptors))
    # Numerical libraries in an environment would otherwise start a thread per core in every worker.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
    # A session of its own: Ctrl-C at the terminal reaches the pool only, which then closes its workers.
    return start_process(
        [sys.executable, "-c", code],
        pass_fds=descriptors,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _pickle(builder: Any) -> bytes:
    try:
        return snapshot.dumps(builder, builder.code)
    except Exception as error:
        raise UsageError(
            f"The environment builder cannot be sent to a worker process: {type(error).__name__}: {error}. "
            "Make a builder that opens what it needs itself, or use type 'thread'."
        ) from error


def _shut_down(
    processes: list[subprocess.Popen[bytes]],
    connections: list[Connection],
    descriptor: int,
    memory: PoolMemory | None,
) -> None:
    """Ends the workers and closes every descriptor. Runs once, also when the pool is collected or the program ends."""
    if memory is not None:
        for header, go in zip(memory.headers, memory.go, strict=True):
            header[COMMAND] = CLOSE
            header[NUM_COMMANDS] += 1
            go.wake()
    deadline = time.monotonic() + _CLOSE_TIMEOUT
    for connection, process in zip(connections, processes, strict=True):
        if memory is None:
            process.kill()  # it is still being built
        try:
            process.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        connection.close()
    os.close(descriptor)
