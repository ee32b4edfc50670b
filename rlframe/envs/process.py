"""`type='process'`: Python worker processes that share memory with the pool.

A step does not pickle or copy data. The pool writes the actions, wakes its workers, sleeps, and returns views of the
memory to which the workers wrote. Each worker is a new interpreter, because a fork is unsafe if JAX has threads.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np

from rlframe.envs.group import POLL_INTERVAL, EnvState, concatenate_states, interrupted_error
from rlframe.envs.layout import BatchBuffer
from rlframe.envs.worker import (
    BUFFER,
    CALL,
    COMMAND,
    CURRENT_ENV,
    FAILED,
    NUM_BUFFERS,
    NUM_COMMANDS,
    NUM_DONE,
    NUM_REQUESTED,
    RESET,
    STEP,
    WAKE_AT,
)
from rlframe.envs.worker_processes import WorkerProcesses
from rlframe.types import TimeStep

_ASYNC_POLL_INTERVAL = 0.05  # seconds between two checks in `AsyncProcesses._wait`, which can miss a wake-up
_NEVER_WAKE = 2**62  # value of WAKE_AT that the number of results never reaches


class ProcessPool(WorkerProcesses):
    """A synchronous pool of worker processes, which steps all environments together."""

    def __init__(self, builder: Any, slices: list[tuple[int, int]], answer_timeout: float):
        super().__init__(builder, slices, answer_timeout, is_sync=True)
        for buffer in self._memory.buffers:
            buffer.mark_idle()
        self._next = 0
        self._num_commands = 0  # number of commands sent so far
        self._is_waiting = False

    def reset(self) -> TimeStep:
        return self._run(RESET)

    def step(self, actions: np.ndarray) -> TimeStep:
        self._memory.actions[...] = actions
        return self._run(STEP)

    def get_state(self) -> list[EnvState] | None:
        return concatenate_states(self._call("get_state", [()] * len(self._slices)))

    def set_state(self, states: list[EnvState]) -> None:
        self._call("set_state", [(states[start:stop],) for start, stop in self._slices])

    def progress(self) -> Any:
        return [header[CURRENT_ENV] for header in self._memory.headers]

    def _run(self, command: int) -> TimeStep:
        buffer = self._take()
        self._command(command)
        self._wait()
        return (buffer if self._next else buffer.copy()).timestep()

    def _take(self) -> BatchBuffer:
        """Return a buffer that the caller does not use. If there is none, return buffer 0, which `_run` then copies."""
        for i in range(1, NUM_BUFFERS):
            self._next = i
            if self._memory.buffers[i].is_idle():
                return self._memory.buffers[i]
        self._next = 0
        return self._memory.buffers[0]

    def _call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        messages = [pickle.dumps((method, argument)) for argument in arguments]
        self._command(CALL)  # first, because workers read their connections only then, and these hold about 200 kB
        for worker, message in enumerate(messages):
            self._send(worker, message)
        results = [self._receive(worker, self._answer_timeout) for worker in range(len(arguments))]
        self._wait()
        return results

    def _command(self, command: int) -> None:
        if self._is_waiting:
            raise interrupted_error()
        self._is_waiting = True
        self._num_commands += 1
        self._watch.begin()
        for header, go in zip(self._memory.headers, self._memory.go, strict=True):
            header[COMMAND] = command
            header[BUFFER] = self._next
            header[NUM_COMMANDS] = self._num_commands
            go.wake()

    def _wait(self) -> None:
        """Sleep until every worker has executed the command. Raise if a worker raises, dies or hangs."""
        headers, done, num_commands = self._memory.headers, self._memory.done, self._num_commands
        while True:
            value = done.value
            waiting = [header for header in headers if header[NUM_DONE] != num_commands]
            if not waiting:
                break
            if any(header[FAILED] for header in waiting) or not done.wait(value, POLL_INTERVAL):
                self._check_workers()
        self._is_waiting = False

    def _current_steps(self) -> dict[int, tuple[int, Any]]:
        workers = enumerate(zip(self._memory.headers, self._slices, strict=True))
        return {
            i: (start + header[CURRENT_ENV], None)
            for i, (header, (start, _)) in workers
            if header[NUM_DONE] != self._num_commands
        }


class AsyncProcesses(WorkerProcesses):
    """An asynchronous pool of worker processes. A worker steps its environments in the order of `send`."""

    def __init__(self, builder: Any, slices: list[tuple[int, int]], wait_num: int, answer_timeout: float):
        super().__init__(builder, slices, answer_timeout, is_sync=False)
        self._wait_num = wait_num
        self._worker_of = np.repeat(np.arange(len(slices)), [stop - start for start, stop in slices])
        self._requested = [0] * len(slices)
        self._taken = [0] * len(slices)
        self._ready: list[int] = []  # ids of environments whose step has finished, but was not returned by `recv`
        self._memory.headers[0][WAKE_AT] = _NEVER_WAKE
        self._next_check = 0.0

    def start(self) -> None:
        self.send(np.arange(self.num_envs), np.zeros_like(self._memory.actions))

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        if self.is_closed:
            raise interrupted_error()
        self._memory.actions[env_ids] = actions
        workers = self._worker_of[env_ids]
        for worker, go in enumerate(self._memory.go):
            ids = env_ids[workers == worker]
            if len(ids):
                places = np.arange(self._requested[worker], self._requested[worker] + len(ids)) % self.num_envs
                self._memory.requests[worker, places] = ids
                self._requested[worker] += len(ids)
                self._memory.headers[worker][NUM_REQUESTED] = self._requested[worker]
                go.wake()

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        if self.is_closed:
            raise interrupted_error()
        self._collect()
        now = time.monotonic()
        # Check here too, because `_wait` does not run while other workers are fast. It would not find a dead worker.
        if now > self._next_check or any(header[FAILED] for header in self._memory.headers):
            self._next_check = now + POLL_INTERVAL
            self._check_workers()
        missing = self._wait_num - len(self._ready)
        if missing > 0:
            self._memory.headers[0][WAKE_AT] = sum(self._taken) + missing
            self._wait()
            self._memory.headers[0][WAKE_AT] = _NEVER_WAKE
        env_ids = np.array(self._ready[: self._wait_num], np.int32)
        del self._ready[: self._wait_num]
        return env_ids, self._memory.buffers[0].select(env_ids).timestep()

    def progress(self) -> Any:
        return [header[NUM_DONE] for header in self._memory.headers]

    def _collect(self) -> None:
        for worker, header in enumerate(self._memory.headers):
            done = header[NUM_DONE]
            while self._taken[worker] < done:
                self._ready.append(int(self._memory.results[worker, self._taken[worker] % self.num_envs]))
                self._taken[worker] += 1

    def _wait(self) -> None:
        """Sleep until enough environments are ready. Raise if a worker raises, dies or hangs."""
        done = self._memory.done
        while True:
            value = done.value
            self._collect()
            if len(self._ready) >= self._wait_num:
                return
            # Sleep only a short time, because a wake-up is missed if WAKE_AT and NUM_DONE change at the same time.
            woken = done.wait(value, _ASYNC_POLL_INTERVAL)
            if not woken or any(header[FAILED] for header in self._memory.headers):
                self._check_workers()

    def _current_steps(self) -> dict[int, tuple[int, Any]]:
        steps = {}
        for worker, (header, requested) in enumerate(zip(self._memory.headers, self._requested, strict=True)):
            done = header[NUM_DONE]
            if done < requested:
                steps[worker] = int(self._memory.requests[worker, done % self.num_envs]), done
        return steps
