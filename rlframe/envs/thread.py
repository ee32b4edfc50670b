"""`type='thread'`: each thread steps its share of the environments. For environments that release the GIL.

No thread refers to its pool, so a pool that nobody refers to any more ends its threads like one that was closed. The
threads close the environments: one that is in the middle of a step must not lose its environment.
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

from rlframe.envs.group import POLL_INTERVAL, EnvGroup, GroupPool, StepWatch, interrupted
from rlframe.envs.layout import BatchBuffer, new_buffer
from rlframe.interprocess.waiting import Inbox
from rlframe.metrics.rows import Sums
from rlframe.types import TimeStep

_CLOSE_TIMEOUT = 5.0  # seconds; a thread cannot be killed, so a hung one is left behind (it is a daemon)


class WorkerThreads:
    """Threads that run until `end`, or until nobody refers to this any more.

    Args:
      works: what each of them runs. It must not refer to the pool, and returns on a job of None.
      queues: where each of them gets its jobs from.
    """

    def __init__(self, works: Sequence[Callable[[], None]], queues: list[SimpleQueue[Any]]):
        self._threads = [
            threading.Thread(target=work, name=f"rlframe env worker {i}", daemon=True) for i, work in enumerate(works)
        ]
        self._finalizer = weakref.finalize(self, _dismiss, queues)
        self._finalizer.atexit = False  # the interpreter does not wait for daemons
        for thread in self._threads:
            thread.start()

    def end(self, timeout: float) -> None:
        """Has each thread end after its jobs, and waits for them for `timeout` seconds in all."""
        self._finalizer()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _dismiss(queues: list[SimpleQueue[Any]]) -> None:
    for queue in queues:
        queue.put(None)


class ThreadPool(GroupPool):
    """One thread for each group of environments; all of them work while the caller waits."""

    def __init__(self, groups: list[EnvGroup], answer_timeout: float):
        super().__init__(groups)
        self._jobs: list[SimpleQueue[Any]] = [SimpleQueue() for _ in groups]
        self._done: Inbox[tuple[int, BaseException | None]] = Inbox()
        self._is_waiting = False
        self._watch = StepWatch(answer_timeout)
        works = [
            functools.partial(_serve, group, i, jobs, self._done)
            for i, (group, jobs) in enumerate(zip(groups, self._jobs, strict=True))
        ]
        self._threads = WorkerThreads(works, self._jobs)

    def close(self) -> None:
        """After a step that was interrupted it does not wait for that to end."""
        self._threads.end(0.0 if self._is_waiting else _CLOSE_TIMEOUT)

    def _run(self, actions: np.ndarray | None) -> TimeStep:
        if self._is_waiting:
            raise interrupted()
        self._is_waiting = True
        frame = self._ring.take()
        for jobs, (start, stop) in zip(self._jobs, self._slices, strict=True):
            jobs.put((None if actions is None else actions[start:stop], frame.rows(start, stop)))
        answers: dict[int, BaseException | None] = {}
        self._watch.begin()
        while len(answers) < len(self._jobs):
            try:
                worker, answers[worker] = self._done.get(POLL_INTERVAL)
            except Empty:
                busy = [worker for worker in range(len(self._jobs)) if worker not in answers]
                self._watch.look({i: (self._groups[i].first_id + self._groups[i].at[0], None) for i in busy})
        self._is_waiting = False
        for worker in range(len(answers)):
            error = answers[worker]
            if error is not None:
                raise error
        return frame.timestep()


class AsyncThreads:
    """Threads that step whichever environment was sent to first; results come back in order of completion."""

    def __init__(self, group: EnvGroup, wait_num: int, num_workers: int, answer_timeout: float):
        self.num_envs = len(group.envs)
        self.codec = group.codec
        self._wait_num, self._watch = wait_num, StepWatch(answer_timeout)
        self._log = group.log
        # One row for each environment: it is not written again before the caller has received it.
        self._latest = new_buffer(group.layout, self.num_envs)
        rows = self._latest.rows(0, self.num_envs)
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._done: Inbox[Any] = Inbox()
        self._ready: list[int] = []  # finished, in order, but not yet received
        # What each thread is doing: (environment, how many it has done before), or None.
        self._doing: list[tuple[int, int] | None] = [None] * num_workers
        self._next_look = 0.0
        self._is_waiting = False
        self._has_failed = False  # an environment raised: it answers no more
        self._is_ending = threading.Event()
        left = list(range(num_workers))
        works = [
            functools.partial(_serve_any, group, i, rows, self._jobs, self._done, self._doing, self._is_ending, left)
            for i in range(num_workers)
        ]
        self._threads = WorkerThreads(works, [self._jobs] * num_workers)

    def start(self) -> None:
        spec = self.codec.action_spec
        self.send(np.arange(self.num_envs), np.zeros((self.num_envs, *spec.shape), spec.dtype))

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        if self._has_failed:
            raise interrupted()
        for env_id, action in zip(env_ids.tolist(), np.array(actions), strict=True):
            self._jobs.put((env_id, action))

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        if self._has_failed:
            raise interrupted()
        self._is_waiting = True
        while len(self._ready) < self._wait_num:
            # The others may be so quick that we never wait, and one hangs all the same.
            if time.monotonic() > self._next_look:
                self._look()
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
        return list(self._doing)

    def close(self) -> None:
        """Makes no step that was not begun. After a `recv` that was interrupted it waits for none either."""
        self._is_ending.set()
        self._threads.end(0.0 if self._is_waiting else _CLOSE_TIMEOUT)

    def _look(self) -> None:
        """Raises EnvError where an environment hangs."""
        self._next_look = time.monotonic() + POLL_INTERVAL
        self._watch.look({worker: task for worker, task in enumerate(list(self._doing)) if task is not None})


def _serve(group: EnvGroup, worker: int, jobs: SimpleQueue[Any], done: Inbox[Any]) -> None:
    """Steps or resets all environments of a group for each job, and closes them in the end."""
    while (job := jobs.get()) is not None:
        actions, rows = job
        error: BaseException | None = None
        try:
            group.run(actions, rows)
        except BaseException as caught:
            error = caught
        del job, actions, rows  # a thread that waits must not keep the caller's arrays
        done.put((worker, error))
        del error
    _close(group)


def _serve_any(
    group: EnvGroup,
    worker: int,
    rows: BatchBuffer,
    jobs: SimpleQueue[Any],
    done: Inbox[Any],
    doing: list[tuple[int, int] | None],
    is_ending: threading.Event,
    left: list[int],
) -> None:
    """Steps one environment for each job; the last of the threads that share the group closes it."""
    count = 0
    while (job := jobs.get()) is not None and not is_ending.is_set():
        env_id, action = job
        doing[worker], count = (env_id, count), count + 1
        answer: Any = env_id
        try:
            group.step_one(env_id, np.asarray(action), rows, env_id)
        except BaseException as error:
            answer = error
        doing[worker] = None
        done.put(answer)
        del job, action, answer
    if left.pop() == 0:
        _close(group)


def _close(group: EnvGroup) -> None:
    # As in a worker process: an environment that cannot close must not keep the others from ending.
    with contextlib.suppress(Exception):
        group.close()
