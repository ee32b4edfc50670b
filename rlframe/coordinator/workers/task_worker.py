"""The base of all workers: they answer a coordinator while their own thread works."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rlframe.coordinator.messages import (
    Alive,
    CallRefused,
    Closed,
    Failed,
    Header,
    Kind,
    NotReady,
    Resources,
    Started,
    StartTask,
    TaskPhase,
    WaitsFor,
    WorkerReply,
)
from rlframe.errors import CheckpointError, FencedError, NonFiniteLossError, UsageError
from rlframe.interprocess.phases import STARTING, Phase

_REPLY_WITHIN = 0.3  # seconds; what takes longer is asked for again
_PERMANENT_ERRORS = (UsageError, NonFiniteLossError, CheckpointError)  # another try would end in the same way
_STUCK_SECONDS = 120.0  # seconds that work may make no progress, outside of phases that allow more
_CLOSE_TIMEOUT = 4.0  # seconds that the work under way has when the worker is closed


class TaskWorker:
    """Answers a coordinator: an operator serves its calls.

    One thread does the work of all calls, one after the other. A call waits 0.3 s for its work. Its number (`seq` of
    the header) says what it is. If this worker is at call 7:

    - call 7 again (the coordinator repeats it): waits on, or gets the reply, which is kept;
    - call 8 (the next one): waits until the work of 7 is done, and is accepted then;
    - call 6 (late): is `CallRefused`, and changes nothing. So is a call of another worker, task or attempt.

    A call whose work takes longer is answered `NotReady`, with the reason. `start_task` of another task or attempt, and
    `close_task`, end what the work under way waits for.

    Subclasses add the calls of their role, each by `_call`. The work of a call is in a private method: `_start_task` of
    `start_task`, `_learn` of `learn`, ... These run in the worker's thread, may take as long as they need, and raise
    what goes wrong: `FencedError` ends the task, since another worker is at it. While they wait, they check `_stop`, or
    `_interrupt` ends the wait.

    Args:
        worker_id: its name, "collector/1".
        index: the number in it.
        incarnation: how many workers had that name before it.
    """

    kind: Kind  # of the tasks that it works at

    def __init__(self, worker_id: str, index: int, incarnation: int) -> None:
        self.worker_id, self.index, self.incarnation = worker_id, index, incarnation
        self._lock = threading.Condition()
        self._work: _Work | None = None  # the newest that was accepted; the thread's until it is done
        self._task: _Task | None = None  # the newest
        self._stop = threading.Event()  # of the task: its work is to end
        self._phase: TaskPhase = "idle"
        self._waits_for: WaitsFor | None = None  # see `_waiting_for`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"rlframe {self.worker_id}", daemon=True)
        self._thread.start()

    # --- what the coordinator calls

    def ping(self) -> Alive:
        """Answer with the worker's task and phase. Waits for nothing."""
        task, phase = self._task, self._phase
        if task is None or task.result is not None:
            return Alive(self.worker_id, self.incarnation, "idle")
        return Alive(self.worker_id, self.incarnation, phase, task.task_id, task.attempt)

    def resources(self) -> Resources:
        """Answer where it runs. Waits for nothing."""
        return Resources(socket.gethostname(), os.getpid())

    def start_task(self, header: Header, request: StartTask) -> Started | NotReady | CallRefused | Failed:
        """Begin a task. A task or attempt under way is closed first, without its final save."""
        return self._call(header, "start_task", lambda: self._begin_task(header, request))

    def close_task(self, header: Header, final: bool) -> Closed | NotReady | CallRefused | Failed:
        """End the task; `final`: save first, because the run ends, or another task continues from it."""
        return self._call(header, "close_task", lambda: self._end_task(final))

    def close(self) -> None:
        """End the worker: its work, and its task without the final save. May be called again.

        Work that does not end within 4 s (a compilation, an environment that hangs) is left to its thread, which
        does not keep the process alive.
        """
        with self._lock:
            self._closed = True
            self._interrupt_work()
            self._lock.notify_all()
        self._thread.join(_CLOSE_TIMEOUT)

    # --- what subclasses do, in the worker's thread

    def _start_task(self, task: StartTask) -> Started:
        raise NotImplementedError

    def _close_task(self, final: bool) -> dict[str, Any]:
        """End the task, also one that did not start in full, and return its result."""
        raise NotImplementedError

    # --- what subclasses do, in any thread

    def _interrupt(self) -> None:
        """End the waits of the work under way: `_stop` is set. May be called at any time, and again."""

    def _waiting_for(self) -> WaitsFor | None:
        """Return what the work under way waits for, however long."""
        return self._waits_for

    def _progress_count(self) -> int:
        """Return a count that rises during long work."""
        return 0

    # --- calls

    def _call(self, header: Header, name: str, do: Callable[[], WorkerReply]) -> Any:
        """Accept the call, or find the work of an earlier one with its number; then wait for a while."""
        deadline = time.monotonic() + _REPLY_WITHIN
        while True:
            with self._lock:
                refusal = self._refusal(header, name)
                if refusal:
                    return CallRefused(refusal, not self._is_for_this_worker(header))
                work = self._accept(header, name, do)
            if not work.is_done.wait(max(0.0, deadline - time.monotonic())):
                return NotReady(self._waiting_for() if work.seq == header.seq else None)
            if work.seq == header.seq:
                assert work.reply is not None
                return work.reply

    def _is_for_this_worker(self, header: Header) -> bool:
        return (header.worker_id, header.incarnation) == (self.worker_id, self.incarnation)

    def _refusal(self, header: Header, name: str) -> str:
        """Return why the call is refused; empty if it is accepted."""
        task, work = self._task, self._work
        if self._closed:
            return f"{self.worker_id} is closed."
        if not self._is_for_this_worker(header):
            there, here = f"{header.worker_id}, incarnation {header.incarnation}", self.incarnation
            return f"The call is for {there}; this is {self.worker_id}, incarnation {here}."
        if work is not None and header.seq < work.seq:
            return f"Call {header.seq} is late: {self.worker_id} is at {work.seq}."
        if work is not None and header.seq == work.seq:
            same = (header.task_id, header.attempt, name) == (work.task_id, work.attempt, work.name)
            return "" if same else f"Call {header.seq} was {work.name} of {work.task_id}, attempt {work.attempt}."
        called = f"{header.task_id}, attempt {header.attempt}"
        if task is None:
            return "" if name == "start_task" else f"{self.worker_id} was not told to start {called}."
        is_current = (header.task_id, header.attempt) == (task.task_id, task.attempt)
        is_old = header.task_id == task.task_id and header.attempt < task.attempt
        if is_old or (name != "start_task" and not is_current):
            return f"The call is of {called}: {self.worker_id} is at {task.task_id}, attempt {task.attempt}."
        if is_current and task.result is not None and name != "close_task":
            may_begin_again = name == "start_task" and task.started is None
            return "" if may_begin_again else f"{called} has ended at {self.worker_id}."
        if self._stop.is_set() and name not in ("start_task", "close_task"):
            return f"{called} is about to be closed at {self.worker_id}."
        return ""

    def _accept(self, header: Header, name: str, do: Callable[[], WorkerReply]) -> _Work:
        """Return the work that the call waits for: its own, which the thread gets if it is new, or earlier work."""
        work = self._work
        if work is not None and not work.is_done.is_set():
            if header.seq != work.seq and (name == "close_task" or (name == "start_task" and self._is_other(header))):
                self._interrupt_work()
            return work
        if work is not None and header.seq == work.seq and not isinstance(work.reply, NotReady):
            return work
        self._work = _Work(header.seq, header.task_id, header.attempt, name, do)
        self._lock.notify_all()
        return self._work

    def _is_other(self, header: Header) -> bool:
        task = self._task
        return task is None or (header.task_id, header.attempt) != (task.task_id, task.attempt)

    def _interrupt_work(self) -> None:
        self._stop.set()
        self._interrupt()

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._has_work)
                work = self._work
            if self._closed:
                break
            assert work is not None
            reply = self._do(work)
            with self._lock:
                work.reply = reply
                self._waits_for = None
                work.is_done.set()
        self._abandon_task()

    @property
    def _has_work(self) -> bool:
        return self._work is not None and not self._work.is_done.is_set()

    def _do(self, work: _Work) -> WorkerReply:
        try:
            with Phase(work.name, _STUCK_SECONDS, self._progress_marker):
                return work.do()
        except BaseException as error:  # of any kind: the coordinator must hear of it, and the thread continue
            if not self._stop.is_set():  # else it was told to end, which may be why
                traceback.print_exc()
            if isinstance(error, FencedError):
                self._abandon_task()
            return Failed(
                type(error).__name__, str(error), traceback.format_exc(), isinstance(error, _PERMANENT_ERRORS)
            )

    def _progress_marker(self) -> Any:
        """Return a value that changes while the work gets on, or waits for others. Who watches this process asks."""
        return time.monotonic() if self._waiting_for() is not None else self._progress_count()

    def _begin_task(self, header: Header, request: StartTask) -> WorkerReply:
        task = self._task
        if task is not None and task.started is not None and not self._is_other(header):
            return task.started  # a coordinator that was restarted asks again
        self._abandon_task()
        with self._lock:
            self._stop = threading.Event()
            if self._closed:
                self._stop.set()
            self._task, self._phase = _Task(header.task_id, header.attempt), "starting"
        try:
            if request.kind != self.kind:
                raise UsageError(f"{self.worker_id} cannot {request.kind}: it works at {self.kind} alone.")
            with STARTING:
                started = self._start_task(request)
        except BaseException:
            self._abandon_task()
            raise
        self._task.started, self._phase = started, "running"
        return started

    def _end_task(self, final: bool) -> Closed:
        task = self._task
        assert task is not None
        if task.result is None:
            result: dict[str, Any] = {}
            self._phase = "closing"
            try:
                result = self._close_task(final)
            finally:
                task.result = result
        return Closed(task.result)

    def _abandon_task(self) -> None:
        """End the task under way, if there is one, without its final save. Ignore its errors."""
        with contextlib.suppress(Exception):
            if self._task is not None:
                self._end_task(final=False)


class _Work:
    """The work of one call."""

    def __init__(self, seq: int, task_id: str, attempt: int, name: str, do: Callable[[], WorkerReply]) -> None:
        self.seq, self.task_id, self.attempt, self.name, self.do = seq, task_id, attempt, name, do
        self.is_done = threading.Event()
        self.reply: WorkerReply | None = None


class _Task:
    """The task of a worker."""

    def __init__(self, task_id: str, attempt: int) -> None:
        self.task_id, self.attempt = task_id, attempt
        self.started: Started | None = None
        self.result: dict[str, Any] | None = None  # once it has ended
