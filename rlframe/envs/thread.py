"""`type='thread'`: each thread steps its share of the environments. For environments that release the GIL."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from rlframe.envs.frames import FrameRing, new_frame
from rlframe.envs.group import ANSWER_TIMEOUT, EnvGroup, EnvState, interrupted
from rlframe.errors import EnvError
from rlframe.types import TimeStep

_CLOSE_TIMEOUT = 5.0  # seconds; a thread cannot be killed, so a hung one is left behind (it is a daemon)


class ThreadPool:
    """One thread for each group of environments; all of them work while the caller waits."""

    def __init__(self, groups: list[EnvGroup]):
        self._groups = groups
        self._slices = [(group.first_id, group.first_id + len(group.envs)) for group in groups]
        self.num_envs = self._slices[-1][1]
        self.observation_spec = groups[0].observation_spec
        self.action_spec = groups[0].action_spec
        self._ring = FrameRing(groups[0].layout, self.num_envs, self._slices)
        self._jobs: list[SimpleQueue[Any]] = [SimpleQueue() for _ in groups]
        self._done: SimpleQueue[Exception | None] = SimpleQueue()
        self._is_waiting = False
        self._threads = [
            threading.Thread(target=self._work, args=(group, jobs), name=f"rlframe env worker {i}", daemon=True)
            for i, (group, jobs) in enumerate(zip(groups, self._jobs, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def reset(self) -> TimeStep:
        return self._run(None)

    def step(self, actions: np.ndarray) -> TimeStep:
        return self._run(actions)

    def get_state(self) -> list[EnvState] | None:
        states: list[EnvState] = []
        for group in self._groups:
            part = group.get_state()
            if part is None:
                return None
            states += part
        return states

    def set_state(self, states: list[EnvState]) -> None:
        for group, (start, stop) in zip(self._groups, self._slices, strict=True):
            group.set_state(states[start:stop])

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT)
        for group in self._groups:
            group.close()

    def _run(self, actions: np.ndarray | None) -> TimeStep:
        if self._is_waiting:
            raise interrupted()
        self._is_waiting = True
        frame = self._ring.take()
        for jobs, (start, stop) in zip(self._jobs, self._slices, strict=True):
            jobs.put((None if actions is None else actions[start:stop], frame.rows(start, stop)))
        errors = [self._wait() for _ in self._jobs]
        self._is_waiting = False
        for error in errors:
            if error is not None:
                raise error
        return frame.timestep()

    def _wait(self) -> Exception | None:
        try:
            return self._done.get(timeout=ANSWER_TIMEOUT)
        except Empty:
            raise EnvError(f"An environment did not answer within {ANSWER_TIMEOUT:.0f} s.") from None

    def _work(self, group: EnvGroup, jobs: SimpleQueue[Any]) -> None:
        while (job := jobs.get()) is not None:
            actions, rows = job
            error: Exception | None = None
            try:
                group.reset(rows) if actions is None else group.step(actions, rows)
            except Exception as caught:
                error = caught
            del job, actions, rows  # a thread that waits must not keep the caller's arrays
            self._done.put(error)


class AsyncThreads:
    """Threads that step whichever environment was sent to first; results come back in order of completion."""

    def __init__(self, group: EnvGroup, wait_num: int, num_workers: int):
        self._group = group
        self.num_envs = len(group.envs)
        self.observation_spec = group.observation_spec
        self.action_spec = group.action_spec
        self._wait_num = wait_num
        # One row for each environment: it is not written again before the caller has received it.
        self._latest = new_frame(group.layout, self.num_envs)
        self._rows = self._latest.rows(0, self.num_envs)
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._done: SimpleQueue[Any] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"rlframe env worker {i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        self.send(np.arange(self.num_envs), np.zeros((self.num_envs, *self.action_spec.shape), self.action_spec.dtype))

    def send(self, env_ids: np.ndarray, actions: np.ndarray) -> None:
        for env_id, action in zip(env_ids.tolist(), np.array(actions), strict=True):
            self._jobs.put((env_id, action))

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        env_ids = np.empty(self._wait_num, np.int32)
        for k in range(self._wait_num):
            try:
                answer = self._done.get(timeout=ANSWER_TIMEOUT)
            except Empty:
                raise EnvError(f"No environment answered within {ANSWER_TIMEOUT:.0f} s.") from None
            if isinstance(answer, Exception):
                raise answer
            env_ids[k] = answer
        return env_ids, self._latest.select(env_ids).timestep()

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT)
        self._group.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            env_id, action = job
            try:
                self._group.step_one(env_id, np.asarray(action), self._rows, env_id)
                self._done.put(env_id)
            except Exception as error:
                self._done.put(error)
