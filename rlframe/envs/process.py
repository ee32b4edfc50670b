"""`type='process'`: Python workers that share memory with the pool.

A step costs no pickling and no copy: the pool writes the actions, wakes its workers, sleeps, and returns views of
the memory into which they wrote. Workers are new interpreters, never forks of a process in which JAX's threads run.
"""

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

import numpy as np

from rlframe.envs import shared, snapshot
from rlframe.envs.frames import Frame
from rlframe.envs.group import EnvState, different_specs, env_error
from rlframe.envs.spaces import Layout
from rlframe.envs.thread import ANSWER_TIMEOUT
from rlframe.envs.worker import Descriptors, Job
from rlframe.errors import EnvError, UsageError
from rlframe.types import TimeStep

_CLOSE_TIMEOUT = 5.0  # seconds for the environments' own close(); then the worker is killed
_LOOK = 0.5  # seconds between looks at whether the workers that we wait for are alive
_ASYNC_LOOK = 0.05
_NOBODY_WAITS = 2**62  # more results than there will ever be

_COMMAND = "import sys; sys.path[:] = {path!r}; from rlframe.envs.worker import Descriptors, main; main(Descriptors(*{descriptors!r}))"


class Workers:
    """The processes of a pool, and the memory shared with them.

    Args:
      builder: a `names.Builder`; what it refers to must be picklable, by value if need be.
      slices: (start, stop) of each worker's environments.
    """

    def __init__(self, builder: Any, slices: list[tuple[int, int]], is_sync: bool):
        self.slices = slices
        self.num_envs = slices[-1][1]
        self._memory = shared.anonymous_file()
        self.done = shared.Semaphore()
        self.go = [shared.Semaphore() for _ in slices]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self._finalizer = weakref.finalize(
            self, _shut_down, self.processes, self.connections, [self.done, *self.go], self._memory, None
        )
        try:
            self._start(_pickle(builder), is_sync)
        except BaseException:
            self.close()
            raise

    def _start(self, builder: bytes, is_sync: bool) -> None:
        for worker, (start, stop) in enumerate(self.slices):
            ours, theirs = Pipe()
            self.connections.append(ours)
            descriptors = Descriptors(
                theirs.fileno(), self._memory, self.go[worker].descriptors, self.done.descriptors
            )
            self.processes.append(_spawn(descriptors))
            theirs.close()
            job = Job(builder, start, stop, worker, len(self.slices), self.num_envs, is_sync)
            self.tell(worker, pickle.dumps(job))
        answers = [self.answer(worker) for worker in range(len(self.slices))]
        for (start, _), specs_came in zip(self.slices, answers):
            if specs_came != answers[0]:
                raise different_specs(0, answers[0], start, specs_came)
        self.observation_spec, self.action_spec = answers[0]
        layout = Layout(self.observation_spec)
        self.block = shared.Block(self._memory, len(self.slices), self.num_envs, layout, self.action_spec)
        self.headers = self.block.headers
        for worker in range(len(self.slices)):
            self.tell(worker, b"")
        self._finalizer.detach()
        self._finalizer = weakref.finalize(
            self, _shut_down, self.processes, self.connections, [self.done, *self.go], self._memory, self.headers
        )

    def tell(self, worker: int, message: bytes) -> None:
        try:
            self.connections[worker].send_bytes(message)
        except OSError:
            raise self.death(worker) from None

    def answer(self, worker: int) -> Any:
        """The worker's next message. Raises what it raised, or EnvError where it died or says nothing."""
        deadline = time.monotonic() + ANSWER_TIMEOUT
        connection = self.connections[worker]
        try:
            while not connection.poll(_LOOK):
                if self.processes[worker].poll() is not None and not connection.poll(0):
                    raise self.death(worker)
                if time.monotonic() > deadline:
                    raise self.silence([worker])
            message = connection.recv()
        except (EOFError, OSError):
            raise self.death(worker) from None
        if message[0] == "ok":
            return message[1]
        kind, sentence, text = message
        raise UsageError(sentence) if kind == "usage" else env_error(sentence, text)

    def check(self) -> None:
        """Raises what a worker raised, or that one died; called while waiting."""
        for worker, (header, process) in enumerate(zip(self.headers, self.processes)):
            if header[shared.FAILED]:
                self.answer(worker)
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
        return EnvError(
            f"The worker process {worker} (pid {process.pid}) of {self._span([worker])} {how}."
        )

    def silence(self, workers: list[int]) -> EnvError:
        return EnvError(f"No answer from {self._span(workers)} within {ANSWER_TIMEOUT:.0f} s: it hangs.")

    def _span(self, workers: list[int]) -> str:
        spans = [f"{start} to {stop - 1}" if stop - start > 1 else str(start) for start, stop in
                 (self.slices[worker] for worker in workers)]
        return f"environments {', '.join(spans)}"

    def close(self) -> None:
        """Ends every worker: those that do not end by themselves in time are killed."""
        self._finalizer()


class ProcessPool:
    """A synchronous pool over `Workers`."""

    def __init__(self, builder: Any, slices: list[tuple[int, int]]):
        self._workers = Workers(builder, slices, is_sync=True)
        self.num_envs = self._workers.num_envs
        self.observation_spec, self.action_spec = self._workers.observation_spec, self._workers.action_spec
        self._actions = self._workers.block.actions
        self._frames = self._workers.block.frames
        for frame in self._frames:
            frame.mark_idle()
        self._next = 0
        self._given = 0  # commands so far

    def reset(self) -> TimeStep:
        return self._run(shared.RESET)

    def step(self, actions: np.ndarray) -> TimeStep:
        self._actions[...] = actions
        return self._run(shared.STEP)

    def get_state(self) -> list[EnvState] | None:
        parts = self._call("get_state", [()] * len(self._workers.slices))
        return None if any(part is None for part in parts) else [state for part in parts for state in part]

    def set_state(self, states: list[EnvState]) -> None:
        self._call("set_state", [(states[start:stop],) for start, stop in self._workers.slices])

    def close(self) -> None:
        self._workers.close()

    def _run(self, command: int) -> TimeStep:
        frame = self._take()
        self._command(command)
        self._wait()
        return (frame if self._next else frame.copy()).timestep()

    def _take(self) -> Frame:
        """A frame that the caller does not hold; frame 0, of which it only ever gets copies, if it holds them all."""
        for i in range(1, shared.NUM_FRAMES):
            self._next = i
            if self._frames[i].is_idle():
                return self._frames[i]
        self._next = 0
        return self._frames[0]

    def _call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        for worker, argument in enumerate(arguments):
            self._workers.tell(worker, pickle.dumps((method, argument)))
        self._command(shared.CALL)
        results = [self._workers.answer(worker) for worker in range(len(arguments))]
        self._wait()
        return results

    def _command(self, command: int) -> None:
        self._given += 1
        self._deadline = time.monotonic() + ANSWER_TIMEOUT
        for header, go in zip(self._workers.headers, self._workers.go):
            header[shared.COMMAND] = command
            header[shared.FRAME] = self._next
            header[shared.GO] = self._given
            go.post()

    def _wait(self) -> None:
        """Sleeps until every worker has done the command. Raises what a worker raised, or that it died or hangs."""
        workers, given = self._workers, self._given
        permits = len(workers.headers)  # one from each
        while permits > 0:
            taken = workers.done.wait(_LOOK)
            permits -= taken
            if not taken:
                self._look()
        for header in workers.headers:
            if header[shared.DONE] != given:
                self._look()

    def _look(self) -> None:
        try:
            self._workers.check()
            if time.monotonic() > self._deadline:
                late = [i for i, header in enumerate(self._workers.headers) if header[shared.DONE] != self._given]
                raise self._workers.silence(late)
        except BaseException:
            self.close()
            raise


class AsyncProcesses:
    """Workers that step whichever of their environments was sent to first."""

    def __init__(self, builder: Any, slices: list[tuple[int, int]], wait_num: int):
        self._workers = Workers(builder, slices, is_sync=False)
        self.num_envs = self._workers.num_envs
        self.observation_spec, self.action_spec = self._workers.observation_spec, self._workers.action_spec
        self._wait_num = wait_num
        self._actions = self._workers.block.actions
        self._requests, self._results = self._workers.block.requests, self._workers.block.results
        self._latest = self._workers.block.frames[0]
        self._worker_of = np.repeat(np.arange(len(slices)), [stop - start for start, stop in slices])
        self._requested = [0] * len(slices)
        self._taken = [0] * len(slices)
        self._ready: list[int] = []  # finished, in order, but not yet received
        self._workers.headers[0][shared.WANTED] = _NOBODY_WAITS

    def start(self) -> None:
        self.send(np.arange(self.num_envs), np.zeros(self._actions.shape, self._actions.dtype))

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        self._actions[env_ids] = actions
        workers = self._worker_of[env_ids]
        for worker, go in enumerate(self._workers.go):
            ids = env_ids[workers == worker]
            if len(ids):
                places = np.arange(self._requested[worker], self._requested[worker] + len(ids)) % self.num_envs
                self._requests[worker, places] = ids
                self._requested[worker] += len(ids)
                self._workers.headers[worker][shared.REQUESTED] = self._requested[worker]
                go.post()

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        self._collect()
        missing = self._wait_num - len(self._ready)
        if missing > 0:
            self._workers.headers[0][shared.WANTED] = sum(self._taken) + missing
            self._wait()
            self._workers.headers[0][shared.WANTED] = _NOBODY_WAITS
        env_ids = np.array(self._ready[: self._wait_num], np.int32)
        del self._ready[: self._wait_num]
        return env_ids, self._latest.select(env_ids).timestep()

    def close(self) -> None:
        self._workers.close()

    def _collect(self) -> None:
        for worker, header in enumerate(self._workers.headers):
            done = header[shared.DONE]
            while self._taken[worker] < done:
                self._ready.append(int(self._results[worker, self._taken[worker] % self.num_envs]))
                self._taken[worker] += 1

    def _wait(self) -> None:
        """Sleeps until enough environments are ready. Raises what a worker raised, or that it died or hangs."""
        deadline = time.monotonic() + ANSWER_TIMEOUT
        self._collect()
        while len(self._ready) < self._wait_num:
            # A wake-up may be missed where WANTED and DONE change together, so the sleep is short.
            woken = self._workers.done.wait(_ASYNC_LOOK)
            if not woken or any(header[shared.FAILED] for header in self._workers.headers):
                self._look(deadline)
            self._collect()

    def _look(self, deadline: float) -> None:
        try:
            self._workers.check()
            if time.monotonic() > deadline:
                raise self._workers.silence(list(range(len(self._workers.slices))))
        except BaseException:
            self.close()
            raise


def _spawn(descriptors: Descriptors) -> subprocess.Popen[bytes]:
    code = _COMMAND.format(path=[path or os.getcwd() for path in sys.path], descriptors=tuple(descriptors))
    inherited = {descriptors.connection, descriptors.memory, *descriptors.go, *descriptors.done}
    # Numerical libraries in an environment would otherwise start a thread per core in every worker.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
    # A session of its own: Ctrl-C at the terminal reaches the pool only, which then closes its workers.
    return subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=sorted(inherited), env=env, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _pickle(builder: Any) -> bytes:
    try:
        return snapshot.dumps(builder, builder.target)
    except Exception as error:
        raise UsageError(
            f"The environment builder cannot be sent to a worker process: {type(error).__name__}: {error}. "
            "Make a builder that opens what it needs itself, or use type 'thread'."
        ) from error


def _shut_down(processes: list[subprocess.Popen[bytes]], connections: list[Connection],
               semaphores: list[shared.Semaphore], memory: int, headers: Any) -> None:
    """Ends the workers and closes every descriptor. Runs once, also when the pool is collected or the program ends."""
    if headers is not None:
        for header, go in zip(headers, semaphores[1:]):
            header[shared.COMMAND] = shared.CLOSE
            header[shared.GO] += 1
            go.post()
    deadline = time.monotonic() + _CLOSE_TIMEOUT
    for connection, process in zip(connections, processes):
        if headers is None:
            process.kill()  # it is still being built
        try:
            process.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        connection.close()
    for semaphore in semaphores:
        semaphore.close()
    os.close(memory)
