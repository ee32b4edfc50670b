"""Test `Inbox`, a queue with one reader, with threads and signal handlers that add items."""

from __future__ import annotations

import queue
import signal
import threading
import time

import pytest

from rlframe.interprocess.waiting import Inbox


@pytest.fixture
def on_alarm():
    """Return a function `after(seconds, handle)`, which makes a signal handler call `handle` after a delay."""
    before = signal.getsignal(signal.SIGALRM)

    def after(seconds, handle):
        signal.signal(signal.SIGALRM, lambda *_: handle())
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield after
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def test_get_times_out_even_if_a_signal_handler_runs_longer(on_alarm):
    inbox = Inbox()
    on_alarm(0.05, lambda: time.sleep(0.2))
    rescue = threading.Timer(20.0, inbox.put, ("too late",))
    rescue.start()
    with pytest.raises(queue.Empty):
        inbox.get(0.1)
    rescue.cancel()


def test_signal_handler_can_put_an_item_while_the_reader_waits(on_alarm):
    inbox = Inbox()
    on_alarm(0.05, lambda: inbox.put("stop"))
    assert inbox.get(20.0) == "stop"


def test_items_of_each_thread_arrive_once_and_in_order():
    inbox, per_thread = Inbox(), 2_000
    threads = [
        threading.Thread(target=lambda k=k: [inbox.put((k, i)) for i in range(per_thread)], daemon=True)
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    found = [inbox.get(20.0) for _ in range(4 * per_thread)]
    for k in range(4):
        assert [i for thread, i in found if thread == k] == list(range(per_thread))
    with pytest.raises(queue.Empty):
        inbox.get(0.0)
