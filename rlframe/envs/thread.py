"""`type='thread'`: each thread steps some of the environments. Use this type if environments release the GIL.

Threads do not refer to their pool. So an unused pool is garbage-collected, and this ends its threads as `close` does.
The threads also close the environments, because no other thread may close an environment during a step.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from rlframe.envs.group import POLL_INTERVAL, EnvGroup, GroupPool, StepWatch, interrupted_error
from rlframe.envs.layout import BatchBuffer, new_buffer
from rlframe.interprocess.waiting import Inbox
from rlframe.metrics.rows import Sums
from rlframe.types import TimeStep

_CLOSE_TIMEOUT = 5.0  # seconds to wait for threads; a hung thread cannot be killed and continues to exist


class WorkerThreads:
    """Threads that run until `end`, or until this object is garbage-collected.

    Args:
      functions: one function for each thread. It must not refer to the pool, and must return when it gets the job None.
      queues: for each thread, the queue of its jobs.
    """

    def __init__(self, functions: Sequence[Callable[[], None]], queues: list[SimpleQueue[Any]]):
        self._threads = [
            threading.Thread(target=function, name=f"rlframe env worker {i}", daemon=True)
            for i, function in enumerate(functions)
        ]
        self._finalizer = weakref.finalize(self, _end_threads, queues)
        self._finalizer.atexit = False  # not necessary at exit, because the threads are daemon threads
        for thread in self._threads:
            thread.start()

    def end(self, timeout: float) -> None:
        """End each thread after its last job. Wait at most `timeout` seconds in total."""
        self._finalizer()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _end_threads(queues: list[SimpleQueue[Any]]) -> None:
    for queue in queues:
        queue.put(None)


class ThreadPool(GroupPool):
    """A synchronous pool with one thread for each group of environments."""

    def __init__(self, groups: list[EnvGroup], answer_timeout: float):
        super().__init__(groups)
        self._jobs: list[SimpleQueue[Any]] = [SimpleQueue() for _ in groups]
        self._done: Inbox[tuple[int, BaseException | None]] = Inbox()
        self._is_waiting = False
        self._watch = StepWatch(answer_timeout)
        functions = [
            functools.partial(_serve, group, i, jobs, self._done)
            for i, (group, jobs) in enumerate(zip(groups, self._jobs, strict=True))
        ]
        self._threads = WorkerThreads(functions, self._jobs)

    def close(self) -> None:
        """End the threads. If a step was interrupted, do not wait for its end."""
        self._threads.end(0.0 if self._is_waiting else _CLOSE_TIMEOUT)

    def _run(self, actions: np.ndarray | None) -> TimeStep:
        if self._is_waiting:
            raise interrupted_error()
        self._is_waiting = True
        buffer = self._ring.take()
        for jobs, (start, stop) in zip(self._jobs, self._slices, strict=True):
            jobs.put((None if actions is None else actions[start:stop], buffer.rows(start, stop)))
        answers: dict[int, BaseException | None] = {}
        self._watch.begin()
        while len(answers) < len(self._jobs):
            try:
                worker, answers[worker] = self._done.get(POLL_INTERVAL)
            except Empty:
                busy = [worker for worker in range(len(self._jobs)) if worker not in answers]
                self._watch.check({i: (self._groups[i].first_id + self._groups[i].current[0], None) for i in busy})
        self._is_waiting = False
        for worker in range(len(answers)):
            error = answers[worker]
            if error is not None:
                raise error
        return buffer.timestep()


class AsyncThreads:
    """An asynchronous pool of threads, which step the environments in the order of `send`."""

    def __init__(self, group: EnvGroup, wait_num: int, num_workers: int, answer_timeout: float):
        self.num_envs = len(group.envs)
        self.codec = group.codec
        self._wait_num, self._watch = wait_num, StepWatch(answer_timeout)
        self._log = group.log
        # The latest timestep of each environment. A row is written again only after `recv` has returned it.
        self._latest = new_buffer(group.layout, self.num_envs)
        rows = self._latest.rows(0, self.num_envs)
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._done: Inbox[Any] = Inbox()
        self._ready: list[int] = []  # ids of environments whose step has finished, but was not returned by `recv`
        # For each thread: None, or (id of the environment that is stepping, number of the thread's earlier steps).
        self._steps: list[tuple[int, int] | None] = [None] * num_workers
        self._next_check = 0.0
        self._is_waiting = False
        self._has_failed = False  # whether an environment raised; then the pool is unusable
        self._is_ending = threading.Event()
        running = list(range(num_workers))
        functions = [
            functools.partial(_serve_any, group, i, rows, self._jobs, self._done, self._steps, self._is_ending, running)
            for i in range(num_workers)
        ]
        self._threads = WorkerThreads(functions, [self._jobs] * num_workers)

    def start(self) -> None:
        spec = self.codec.action_spec
        self.send(np.arange(self.num_envs), np.zeros((self.num_envs, *spec.shape), spec.dtype))

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        if self._has_failed:
            raise interrupted_error()
        for env_id, action in zip(env_ids.tolist(), np.array(actions), strict=True):
            self._jobs.put((env_id, action))

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        if self._has_failed:
            raise interrupted_error()
        self._is_waiting = True
        while len(self._ready) < self._wait_num:
            if self._is_ending.is_set():  # another thread has called `close`
                raise interrupted_error()
            # Check even if the queue is not empty, because one environment can hang while others are fast.
            if time.monotonic() > self._next_check:
                self._check_workers()
            with contextlib.suppress(Empty):
                answer = self._done.get(POLL_INTERVAL)
                if isinstance(answer, BaseException):
                    self._is_waiting, self._has_failed = False, True
                    raise answer
                self._ready.append(answer)
        self._is_waiting = False
        env_ids = np.array(self._ready[: self._wait_num], np.int32)
        del self._ready[: self._wait_num]
        return env_ids, self._latest.select(env_ids).timestep()

    def sums(self) -> Sums:
        return self._log.sums()

    def progress(self) -> Any:
        return list(self._steps)

    def close(self) -> None:
        """End the threads, and start no more steps. If `recv` was interrupted, do not wait for running steps."""
        self._is_ending.set()
        self._threads.end(0.0 if self._is_waiting else _CLOSE_TIMEOUT)

    def _check_workers(self) -> None:
        """Raise EnvError if an environment hangs."""
        self._next_check = time.monotonic() + POLL_INTERVAL
        self._watch.check({worker: step for worker, step in enumerate(list(self._steps)) if step is not None})


def _serve(group: EnvGroup, worker: int, jobs: SimpleQueue[Any], done: Inbox[Any]) -> None:
    """For each job, step or reset all environments of a group. At the end, close the environments."""
    while (job := jobs.get()) is not None:
        actions, rows = job
        error: BaseException | None = None
        try:
            group.run(actions, rows)
        except BaseException as caught:
            error = caught
        del job, actions, rows  # a waiting thread must not keep references to the caller's arrays
        done.put((worker, error))
        del error
    _close(group)


def _serve_any(
    group: EnvGroup,
    worker: int,
    rows: BatchBuffer,
    jobs: SimpleQueue[Any],
    done: Inbox[Any],
    steps: list[tuple[int, int] | None],
    is_ending: threading.Event,
    running: list[int],
) -> None:
    """For each job, step one environment. The last thread that ends closes the environments."""
    count = 0
    while (job := jobs.get()) is not None and not is_ending.is_set():
        env_id, action = job
        steps[worker], count = (env_id, count), count + 1
        answer: Any = env_id
        try:
            group.step_one(env_id, np.asarray(action), rows, env_id)
        except BaseException as error:
            answer = error
        steps[worker] = None
        done.put(answer)
        del job, action, answer
    if running.pop() == 0:
        _close(group)


def _close(group: EnvGroup) -> None:
    # Ignore errors, because the thread must end even if an environment cannot be closed.
    with contextlib.suppress(Exception):
        group.close()
