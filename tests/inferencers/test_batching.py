"""Test that a few calls of `act` answer many callers, and that each caller gets the answer to its own request."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rlframe.errors import UnavailableError, UsageError
from rlframe.inferencers.batching import Batcher, bucket_of
from rlframe.types import FIRST, AgentOutput, TimeStep
from tests.fakes import counting_agent
from tests.waiting import wait_until

DEADLINE = 30.0


def request(rows, first=0.0):
    """Return a request of `rows` rows. The observation of row i is (first + i, 0), so each row can be identified."""
    observation = np.zeros((rows, 2), np.float32)
    observation[:, 0] = first + np.arange(rows)
    ones = np.ones(rows, np.float32)
    return (
        np.arange(rows),
        TimeStep(np.full(rows, FIRST), ones, ones, observation),
        {"seen": np.zeros(rows, np.float32)},
    )


def echo(env_ids, timestep, state):
    """Return each row's observation as its action, and the state array that was passed."""
    return AgentOutput(timestep.observation[:, 0].astype(np.int32), {}, 7), state


class Gate:
    """Returns the result of `echo`, but each call waits until `opened` is set."""

    def __init__(self):
        self.entered, self.opened, self.sizes = threading.Semaphore(0), threading.Event(), []

    def __call__(self, env_ids, timestep, state):
        self.sizes.append(len(timestep.step_type))
        self.entered.release()
        assert self.opened.wait(DEADLINE)
        return echo(env_ids, timestep, state)

    def occupy(self, batcher, rows):
        """Start two calls of `rows` rows. The Batcher runs at most two at once, so later calls wait."""
        results, threads = [], []
        for _ in range(2):
            result, thread = call_in_threads(batcher, [request(rows)])
            assert self.entered.acquire(timeout=DEADLINE)
            results.append(result)
            threads += thread
        return results, threads


def call_in_threads(call, requests):
    """Start a thread for each request. Return (list of results or errors, list of threads)."""
    results = [None] * len(requests)

    def run(i):
        try:
            results[i] = call(*requests[i])
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    return results, threads


def join(threads):
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_simultaneous_callers_share_one_call_and_get_their_own_rows():
    calls = []

    def act(*args):
        calls.append(len(args[1].step_type))
        return echo(*args)

    # The batch runs when it has 32 rows.
    batcher = Batcher(counting_agent(), act, max_rows=32, max_wait=DEADLINE, timeout=DEADLINE)
    results, threads = call_in_threads(batcher, [request(4, first=100.0 * i) for i in range(8)])
    join(threads)
    assert calls == [32]
    for i, (output, state) in enumerate(results):
        np.testing.assert_array_equal(output.action, 100 * i + np.arange(4))
        assert output.params_version == 7 and output.action.flags.writeable and state["seen"].shape == (4,)


def test_requests_during_a_call_are_answered_by_the_next_call():
    gate = Gate()
    batcher = Batcher(counting_agent(), gate, max_rows=16, max_wait=0.0, timeout=DEADLINE)
    _, leader = gate.occupy(batcher, 16)
    rest, others = call_in_threads(batcher, [request(5, first=10.0 * i) for i in range(5)])
    wait_until(lambda: batcher.waiting == 5)
    gate.opened.set()
    join([*leader, *others])
    assert sorted(gate.sizes[2:]) == [12, 16]  # two requests of 5 rows, padded to 12, and three requests, padded to 16
    assert batcher.counts == {"requests": 7, "calls": 4, "rows": 57, "padding_rows": 3}
    for i in range(5):
        np.testing.assert_array_equal(rest[i][0].action, 10 * i + np.arange(5))


def test_second_batch_starts_during_the_first_if_it_has_as_many_rows():
    gate = Gate()
    batcher = Batcher(counting_agent(), gate, max_rows=32, max_wait=0.0, timeout=DEADLINE)
    first, leader = call_in_threads(batcher, [request(10)])
    assert gate.entered.acquire(timeout=DEADLINE)
    some, waits = call_in_threads(batcher, [request(6, first=100.0)])
    wait_until(lambda: batcher.waiting == 1)
    more, joins = call_in_threads(batcher, [request(4, first=200.0)])
    assert gate.entered.acquire(timeout=DEADLINE)
    assert gate.sizes == [12, 12]
    gate.opened.set()
    join([*leader, *waits, *joins])
    for (output, _), start, rows in ((first[0], 0, 10), (some[0], 100, 6), (more[0], 200, 4)):
        np.testing.assert_array_equal(output.action, start + np.arange(rows))


def test_answer_is_not_overwritten_by_a_later_call():
    batcher = Batcher(counting_agent(), echo, max_rows=16, max_wait=0.0)
    env_ids, timestep, _ = request(3)
    _, state = batcher(env_ids, timestep, {"seen": np.full(3, 5.0, np.float32)})
    batcher(env_ids, timestep, {"seen": np.full(3, 6.0, np.float32)})
    np.testing.assert_array_equal(state["seen"], [5.0, 5.0, 5.0])


def test_stop_refuses_waiting_calls_and_answers_running_calls():
    gate = Gate()
    batcher = Batcher(counting_agent(), gate, max_rows=8, max_wait=0.0, timeout=DEADLINE)
    first, leader = gate.occupy(batcher, 8)
    waiting, others = call_in_threads(batcher, [request(8)] * 3)
    wait_until(lambda: batcher.waiting == 3)
    batcher.stop("The service has stopped.")
    join(others)
    assert [str(error) for error in waiting] == ["The service has stopped."] * 3
    assert all(isinstance(error, UnavailableError) for error in waiting)
    gate.opened.set()
    join(leader)
    assert all(isinstance(answer, tuple) for [answer] in first)
    with pytest.raises(UnavailableError, match="has stopped"):
        batcher(*request(2))


def test_call_that_waits_too_long_is_refused_without_blocking_other_calls():
    gate = Gate()
    batcher = Batcher(counting_agent(), gate, max_rows=8, max_wait=0.0, timeout=0.05)
    first, leader = gate.occupy(batcher, 8)
    with pytest.raises(UnavailableError, match=r"busy for 0.05 s. Call again"):
        batcher(*request(4))
    gate.opened.set()
    join(leader)
    output, _ = batcher(*request(4, first=50.0))
    np.testing.assert_array_equal(output.action, 50 + np.arange(4))
    assert all(isinstance(answer, tuple) for [answer] in first) and batcher.counts["requests"] == 3


def test_request_that_does_not_match_the_specs_does_not_affect_other_requests():
    batcher = Batcher(counting_agent(), echo, max_rows=16, max_wait=0.0)
    env_ids, timestep, state = request(4)
    with pytest.raises(UsageError, match=r"observation should be \[B, 2\] float32, got \[4, 3\]"):
        batcher(env_ids, timestep._replace(observation=np.zeros((4, 3), np.float32)), state)
    with pytest.raises(UsageError, match=r"seen.* should be \[B\] float32, got \[4\] float64"):
        batcher(env_ids, timestep, {"seen": np.zeros(4)})
    with pytest.raises(UsageError, match=r"got 3 env_ids, but arrays with \[4\] rows"):
        batcher(env_ids[:3], timestep, state)
    assert batcher.counts["calls"] == 0
    batcher(env_ids, timestep, state)


def test_error_in_a_batch_is_raised_for_all_its_callers_and_later_batches_work():
    gate = Gate()

    def act(*args):
        answer = gate(*args)
        if args[1].observation[0, 0] == 50.0:
            raise ZeroDivisionError("agent")
        return answer

    batcher = Batcher(counting_agent(), act, max_rows=8, max_wait=0.0, timeout=DEADLINE)
    _, leader = gate.occupy(batcher, 8)
    results, others = call_in_threads(batcher, [request(4, first=50.0)] * 2)
    wait_until(lambda: batcher.waiting == 2)
    gate.opened.set()
    join([*leader, *others])
    assert [type(result) for result in results] == [ZeroDivisionError] * 2
    batcher(*request(4))


@pytest.mark.parametrize(
    ("rows", "max_rows", "bucket"),
    [(1, 64, 8), (9, 64, 12), (13, 64, 16), (33, 64, 48), (49, 64, 64), (30, 30, 30), (3, 4, 4), (65, 64, 96)],
)
def test_batches_are_padded_to_the_next_bucket_or_to_max_rows(rows, max_rows, bucket):
    assert bucket_of(rows, max_rows) == bucket


def test_number_of_buckets_is_small():
    assert {bucket_of(rows, 256) for rows in range(1, 257)} == {8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256}
