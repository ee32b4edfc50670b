"""Tests of the base class of workers, with a worker whose work the tests block."""

from __future__ import annotations

import functools
import os
import socket
import threading

import pytest

from rlframe.coordinator.messages import (
    CallRefused,
    Closed,
    Collected,
    Demand,
    Failed,
    GetData,
    Header,
    NotReady,
    Resources,
    Started,
    StartTask,
)
from rlframe.coordinator.workers import task_worker
from rlframe.coordinator.workers.task_worker import TaskWorker
from rlframe.errors import EnvError, UsageError
from rlframe.interprocess.heartbeat import ThreadProgress
from tests.coordinator.workers.caller import Caller
from tests.waiting import wait_until

COLLECT = StartTask("collect", "policy")


class BlockableWorker(TaskWorker):
    """A worker whose work waits for `resume`. `log` contains its work."""

    kind = "collect"
    steps, waits_for = 0, "data"

    def __init__(self) -> None:
        super().__init__("collector/1", 1, 2)
        self.resume, self.log, self.options = threading.Event(), [], {}
        self.resume.set()
        self.raises: Exception | None = None
        self.is_stuck = False  # if True, the work ignores a stop and waits for `resume`

    def _start_task(self, task):
        self.log.append(f"start {task.options.get('name', '')}".strip())
        self._block()
        return Started({"number": len(self.log)})

    def get_data(self, header, request):
        return self._call(header, "get_data", self._collect)

    def data_demand(self, header):
        return self._call(header, "data_demand", self._data_demand)

    def _collect(self):
        self.log.append("collect")
        self._block()
        return Collected({"env_steps": float(self.log.count("collect"))}, 1)

    def _data_demand(self):
        return NotReady("data") if not self.resume.is_set() else Demand(1)

    def _progress_count(self):
        return self.steps

    def _waiting_for(self):
        return self.waits_for if self._work is not None and self._work.name == "get_data" else None

    def _close_task(self, final):
        self.log.append(f"close {final}")
        self.phase_in_close = self.ping().phase
        self._block()
        return {"env_steps": self.log.count("collect")}

    def _block(self):
        while not self.resume.wait(0.001) and (self.is_stuck or not self._stop.is_set()):
            pass
        if self.raises:
            raise self.raises


@pytest.fixture
def worker():
    worker = BlockableWorker()
    yield worker
    worker.is_stuck = False
    worker.resume.set()
    worker.close()


@pytest.fixture
def call(worker):
    return Caller(worker, "task")


def start_blocked_work(worker: BlockableWorker, call: Caller) -> Header:
    """Start work that blocks, and return the header of its call."""
    call.until_done("start_task", COLLECT)
    worker.resume.clear()
    header = call.header()
    wait_until(lambda: worker.get_data(header, GetData()) == NotReady("data"))
    return header


# --- calls in order


def test_task_is_started_runs_and_is_closed(worker, call):
    assert call.until_done("start_task", COLLECT) == Started({"number": 1})
    assert call.until_done("get_data", GetData()) == Collected({"env_steps": 1.0}, 1)
    assert call.until_done("get_data", GetData()) == Collected({"env_steps": 2.0}, 1)
    assert call.until_done("close_task", True) == Closed({"env_steps": 2})
    assert worker.log == ["start", "collect", "collect", "close True"]


def test_resources_and_ping_describe_an_idle_worker(worker):
    assert worker.resources() == Resources(socket.gethostname(), os.getpid())
    alive = worker.ping()
    assert (alive.worker_id, alive.incarnation, alive.phase, alive.task_id) == ("collector/1", 2, "idle", None)


def test_ping_returns_the_phase_of_the_task(worker, call):
    worker.resume.clear()
    assert worker.start_task(call.header(), COLLECT) == NotReady()
    wait_until(lambda: worker.ping().phase == "starting")
    alive = worker.ping()
    assert (alive.task_id, alive.attempt) == ("task", 0)
    worker.resume.set()
    wait_until(lambda: worker.ping().phase == "running")
    worker.resume.clear()
    header = call.header()
    wait_until(lambda: worker.get_data(header, GetData()) == NotReady("data"))
    assert worker.ping().phase == "running"
    worker.resume.set()
    assert call.until_done("close_task", False) == Closed({"env_steps": 1})
    assert worker.phase_in_close == "closing"
    assert worker.ping().phase == "idle"


def test_work_without_progress_is_overdue_after_two_minutes(worker, call):
    call.until_done("start_task", COLLECT)
    worker.resume.clear()
    worker.waits_for = None
    header = call.header()
    wait_until(lambda: worker.get_data(header, GetData()) == NotReady())
    look = functools.partial(ThreadProgress().look, ident=worker._thread.ident)
    look(0.0)
    assert (look(119.0).phase.name, look(119.0).overdue, look(121.0).overdue) == ("get_data", -1.0, 1.0)
    worker.steps = 5  # the work is slow, but makes progress
    assert look(130.0).seconds == 0.0
    worker.waits_for = "data"  # the time of waiting for another process does not count
    look(200.0)
    assert look(900.0).seconds == 0.0
    worker.resume.set()
    wait_until(lambda: look(1000.0) is None)


# --- repetitions


def test_repeated_call_gets_the_same_reply_without_new_work(worker, call):
    call.until_done("start_task", COLLECT)
    header = call.header()
    reply = call.repeat_until_done("get_data", GetData(), header)
    assert worker.get_data(header, GetData()) is reply
    assert worker.log == ["start", "collect"]


def test_slow_call_returns_not_ready_and_a_repeated_call_returns_the_reply(worker, call):
    header = start_blocked_work(worker, call)
    assert worker.get_data(header, GetData()) == NotReady("data")
    worker.resume.set()
    assert call.repeat_until_done("get_data", GetData(), header) == Collected({"env_steps": 1.0}, 1)
    assert worker.log.count("collect") == 1


def test_work_that_returns_not_ready_runs_again_when_the_call_is_repeated(worker, call):
    call.until_done("start_task", COLLECT)
    worker.resume.clear()
    header = call.header()
    wait_until(lambda: worker.data_demand(header) == NotReady("data"))
    worker.resume.set()
    wait_until(lambda: worker.data_demand(header) == Demand(1))


def test_concurrent_calls_with_the_same_number_share_one_reply(worker, call):
    call.until_done("start_task", COLLECT)
    header, replies, ready = call.header(), [], threading.Barrier(8)

    def call_worker():
        ready.wait()
        replies.append(call.repeat_until_done("get_data", GetData(), header))

    threads = [threading.Thread(target=call_worker) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(replies) == 8 and all(reply is replies[0] for reply in replies)
    assert worker.log.count("collect") == 1


def test_different_call_with_the_same_number_is_refused(worker, call):
    call.until_done("start_task", COLLECT)
    header = call.header()
    call.repeat_until_done("get_data", GetData(), header)
    assert worker.close_task(header, True) == CallRefused("Call 2 was get_data for task, attempt 0.")


# --- late and misdirected calls


def test_late_call_is_refused(worker, call):
    late = call.header()
    call.until_done("start_task", COLLECT)
    assert worker.get_data(late, GetData()) == CallRefused("Call 1 is late: the newest call of collector/1 is 2.")
    assert worker.log == ["start"]


@pytest.mark.parametrize(("worker_id", "incarnation"), [("collector/0", 2), ("collector/1", 1), ("collector/1", 3)])
def test_call_for_another_worker_or_incarnation_is_refused(worker, worker_id, incarnation):
    reply = worker.start_task(Header("task", 0, worker_id, incarnation, 1), COLLECT)
    assert reply == CallRefused(
        f"The call is for {worker_id}, incarnation {incarnation}; this is collector/1, incarnation 2.",
        is_misdirected=True,
    )
    assert worker.log == []


def test_call_for_an_older_attempt_is_refused(worker, call):
    call.attempt = 1
    call.until_done("start_task", COLLECT)
    call.attempt = 0
    refused = CallRefused("The call is for task, attempt 0; collector/1 has task, attempt 1.")
    assert worker.get_data(call.header(), GetData()) == refused
    assert worker.start_task(call.header(), COLLECT) == refused
    assert worker.close_task(call.header(), False) == refused
    assert worker.log == ["start"]


def test_call_for_a_task_that_is_not_running_is_refused(worker, call):
    assert "has not started" in worker.get_data(call.header(), GetData()).why
    call.until_done("start_task", COLLECT)
    assert "has task, attempt 0" in Caller(worker, "other", call.seq).call_once("get_data", GetData()).why
    call.until_done("close_task", False)
    assert worker.get_data(call.header(), GetData()) == CallRefused("collector/1 has already ended task, attempt 0.")
    assert worker.start_task(call.header(), COLLECT) == CallRefused("collector/1 has already ended task, attempt 0.")


# --- calls of a restarted coordinator, with higher numbers


def test_call_with_a_higher_number_waits_for_the_current_work(worker, call):
    start_blocked_work(worker, call)
    header = call.header()
    assert worker.get_data(header, GetData()) == NotReady()
    assert worker.log.count("collect") == 1
    worker.resume.set()
    assert call.repeat_until_done("get_data", GetData(), header) == Collected({"env_steps": 2.0}, 1)


def test_running_task_is_not_started_again(worker, call):
    first = call.until_done("start_task", COLLECT)
    assert call.until_done("start_task", COLLECT) == first
    assert worker.log == ["start"]


def test_closing_a_closed_task_returns_the_same_result(worker, call):
    call.until_done("start_task", COLLECT)
    call.until_done("get_data", GetData())
    assert call.until_done("close_task", True) == call.until_done("close_task", True) == Closed({"env_steps": 1})
    assert worker.log.count("close True") == 1


# --- fencing


@pytest.mark.parametrize(("task_id", "attempt"), [("task", 1), ("other", 0)])
def test_new_task_or_attempt_ends_the_current_task(worker, call, task_id, attempt):
    start_blocked_work(worker, call)  # blocks until it is stopped
    other = Caller(worker, task_id, call.seq, attempt)
    header = other.header()
    wait_until(lambda: worker.start_task(header, StartTask("collect", "policy", {"name": "new"})) == NotReady())
    wait_until(lambda: worker.log == ["start", "collect", "close False", "start new"])
    worker.resume.set()
    other.repeat_until_done("start_task", COLLECT, header)
    assert (worker.ping().task_id, worker.ping().attempt) == (task_id, attempt)
    assert isinstance(call.call_once("get_data", GetData()), CallRefused)


def test_late_call_is_refused_while_the_task_is_closing(worker, call):
    start_blocked_work(worker, call)
    worker.is_stuck = True
    late = call.header()
    assert worker.close_task(call.header(), False) == NotReady()
    worker.is_stuck = False
    wait_until(lambda: not worker._has_work)
    assert worker.get_data(late, GetData()) == CallRefused("collector/1 is closing task, attempt 0.")
    assert call.until_done("close_task", False, later=worker.resume.set) == Closed({"env_steps": 1})


def test_closing_a_task_ends_the_waits_of_its_work(worker, call):
    start_blocked_work(worker, call)
    closing = call.header()
    worker.close_task(closing, True)
    worker.resume.set()
    assert call.repeat_until_done("close_task", True, closing) == Closed({"env_steps": 1})
    assert worker.log == ["start", "collect", "close True"]


# --- failures


@pytest.mark.parametrize(
    ("error", "is_permanent"), [(EnvError("it fell over"), False), (UsageError("no such env"), True)]
)
def test_exception_in_the_work_becomes_a_failed_reply(worker, call, error, is_permanent):
    call.until_done("start_task", COLLECT)
    worker.raises = error
    reply = call.until_done("get_data", GetData())
    assert (reply.error, reply.message, reply.is_permanent) == (type(error).__name__, str(error), is_permanent)
    assert "in _block\n" in reply.traceback
    worker.raises = None
    assert call.until_done("get_data", GetData()) == Collected({"env_steps": 2.0}, 1)


def test_failed_start_is_cleaned_up_and_can_be_retried(worker, call):
    worker.raises = EnvError("no display")
    assert call.until_done("start_task", COLLECT).message == "no display"
    assert worker.log == ["start", "close False"] and worker.ping().phase == "idle"
    worker.raises = None
    assert isinstance(call.call_once("get_data", GetData()), CallRefused)
    assert isinstance(call.until_done("start_task", COLLECT), Started)


def test_failed_close_is_reported_and_ends_the_task(worker, call):
    call.until_done("start_task", COLLECT)
    worker.raises = EnvError("will not end")
    assert call.until_done("close_task", True).message == "will not end"
    worker.raises = None
    call.attempt = 1
    assert isinstance(call.until_done("start_task", COLLECT), Started)


def test_task_of_another_kind_is_refused(worker, call):
    reply = call.until_done("start_task", StartTask("evaluate", "policy"))
    assert isinstance(reply, Failed) and reply.is_permanent
    assert reply.message == "collector/1 cannot evaluate: all its tasks are of the kind collect."


# --- the end


def test_close_ends_waiting_work_and_the_thread(worker, call, monkeypatch):
    monkeypatch.setattr(task_worker, "_CLOSE_TIMEOUT", 60.0)
    start_blocked_work(worker, call)
    worker.close()
    assert not worker._thread.is_alive()
    assert worker.log == ["start", "collect", "close False"]
    worker.close()
    assert worker.get_data(call.header(), GetData()) == CallRefused("collector/1 is closed.")
    assert worker.ping().phase == "idle"


def test_close_returns_in_bounded_time_if_the_work_hangs(worker, call, monkeypatch):
    monkeypatch.setattr(task_worker, "_CLOSE_TIMEOUT", 0.2)
    start_blocked_work(worker, call)
    worker.is_stuck = True
    worker.close()
    assert worker._thread.is_alive() and worker._thread.daemon


def test_ping_and_resources_do_not_wait_for_the_work(worker, call):
    worker.is_stuck = True
    start_blocked_work(worker, call)
    with worker._lock:
        done = threading.Event()
        threading.Thread(target=lambda: (worker.ping(), worker.resources(), done.set())).start()
        assert done.wait(60.0)
