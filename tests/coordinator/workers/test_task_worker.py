"""What all workers have in common, with a worker whose work the tests hold up and let go."""

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
from rlframe.interprocess.phases import ThreadProgress
from tests.coordinator.workers.caller import Caller
from tests.waiting import wait_until

COLLECT = StartTask("collect", "policy")


class Held(TaskWorker):
    """Collects once it is let go; keeps what it was asked to do."""

    kind = "collect"
    steps, waits_for = 0, "data"

    def __init__(self) -> None:
        super().__init__("collector/1", 1, 2)
        self.go, self.did, self.options = threading.Event(), [], {}
        self.go.set()
        self.raises: Exception | None = None
        self.is_stuck = False  # its work ends when it is let go, whatever it is told

    def _start_task(self, task):
        self.did.append(f"start {task.options.get('name', '')}".strip())
        self._hold()
        return Started({"number": len(self.did)})

    def get_data(self, header, request):
        return self._call(header, "get_data", self._collect)

    def data_demand(self, header):
        return self._call(header, "data_demand", self._data_demand)

    def _collect(self):
        self.did.append("collect")
        self._hold()
        return Collected({"env_steps": float(self.did.count("collect"))}, 1)

    def _data_demand(self):
        return NotReady("data") if not self.go.is_set() else Demand(1)

    def _progress_count(self):
        return self.steps

    def _waiting_for(self):
        return self.waits_for if self._work is not None and self._work.name == "get_data" else None

    def _close_task(self, final):
        self.did.append(f"close {final}")
        self.phase_in_close = self.ping().phase
        self._hold()
        return {"env_steps": self.did.count("collect")}

    def _hold(self):
        while not self.go.wait(0.001) and (self.is_stuck or not self._stop.is_set()):
            pass
        if self.raises:
            raise self.raises


@pytest.fixture
def worker():
    worker = Held()
    yield worker
    worker.is_stuck = False
    worker.go.set()
    worker.close()


@pytest.fixture
def call(worker):
    return Caller(worker, "task")


def held_up(worker: Held, call: Caller) -> Header:
    """A worker that collects and does not get on; the header of that call."""
    call.until_done("start_task", COLLECT)
    worker.go.clear()
    header = call.header()
    wait_until(lambda: worker.get_data(header, GetData()) == NotReady("data"))
    return header


# --- the calls in their order


def test_a_task_is_started_worked_at_and_closed(worker, call):
    assert call.until_done("start_task", COLLECT) == Started({"number": 1})
    assert call.until_done("get_data", GetData()) == Collected({"env_steps": 1.0}, 1)
    assert call.until_done("get_data", GetData()) == Collected({"env_steps": 2.0}, 1)
    assert call.until_done("close_task", True) == Closed({"env_steps": 2})
    assert worker.did == ["start", "collect", "collect", "close True"]


def test_a_worker_says_what_it_is_and_where(worker):
    assert worker.resources() == Resources(socket.gethostname(), os.getpid())
    alive = worker.ping()
    assert (alive.worker_id, alive.incarnation, alive.phase, alive.task_id) == ("collector/1", 2, "idle", None)


def test_ping_follows_the_task(worker, call):
    worker.go.clear()
    assert worker.start_task(call.header(), COLLECT) == NotReady()
    wait_until(lambda: worker.ping().phase == "starting")
    alive = worker.ping()
    assert (alive.task_id, alive.attempt) == ("task", 0)
    worker.go.set()
    wait_until(lambda: worker.ping().phase == "running")
    worker.go.clear()
    header = call.header()
    wait_until(lambda: worker.get_data(header, GetData()) == NotReady("data"))
    assert worker.ping().phase == "running"
    worker.go.set()
    assert call.until_done("close_task", False) == Closed({"env_steps": 1})
    assert worker.phase_in_close == "closing"
    assert worker.ping().phase == "idle"


def test_work_that_makes_no_progress_is_overdue_after_two_minutes(worker, call):
    call.until_done("start_task", COLLECT)
    worker.go.clear()
    worker.waits_for = None
    header = call.header()
    wait_until(lambda: worker.get_data(header, GetData()) == NotReady())
    look = functools.partial(ThreadProgress().look, ident=worker._thread.ident)
    look(0.0)
    assert (look(119.0).phase.name, look(119.0).overdue, look(121.0).overdue) == ("get_data", -1.0, 1.0)
    worker.steps = 5  # work that takes long goes on
    assert look(130.0).seconds == 0.0
    worker.waits_for = "data"  # from another process, which is not its fault
    look(200.0)
    assert look(900.0).seconds == 0.0
    worker.go.set()
    wait_until(lambda: look(1000.0) is None)


# --- repetitions


def test_the_same_number_gives_the_last_reply_again_and_works_no_second_time(worker, call):
    call.until_done("start_task", COLLECT)
    header = call.header()
    reply = call.again("get_data", GetData(), header)
    assert worker.get_data(header, GetData()) is reply
    assert worker.did == ["start", "collect"]


def test_a_call_that_takes_long_is_answered_soon_and_gives_its_reply_when_it_is_said_again(worker, call):
    header = held_up(worker, call)
    assert worker.get_data(header, GetData()) == NotReady("data")
    worker.go.set()
    assert call.again("get_data", GetData(), header) == Collected({"env_steps": 1.0}, 1)
    assert worker.did.count("collect") == 1


def test_work_that_was_not_ready_is_tried_again_under_the_same_number(worker, call):
    call.until_done("start_task", COLLECT)
    worker.go.clear()
    header = call.header()
    wait_until(lambda: worker.data_demand(header) == NotReady("data"))
    worker.go.set()
    wait_until(lambda: worker.data_demand(header) == Demand(1))


def test_two_threads_that_call_with_the_same_number_get_the_reply_of_one_piece_of_work(worker, call):
    call.until_done("start_task", COLLECT)
    header, replies, ready = call.header(), [], threading.Barrier(8)

    def ask():
        ready.wait()
        replies.append(call.again("get_data", GetData(), header))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(replies) == 8 and all(reply is replies[0] for reply in replies)
    assert worker.did.count("collect") == 1


def test_a_number_that_was_another_call_is_refused(worker, call):
    call.until_done("start_task", COLLECT)
    header = call.header()
    call.again("get_data", GetData(), header)
    assert worker.close_task(header, True) == CallRefused("Call 2 was get_data of task, attempt 0.")


# --- calls that are for others, or late


def test_a_late_number_is_refused(worker, call):
    late = call.header()
    call.until_done("start_task", COLLECT)
    assert worker.get_data(late, GetData()) == CallRefused("Call 1 is late: collector/1 is at 2.")
    assert worker.did == ["start"]


@pytest.mark.parametrize(("worker_id", "incarnation"), [("collector/0", 2), ("collector/1", 1), ("collector/1", 3)])
def test_a_call_for_another_worker_or_incarnation_is_refused(worker, worker_id, incarnation):
    reply = worker.start_task(Header("task", 0, worker_id, incarnation, 1), COLLECT)
    assert reply == CallRefused(
        f"The call is for {worker_id}, incarnation {incarnation}; this is collector/1, incarnation 2.",
        is_misdirected=True,
    )
    assert worker.did == []


def test_a_call_of_an_older_attempt_is_refused(worker, call):
    call.attempt = 1
    call.until_done("start_task", COLLECT)
    call.attempt = 0
    refused = CallRefused("The call is of task, attempt 0: collector/1 is at task, attempt 1.")
    assert worker.get_data(call.header(), GetData()) == refused
    assert worker.start_task(call.header(), COLLECT) == refused
    assert worker.close_task(call.header(), False) == refused
    assert worker.did == ["start"]


def test_a_call_of_a_task_that_was_not_started_here_is_refused(worker, call):
    assert "was not told to start" in worker.get_data(call.header(), GetData()).why
    call.until_done("start_task", COLLECT)
    assert "is at task, attempt 0" in Caller(worker, "other", call.seq).say("get_data", GetData()).why
    call.until_done("close_task", False)
    assert worker.get_data(call.header(), GetData()) == CallRefused("task, attempt 0 has ended at collector/1.")
    assert worker.start_task(call.header(), COLLECT) == CallRefused("task, attempt 0 has ended at collector/1.")


# --- a coordinator that was restarted: higher numbers


def test_a_higher_number_waits_for_the_work_under_way(worker, call):
    held_up(worker, call)
    header = call.header()
    assert worker.get_data(header, GetData()) == NotReady()
    assert worker.did.count("collect") == 1
    worker.go.set()
    assert call.again("get_data", GetData(), header) == Collected({"env_steps": 2.0}, 1)


def test_a_task_that_goes_on_is_not_started_a_second_time(worker, call):
    first = call.until_done("start_task", COLLECT)
    assert call.until_done("start_task", COLLECT) == first
    assert worker.did == ["start"]


def test_a_task_that_was_closed_gives_its_result_again(worker, call):
    call.until_done("start_task", COLLECT)
    call.until_done("get_data", GetData())
    assert call.until_done("close_task", True) == call.until_done("close_task", True) == Closed({"env_steps": 1})
    assert worker.did.count("close True") == 1


# --- fencing


@pytest.mark.parametrize(("task_id", "attempt"), [("task", 1), ("other", 0)])
def test_a_new_task_or_attempt_ends_the_one_that_goes_on(worker, call, task_id, attempt):
    held_up(worker, call)  # until it is told to stop
    other = Caller(worker, task_id, call.seq, attempt)
    header = other.header()
    wait_until(lambda: worker.start_task(header, StartTask("collect", "policy", {"name": "new"})) == NotReady())
    wait_until(lambda: worker.did == ["start", "collect", "close False", "start new"])
    worker.go.set()
    other.again("start_task", COLLECT, header)
    assert (worker.ping().task_id, worker.ping().attempt) == (task_id, attempt)
    assert isinstance(call.say("get_data", GetData()), CallRefused)


def test_while_it_is_about_to_be_closed_a_late_call_begins_nothing(worker, call):
    held_up(worker, call)
    worker.is_stuck = True
    late = call.header()
    assert worker.close_task(call.header(), False) == NotReady()
    worker.is_stuck = False
    wait_until(lambda: not worker._has_work)
    assert worker.get_data(late, GetData()) == CallRefused("task, attempt 0 is about to be closed at collector/1.")
    assert call.until_done("close_task", False, later=worker.go.set) == Closed({"env_steps": 1})


def test_closing_a_task_ends_what_its_work_waits_for(worker, call):
    held_up(worker, call)
    closing = call.header()
    worker.close_task(closing, True)
    worker.go.set()
    assert call.again("close_task", True, closing) == Closed({"env_steps": 1})
    assert worker.did == ["start", "collect", "close True"]


# --- failures


@pytest.mark.parametrize(
    ("error", "is_permanent"), [(EnvError("it fell over"), False), (UsageError("no such env"), True)]
)
def test_an_exception_in_the_work_is_an_answer(worker, call, error, is_permanent):
    call.until_done("start_task", COLLECT)
    worker.raises = error
    reply = call.until_done("get_data", GetData())
    assert (reply.error, reply.message, reply.is_permanent) == (type(error).__name__, str(error), is_permanent)
    assert "in _hold\n" in reply.traceback
    worker.raises = None
    assert call.until_done("get_data", GetData()) == Collected({"env_steps": 2.0}, 1)


def test_a_start_that_fails_is_cleaned_up_and_may_be_tried_again(worker, call):
    worker.raises = EnvError("no display")
    assert call.until_done("start_task", COLLECT).message == "no display"
    assert worker.did == ["start", "close False"] and worker.ping().phase == "idle"
    worker.raises = None
    assert isinstance(call.say("get_data", GetData()), CallRefused)
    assert isinstance(call.until_done("start_task", COLLECT), Started)


def test_a_close_that_fails_says_so_and_the_task_is_over(worker, call):
    call.until_done("start_task", COLLECT)
    worker.raises = EnvError("will not end")
    assert call.until_done("close_task", True).message == "will not end"
    worker.raises = None
    call.attempt = 1
    assert isinstance(call.until_done("start_task", COLLECT), Started)


def test_a_worker_that_does_not_do_such_work_says_so(worker, call):
    reply = call.until_done("start_task", StartTask("evaluate", "policy"))
    assert isinstance(reply, Failed) and reply.is_permanent
    assert reply.message == "collector/1 cannot evaluate: it works at collect alone."


# --- the end


def test_close_ends_work_that_waits_and_leaves_no_thread(worker, call, monkeypatch):
    monkeypatch.setattr(task_worker, "_CLOSE_TIMEOUT", 60.0)
    held_up(worker, call)
    worker.close()
    assert not worker._thread.is_alive()
    assert worker.did == ["start", "collect", "close False"]
    worker.close()
    assert worker.get_data(call.header(), GetData()) == CallRefused("collector/1 is closed.")
    assert worker.ping().phase == "idle"


def test_close_is_bounded_where_the_work_hangs(worker, call, monkeypatch):
    monkeypatch.setattr(task_worker, "_CLOSE_TIMEOUT", 0.2)
    held_up(worker, call)
    worker.is_stuck = True
    worker.close()
    assert worker._thread.is_alive() and worker._thread.daemon


def test_nobody_waits_for_ping_and_resources_while_it_works(worker, call):
    worker.is_stuck = True
    held_up(worker, call)
    with worker._lock:
        done = threading.Event()
        threading.Thread(target=lambda: (worker.ping(), worker.resources(), done.set())).start()
        assert done.wait(60.0)
