"""The processes of a process pool: starting them, talking to them, noticing that one died, ending them."""

from __future__ import annotations

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
from rlframe.envs.group import ANSWER_TIMEOUT, LOOK, different_specs, env_error, silence, span
from rlframe.envs.worker import CLOSE, COMMAND, FAILED, GO, Descriptors, PoolMemory, WorkerJob
from rlframe.errors import EnvError, UsageError
from rlframe.interprocess.heartbeat import Clock
from rlframe.interprocess.memory import SUPPORTED, anonymous_file
from rlframe.interprocess.processes import start_process
from rlframe.metrics.rows import Sums, add_up
from rlframe.user_directories import import_path

_CLOSE_TIMEOUT = 5.0  # seconds for the environments' own close(); then the worker is killed

_COMMAND = (
    "import sys; sys.path[:] = {path!r}; "
    "from rlframe.envs.worker import Descriptors, main; main(Descriptors(*{descriptors!r}))"
)


class WorkerProcesses:
    """The processes of a pool, and the memory shared with them.

    Args:
      builder: a `names.Builder`; what it refers to must be picklable, by value if need be.
      slices: (start, stop) of each worker's environments.
      answer_timeout: seconds after which one that says nothing counts as hung, but at its start.
    """

    def __init__(self, builder: Any, slices: list[tuple[int, int]], answer_timeout: float, is_sync: bool):
        self.slices = slices
        self.answer_timeout = answer_timeout
        self.num_envs = slices[-1][1]
        if not SUPPORTED:
            raise UsageError("Pools of type 'process' need Linux on x86-64 or 64-bit ARM. Use type 'thread' instead.")
        self._memory = anonymous_file("rlframe-envs")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self._finalizer = weakref.finalize(self, _shut_down, self.processes, self.connections, self._memory, None)
        try:
            self._start(_pickle(builder), is_sync)
        except BaseException:
            self.close()
            raise

    def _start(self, builder: bytes, is_sync: bool) -> None:
        for worker, (start, stop) in enumerate(self.slices):
            ours, theirs = Pipe()
            self.connections.append(ours)
            descriptors = Descriptors(theirs.fileno(), self._memory)
            self.processes.append(_spawn(descriptors))
            theirs.close()
            job = WorkerJob(builder, start, stop, worker, len(self.slices), self.num_envs, is_sync)
            self.tell(worker, pickle.dumps(job))
        answers = [self.answer(worker, ANSWER_TIMEOUT) for worker in range(len(self.slices))]
        self.codec: Codec = answers[0]
        for (start, _), codec in zip(self.slices, answers, strict=True):
            if codec != self.codec:
                raise different_specs(0, self.codec, start, codec)
        self.block = PoolMemory(self._memory, len(self.slices), self.num_envs, self.codec)
        self.headers = self.block.headers
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _shut_down, self.processes, self.connections, self._memory, self.block)

    def tell(self, worker: int, message: bytes) -> None:
        try:
            self.connections[worker].send_bytes(message)
        except OSError:
            raise self.death(worker) from None

    def answer(self, worker: int, timeout: float) -> Any:
        """The worker's next message. Raises what it raised, or EnvError where it died or says nothing."""
        clock = Clock()
        deadline = clock() + timeout
        connection = self.connections[worker]
        try:
            while not connection.poll(LOOK):
                if self.processes[worker].poll() is not None and not connection.poll(0):
                    raise self.death(worker)
                if clock.tick() > deadline:
                    raise silence([self.slices[worker]], timeout)
            message = connection.recv()
        except (EOFError, OSError):
            raise self.death(worker) from None
        if message[0] == "ok":
            return message[1]
        kind, sentence, text = message
        raise UsageError(sentence) if kind == "usage" else env_error(sentence, text)

    def check(self) -> None:
        """Raises what a worker raised, or that one died; called while waiting."""
        for worker, (header, process) in enumerate(zip(self.headers, self.processes, strict=True)):
            if header[FAILED]:
                self.answer(worker, self.answer_timeout)
            if process.poll() is not None:
                raise self.death(worker)

    def death(self, worker: int) -> EnvError:
        process = self.processes[worker]
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        how = f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return EnvError(f"The worker process {worker} (pid {process.pid}) of {span([self.slices[worker]])} {how}.")

    def sums(self) -> Sums:
        """What the environments logged; see `SyncEnv.sums`."""
        return add_up(log.sums() for log in self.block.logs)

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
    memory: int,
    block: PoolMemory | None,
) -> None:
    """Ends the workers and closes every descriptor. Runs once, also when the pool is collected or the program ends."""
    if block is not None:
        for header, go in zip(block.headers, block.go, strict=True):
            header[COMMAND] = CLOSE
            header[GO] += 1
            go.wake()
    deadline = time.monotonic() + _CLOSE_TIMEOUT
    for connection, process in zip(connections, processes, strict=True):
        if block is None:
            process.kill()  # it is still being built
        try:
            process.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        connection.close()
    os.close(memory)
