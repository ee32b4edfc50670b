"""`type='process'`: Python workers that share memory with the pool.

A step costs no pickling and no copy: the pool writes the actions, wakes its workers, sleeps, and returns views of
the memory into which they wrote. Workers are new interpreters, never forks of a process in which JAX's threads run.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np

from rlframe.envs.group import POLL_INTERVAL, EnvState, concatenate_states, interrupted
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

_ASYNC_POLL_INTERVAL = 0.05  # seconds; see AsyncProcesses._wait
_NEVER_WAKE = 2**62  # more results than there will ever be


class ProcessPool(WorkerProcesses):
    """Steps all environments together."""

    def __init__(self, builder: Any, slices: list[tuple[int, int]], answer_timeout: float):
        super().__init__(builder, slices, answer_timeout, is_sync=True)
        for frame in self._memory.frames:
            frame.mark_idle()
        self._next = 0
        self._given = 0  # commands so far
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
        frame = self._take()
        self._command(command)
        self._wait()
        return (frame if self._next else frame.copy()).timestep()

    def _take(self) -> BatchBuffer:
        """A frame that the caller does not hold; frame 0, of which it only ever gets copies, if it holds them all."""
        for i in range(1, NUM_BUFFERS):
            self._next = i
            if self._memory.frames[i].is_idle():
                return self._memory.frames[i]
        self._next = 0
        return self._memory.frames[0]

    def _call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        for worker, argument in enumerate(arguments):
            self._tell(worker, pickle.dumps((method, argument)))
        self._command(CALL)
        results = [self._answer(worker, self._answer_timeout) for worker in range(len(arguments))]
        self._wait()
        return results

    def _command(self, command: int) -> None:
        if self._is_waiting:
            raise interrupted()
        self._is_waiting = True
        self._given += 1
        self._watch.begin()
        for header, go in zip(self._memory.headers, self._memory.go, strict=True):
            header[COMMAND] = command
            header[BUFFER] = self._next
            header[NUM_COMMANDS] = self._given
            go.wake()

    def _wait(self) -> None:
        """Sleeps until every worker has done the command. Raises what a worker raised, or that it died or hangs."""
        headers, done, given = self._memory.headers, self._memory.done, self._given
        while True:
            value = done.value
            waiting = [header for header in headers if header[NUM_DONE] != given]
            if not waiting:
                break
            if any(header[FAILED] for header in waiting) or not done.wait(value, POLL_INTERVAL):
                self._look()
        self._is_waiting = False

    def _stepped(self) -> dict[int, tuple[int, Any]]:
        workers = enumerate(zip(self._memory.headers, self._slices, strict=True))
        return {
            i: (start + header[CURRENT_ENV], None)
            for i, (header, (start, _)) in workers
            if header[NUM_DONE] != self._given
        }


class AsyncProcesses(WorkerProcesses):
    """Steps whichever environment was sent to first; results come back in order of completion."""

    def __init__(self, builder: Any, slices: list[tuple[int, int]], wait_num: int, answer_timeout: float):
        super().__init__(builder, slices, answer_timeout, is_sync=False)
        self._wait_num = wait_num
        self._worker_of = np.repeat(np.arange(len(slices)), [stop - start for start, stop in slices])
        self._requested = [0] * len(slices)
        self._taken = [0] * len(slices)
        self._ready: list[int] = []  # finished, in order, but not yet received
        self._memory.headers[0][WAKE_AT] = _NEVER_WAKE
        self._next_look = 0.0

    def start(self) -> None:
        self.send(np.arange(self.num_envs), np.zeros_like(self._memory.actions))

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        if self.is_closed:
            raise interrupted()
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
            raise interrupted()
        self._collect()
        now = time.monotonic()
        # The others may be quick enough that we never wait for a worker that failed or died.
        if now > self._next_look or any(header[FAILED] for header in self._memory.headers):
            self._next_look = now + POLL_INTERVAL
            self._look()
        missing = self._wait_num - len(self._ready)
        if missing > 0:
            self._memory.headers[0][WAKE_AT] = sum(self._taken) + missing
            self._wait()
            self._memory.headers[0][WAKE_AT] = _NEVER_WAKE
        env_ids = np.array(self._ready[: self._wait_num], np.int32)
        del self._ready[: self._wait_num]
        return env_ids, self._memory.frames[0].select(env_ids).timestep()

    def progress(self) -> Any:
        return [header[NUM_DONE] for header in self._memory.headers]

    def _collect(self) -> None:
        for worker, header in enumerate(self._memory.headers):
            done = header[NUM_DONE]
            while self._taken[worker] < done:
                self._ready.append(int(self._memory.results[worker, self._taken[worker] % self.num_envs]))
                self._taken[worker] += 1

    def _wait(self) -> None:
        """Sleeps until enough environments are ready. Raises what a worker raised, or that it died or hangs."""
        done = self._memory.done
        while True:
            value = done.value
            self._collect()
            if len(self._ready) >= self._wait_num:
                return
            # A wake-up may be missed where WANTED and DONE change together, so the sleep is short.
            woken = done.wait(value, _ASYNC_POLL_INTERVAL)
            if not woken or any(header[FAILED] for header in self._memory.headers):
                self._look()

    def _stepped(self) -> dict[int, tuple[int, Any]]:
        stepped = {}
        for worker, (header, requested) in enumerate(zip(self._memory.headers, self._requested, strict=True)):
            done = header[NUM_DONE]
            if done < requested:
                stepped[worker] = int(self._memory.requests[worker, done % self.num_envs]), done
        return stepped
