"""The base class of workers. A worker replies to its coordinator while a separate thread does the work."""

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
from rlframe.errors import PERMANENT_ERRORS, FencedError, UsageError
from rlframe.interprocess.heartbeat import STARTING, Phase

_REPLY_WITHIN = 0.3  # seconds before a call that is still in progress gets the reply NotReady
_STUCK_SECONDS = 120.0  # work without progress for this many seconds is considered hung, unless its phase allows more
_CLOSE_TIMEOUT = 4.0  # seconds for the current work to end when the worker is closed


class TaskWorker:
    """The base class of workers. An operator serves its methods to the coordinator.

    One thread does the work of all calls, in order. A call waits up to 0.3 s for its work. The number in its header
    (`seq`) decides how it is handled. Example: the current call has number 7.

    - Call 7 again (a repeated call) waits for the work, or gets the stored reply.
    - Call 8 (the next call) waits until the work of call 7 is done, and is then accepted.
    - Call 6 (a late call) gets `CallRefused` and changes nothing. So does a call for another worker, task or attempt.

    A call whose work takes longer gets `NotReady` with the reason. `close_task`, and `start_task` of another task or
    attempt, interrupt the current work if the work is waiting.

    A subclass adds the calls of its role, each through `_call`. The work of a call is a private method: `_start_task`
    for `start_task`, `_learn` for `learn`, and so on. These methods run in the worker's thread, may take long, and may
    raise. `FencedError` ends the task, because another worker has it now. A method that waits must check `_stop`, or
    `_interrupt` must end the wait.

    Args:
        worker_id: Name of the worker, such as "collector/1".
        index: The number in the name.
        incarnation: Number of earlier workers with the same name.
    """

    kind: Kind  # kind of the worker's tasks

    def __init__(self, worker_id: str, index: int, incarnation: int) -> None:
        self.worker_id, self.index, self.incarnation = worker_id, index, incarnation
        self._lock = threading.Condition()
        self._work: _Work | None = None  # the newest accepted work
        self._task: _Task | None = None  # the newest task
        self._stop = threading.Event()  # set to stop the work of the task
        self._phase: TaskPhase = "idle"
        self._waits_for: WaitsFor | None = None  # see `_waiting_for`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"rlframe {self.worker_id}", daemon=True)
        self._thread.start()

    # --- calls of the coordinator

    def ping(self) -> Alive:
        """Return the worker's task and phase, without waiting."""
        task, phase = self._task, self._phase
        if task is None or task.result is not None:
            return Alive(self.worker_id, self.incarnation, "idle")
        return Alive(self.worker_id, self.incarnation, phase, task.task_id, task.attempt)

    def resources(self) -> Resources:
        """Return the worker's host and process, without waiting."""
        return Resources(socket.gethostname(), os.getpid())

    def start_task(self, header: Header, request: StartTask) -> Started | NotReady | CallRefused | Failed:
        """Start a task. Close the current task or attempt first, without its final save."""
        return self._call(header, "start_task", lambda: self._begin_task(header, request))

    def close_task(self, header: Header, final: bool) -> Closed | NotReady | CallRefused | Failed:
        """End the task. If `final`, save first, because the run ends or another task continues from the checkpoint."""
        return self._call(header, "close_task", lambda: self._end_task(final))

    def close(self) -> None:
        """Stop the work, and end the task without its final save. Repeated calls change nothing.

        Work that does not end within 4 s (such as a compilation, or an environment that hangs) continues in its daemon
        thread, which does not keep the process alive.
        """
        with self._lock:
            self._closed = True
            self._interrupt_work()
            self._lock.notify_all()
        self._thread.join(_CLOSE_TIMEOUT)

    # --- methods of subclasses, called in the worker's thread

    def _start_task(self, task: StartTask) -> Started:
        raise NotImplementedError

    def _close_task(self, final: bool) -> dict[str, Any]:
        """End the task, even if its start failed, and return its result."""
        raise NotImplementedError

    # --- methods of subclasses, called in any thread

    def _interrupt(self) -> None:
        """End the waits of the current work. `_stop` is already set. May be called several times."""

    def _waiting_for(self) -> WaitsFor | None:
        """Return the resource that the current work waits for, or None."""
        return self._waits_for

    def _progress_count(self) -> int:
        """Return a count that rises while long work makes progress."""
        return 0

    # --- handling of calls

    def _call(self, header: Header, name: str, do: Callable[[], WorkerReply]) -> Any:
        """Accept a new call, or find the work of a repeated call. Then wait for the reply for up to 0.3 s."""
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
        """Return the reason to refuse the call; empty if it is accepted."""
        task, work = self._task, self._work
        if self._closed:
            return f"{self.worker_id} is closed."
        if not self._is_for_this_worker(header):
            there, here = f"{header.worker_id}, incarnation {header.incarnation}", self.incarnation
            return f"The call is for {there}; this is {self.worker_id}, incarnation {here}."
        if work is not None and header.seq < work.seq:
            return f"Call {header.seq} is late: the newest call of {self.worker_id} is {work.seq}."
        if work is not None and header.seq == work.seq:
            same = (header.task_id, header.attempt, name) == (work.task_id, work.attempt, work.name)
            return "" if same else f"Call {header.seq} was {work.name} for {work.task_id}, attempt {work.attempt}."
        called = f"{header.task_id}, attempt {header.attempt}"
        if task is None:
            return "" if name == "start_task" else f"{self.worker_id} has not started {called}."
        is_current = (header.task_id, header.attempt) == (task.task_id, task.attempt)
        is_old = header.task_id == task.task_id and header.attempt < task.attempt
        if is_old or (name != "start_task" and not is_current):
            return f"The call is for {called}; {self.worker_id} has {task.task_id}, attempt {task.attempt}."
        if is_current and task.result is not None and name != "close_task":
            may_begin_again = name == "start_task" and task.started is None
            return "" if may_begin_again else f"{self.worker_id} has already ended {called}."
        if self._stop.is_set() and name not in ("start_task", "close_task"):
            return f"{self.worker_id} is closing {called}."
        return ""

    def _accept(self, header: Header, name: str, do: Callable[[], WorkerReply]) -> _Work:
        """Return the work for which the call must wait: unfinished earlier work, or the work of this call."""
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
        except BaseException as error:  # report any exception to the coordinator, and keep the thread alive
            if not self._stop.is_set():  # after a stop, exceptions are expected
                traceback.print_exc()
            if isinstance(error, FencedError):
                self._abandon_task()
            return Failed(type(error).__name__, str(error), traceback.format_exc(), isinstance(error, PERMANENT_ERRORS))

    def _progress_marker(self) -> Any:
        """Return a value that changes while the work makes progress or waits. The value is used to detect hung work."""
        return time.monotonic() if self._waiting_for() is not None else self._progress_count()

    def _begin_task(self, header: Header, request: StartTask) -> WorkerReply:
        task = self._task
        if task is not None and task.started is not None and not self._is_other(header):
            return task.started  # a restarted coordinator repeats the call
        self._abandon_task()
        with self._lock:
            self._stop = threading.Event()
            if self._closed:
                self._stop.set()
            self._task, self._phase = _Task(header.task_id, header.attempt), "starting"
        try:
            if request.kind != self.kind:
                raise UsageError(f"{self.worker_id} cannot {request.kind}: all its tasks are of the kind {self.kind}.")
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
        """End the current task, if any, without its final save. Ignore errors of the task."""
        with contextlib.suppress(Exception):
            if self._task is not None:
                self._end_task(final=False)


class _Work:
    def __init__(self, seq: int, task_id: str, attempt: int, name: str, do: Callable[[], WorkerReply]) -> None:
        self.seq, self.task_id, self.attempt, self.name, self.do = seq, task_id, attempt, name, do
        self.is_done = threading.Event()
        self.reply: WorkerReply | None = None


class _Task:
    def __init__(self, task_id: str, attempt: int) -> None:
        self.task_id, self.attempt = task_id, attempt
        self.started: Started | None = None
        self.result: dict[str, Any] | None = None  # set when the task has ended
