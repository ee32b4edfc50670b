"""Tests of the queue. Each test shows one rule with a small example."""

from __future__ import annotations

import sys

import pytest
from msgspec import msgpack

from rlframe.errors import UsageError
from rlframe.trajectories.queue import leases
from rlframe.trajectories.queue.queue import Queue
from tests.trajectories.queues import SETTINGS, add, batch_of, join, send, started

# Batches.


def test_batch_is_exactly_full_and_oldest_first():
    queue = started()
    assert send(queue, 4, 4, 4, 4, 4) == [0, 1, 2, 3, 4]
    first = queue.take(0.0)
    assert (first.batch_id, first.group_ids, first.step, first.sequences, first.size_bytes) == (0, (0, 1), 0, 8, 200)
    assert batch_of(queue) == [2, 3]
    assert batch_of(queue) is None
    assert queue.status().current_step == 2
    assert queue.status().queue_size == 1


def test_oldest_unit_that_does_not_fit_waits_for_later_batch():
    queue = started()
    a, b = join(queue, 3).env_id, join(queue, 4).env_id
    send(queue, 3, env_id=a)  # After this group of 3, groups of 4 cannot fill the remaining 5 sequences.
    send(queue, 4, 4, env_id=b)
    assert batch_of(queue) == [1, 2]
    assert batch_of(queue) is None
    send(queue, 5)
    assert batch_of(queue) == [0, 3]


def test_unbatchable_groups_are_set_aside_until_an_environment_with_a_fitting_group_size_joins():
    queue = started()
    send(queue, 5, 5, 4, 4)
    assert batch_of(queue) == [2, 3]
    assert queue.status().set_aside == 2
    assert queue.status().queue_size == 2
    batch, waiting = queue.report(0.0).waiting
    assert (batch.env_id, batch.groups) == (None, 0) and "0 of 8" in batch.why
    assert (waiting.env_id, waiting.size, waiting.groups) == (None, 5, 2)
    assert "batch_size 8" in waiting.why
    env = join(queue, 3)
    assert queue.status().set_aside == 0
    send(queue, 3, env_id=env.env_id)
    assert batch_of(queue) == [0, 4]


def test_queue_keeps_groups_sent_before_registration_and_sets_too_large_groups_aside():
    queue = Queue()
    assert send(queue, 4, 9, 4) == [0, 1, 2]
    assert queue.take(0.0) is None
    assert queue.status().queue_size == 3
    queue.register(SETTINGS, "uuid", 0.0)
    assert batch_of(queue) == [0, 2]
    assert queue.status().set_aside == 1
    assert queue.status().waiting_for == [
        "the next batch waits for sequences: 0 of 8 are in the queue.",
        "groups of 9 are set aside: they are larger than batch_size 8.",
    ]


def test_group_larger_than_batch_is_refused_after_registration():
    queue = started()
    refused = add(queue, 9, 90, 100, None, None, None, 0.0)
    assert (refused.status, refused.group_id, refused.too_large) == ("refused", None, True)
    assert "9 sequences, but a batch has 8" in refused.reason
    assert queue.status().stored_bytes == 0
    queue.add(5, 4, 40, 100, None, None, None, 0.0)
    with pytest.raises(UsageError, match="at least 6; got 5"):
        queue.add(5, 4, 40, 100, None, None, None, 0.0)


# Undersized groups.


def test_undersized_groups_are_buffered_until_they_sum_to_group_size():
    queue = started()
    env_id = join(queue, 4).env_id
    answers = [add(queue, size, 0, 100, env_id, None, None, 0.0) for size in (3, 2, 1)]
    assert [(answer.status, answer.buffer_size) for answer in answers] == [("buffered", n) for n in (3, 5, 2)]
    assert (queue.status().queue_size, queue.status().buffered) == (
        2,
        1,
    )  # The groups of 3 and 1 sequences become one unit.
    assert queue.status().waiting_for == [
        "the next batch waits for sequences: 4 of 8 are in the queue.",
        "env_0 (environment 0): 2 sequences in undersized groups wait for others that complete a group of 4.",
    ]
    assert add(queue, 4, 0, 100, env_id, None, None, 0.0).status == "received"
    assert batch_of(queue) == [0, 2, 3]


def test_first_group_sets_missing_group_size():
    queue = started(batch_size=4)
    env = join(queue, None, minimum=0.5)
    assert queue.report(0.0).envs[0].group_size == 1
    assert add(queue, 2, 20, 100, env.env_id, None, None, 0.0).status == "received"
    assert queue.report(0.0).envs[0].group_size == 2
    assert add(queue, 1, 10, 100, env.env_id, None, None, 0.0).status == "buffered"
    restored = Queue()
    restored.set_state(msgpack.decode(msgpack.encode(queue.get_state())))
    assert add(restored, 1, 10, 100, env.env_id, None, None, 0.0).status == "buffered"
    assert batch_of(restored) == [0, 1, 2]
    queue.disconnect_env(env.env_id)
    assert (dict(queue.epoch.envs.sizes), queue.epoch.envs.with_minimum_share) == ({}, {})


def test_group_larger_than_group_size_is_one_unit():
    queue = started()
    env_id = join(queue, 4).env_id
    answer = add(queue, 8, 0, 100, env_id, None, None, 0.0)
    assert (answer.status, answer.buffer_size) == ("buffered", 0)
    assert batch_of(queue) == [0]


def test_new_group_size_repacks_undersized_groups():
    queue = started()
    env = join(queue, 8, token="a")
    send(queue, 2, 2, 3, env_id=env.env_id)
    assert queue.status().buffered == 3
    join(queue, 4, resume="a")
    assert (queue.status().buffered, queue.status().queue_size) == (1, 2)


# Minimum shares.


def test_minimum_shares_are_filled_before_oldest_groups():
    queue = started(batch_size=16)
    a, b = join(queue, 4).env_id, join(queue, 4, minimum=0.5).env_id
    send(queue, 4, 4, 4, 4, 4, env_id=a)
    send(queue, 4, 4, 4, env_id=b)
    assert batch_of(queue) == [0, 1, 5, 6]


def test_batch_waits_for_minimum_share_only_while_environment_is_live():
    queue = started(lapse_after=10.0)
    a, b = join(queue, 4).env_id, join(queue, 4, minimum=0.5).env_id
    send(queue, 4, 4, 4, 4, env_id=a)
    assert batch_of(queue, now=10.0) is None
    assert not queue.may_take(10.0)
    assert any(w.env_id == b and "minimum share of 4" in w.why for w in queue.report(10.0).waiting)
    queue.heartbeat(b, 9.0)  # An earlier time, as from a slow clock. The queue's time stays at 10.0.
    assert batch_of(queue, now=20.0) is None
    assert queue.due(20.1)
    assert queue.may_take(20.1)
    assert batch_of(queue, now=20.1) == [0, 1]
    assert queue.heartbeat(b, 21.0)
    assert batch_of(queue, now=21.0) is None
    queue.disconnect_env(b)
    assert batch_of(queue, now=21.0) == [2, 3]
    assert not queue.heartbeat(7, 21.0)


def test_minimum_shares_are_scaled_down_if_their_sum_exceeds_batch_size():
    queue = started(batch_size=12)
    ids = [join(queue, 2, minimum=minimum).env_id for minimum in (1.0, 0.5)]
    for env_id in ids:
        send(queue, *[2] * 6, env_id=env_id)
    assert batch_of(queue) == [0, 1, 2, 3, 6, 7]  # The shares of 12 and 6 sequences are scaled to 8 and 4.


def test_minimum_share_is_rounded_up_to_whole_groups_if_batch_can_still_be_filled():
    queue = started(batch_size=8)
    a, b = join(queue, 3, minimum=0.25).env_id, join(queue, 5).env_id
    send(queue, 5, env_id=b)
    send(queue, 3, env_id=a)
    assert batch_of(queue) == [0, 1]
    queue = started(batch_size=8)
    a, b = join(queue, 3, minimum=0.25).env_id, join(queue, 4).env_id
    send(queue, 3, env_id=a)
    send(queue, 4, 4, env_id=b)
    assert batch_of(queue) == [1, 2]  # After a group of 3, groups of 3 and 4 cannot fill the remaining 5 sequences.


def test_batch_waits_for_rest_of_minimum_share_if_no_other_group_fits():
    queue = started(batch_size=8)
    a, b = join(queue, 4, minimum=0.5).env_id, join(queue, 8).env_id
    send(queue, 8, env_id=b)
    send(queue, 4, env_id=a)
    assert batch_of(queue) is None  # A second group of 4 could complete the batch, but has not arrived.
    send(queue, 4, env_id=a)
    assert batch_of(queue) == [1, 2]


def test_other_environments_fill_rest_of_minimum_share():
    """A batch waits only for environments that have no queued group, as in atroposlib's server."""
    queue = started(batch_size=16)
    a, b = join(queue, 4, minimum=0.75).env_id, join(queue, 4).env_id
    send(queue, 4, 4, 4, 4, 4, env_id=b)
    assert batch_of(queue) is None
    share = "env_0 (environment 0): every batch waits for its minimum share of 12 sequences, but no queued group fits."
    assert queue.status().waiting_for == [share]
    send(queue, 4, env_id=a)
    assert queue.status().waiting_for == []
    assert batch_of(queue) == [0, 1, 2, 5]


def test_reasons_for_waiting_are_reported():
    queue = Queue()
    assert queue.status().waiting_for == ["every batch waits for a trainer: none has registered (POST /register)."]
    queue.register(SETTINGS, "uuid", 0.0)
    trainer, few = queue.status().waiting_for
    assert trainer.startswith("environments wait to register: the trainer has not requested a batch yet")
    assert few == "the next batch waits for sequences: 0 of 8 are in the queue."
    queue.note_trainer()
    queue.pause()
    send(queue, 4, 4)
    assert queue.status().waiting_for == ["the run is paused: environments start no new groups (POST /resume)."]
    queue.resume()
    assert queue.status().waiting_for == []


def test_failed_attempt_to_form_batch_keeps_order_of_groups():
    queue = started()
    a, b = join(queue, 2, minimum=0.5).env_id, join(queue, 4, minimum=0.5).env_id
    send(queue, *[2] * 5, env_id=a)
    assert batch_of(queue) is None
    send(queue, 4, env_id=b)
    assert batch_of(queue) == [0, 1, 5]


# Tests of batches in which each environment's share is proportional to its weight.


def served(queue, batches):
    """Take the given number of full batches. Return the number of sequences from each environment."""
    before = [env.served_sequences for env in queue.report(0.0).envs]
    for _ in range(batches):
        assert queue.take(0.0).sequences == queue.epoch.registration.batch_size
    return [env.served_sequences - then for env, then in zip(queue.report(0.0).envs, before)]


def test_share_of_each_environment_is_proportional_to_its_weight():
    for mix, expected in (("arrival", [10, 10]), ("weight", [2, 18])):
        queue = started(batch_size=10, mix=mix)
        light, heavy = join(queue, 1, weight=1.0).env_id, join(queue, 1, weight=9.0).env_id
        for _ in range(100):
            send(queue, 1, env_id=light)
            send(queue, 1, env_id=heavy)
        assert served(queue, 2) == expected
    assert [env.wanted_share for env in queue.report(0.0).envs] == [0.1, 0.9]
    assert [env.served_share for env in queue.report(0.0).envs] == [0.1, 0.9]


def test_shares_match_weights_on_average_over_small_batches():
    queue = started(batch_size=4, mix="weight")
    ids = [join(queue, 2, weight=weight).env_id for weight in (1.0, 7.0)]
    for env_id in ids:
        send(queue, *[2] * 100, env_id=env_id)
    assert served(queue, 8) == [4, 28]
    restored = Queue()
    restored.set_state(msgpack.decode(msgpack.encode(queue.get_state())))
    assert served(restored, 8) == served(queue, 8) == [4, 28]


def test_idle_environment_does_not_get_larger_share_later():
    queue = started(batch_size=8, mix="weight")
    heavy, light = join(queue, 2, weight=3.0).env_id, join(queue, 2, weight=1.0).env_id
    send(queue, *[2] * 100, env_id=light)
    send(queue, 2, env_id=heavy)
    assert served(queue, 5) == [2, 38]
    send(queue, *[2] * 100, env_id=heavy)
    assert served(queue, 4) == [24, 8]
    send(queue, *[2] * 100)  # Groups without an environment have a weight of 0.01.
    assert sum(served(queue, 8)) == 64 - 2


def test_minimum_shares_count_toward_weights():
    queue = started(batch_size=8, mix="weight")
    a, b = join(queue, 2, weight=1.0, minimum=0.5).env_id, join(queue, 2, weight=1.0).env_id
    for env_id in (a, b):
        send(queue, *[2] * 100, env_id=env_id)
    assert served(queue, 4) == [16, 16]


# Environments.


def test_environments_wait_for_trainer_and_get_numbered_names():
    queue = Queue()
    assert join(queue) is None
    queue.note_trainer()
    queue.register({**SETTINGS, "starting_step": 7}, "uuid", 0.0)
    assert join(queue) is None
    queue.note_trainer()
    send(queue, 8)
    queue.take(0.0)
    first, second = join(queue, name="math", token="a"), join(queue, name="math", token="b")
    other = join(queue, name="code", token="c")
    assert [env.wandb_name for env in (first, second, other)] == ["math_0", "math_1", "code_0"]
    assert [env.env_id for env in (first, second, other)] == [0, 1, 2]
    assert first.starting_step == 8
    queue.disconnect_env(0)
    again = join(queue, name="math", resume="a", token="d")
    assert (again.env_id, again.wandb_name, again.resume_token) == (0, "math_0", "a")
    assert queue.report(0.0).envs[0].live
    assert join(queue, name="math", resume="lost", token="e").wandb_name == "math_2"
    assert join(queue, name="other", resume="b", token="f").wandb_name == "math_1"  # a name is permanent
    restored = Queue()
    restored.set_state(msgpack.decode(msgpack.encode(queue.get_state())))
    for each in (queue, restored):
        assert join(each, name="math", token="g").wandb_name == "math_3"


def test_env_status_rounds_queued_sequences_up_to_multiple_of_largest_group():
    queue = started(batch_size=32)
    a = join(queue, 4, length=100, weight=3.0, minimum=0.25).env_id
    b = join(queue, 8, length=100, weight=1.0, minimum=0.25).env_id
    c = join(queue, 2, length=0, weight=1.0).env_id
    send(queue, 4, 4, 4, env_id=a)
    send(queue, 8, 8, 8, env_id=b)
    send(queue, 2, env_id=c)
    status = queue.env_status(a)
    # 12 sequences of `a`; 24 of `b`, of which 8 are reserved; 2 of `c`, rounded up to 8. A group of `a` has 4.
    assert status.queue_size == (12 + 16 + 8) // 4
    assert (status.self_queue_size, status.max_group_size, status.current_step) == (3, 8, 0)
    assert (status.env_weight, status.unallocated_fraction) == (0.75, 0.5)
    # 24 sequences of `b`; 12 of `a`, rounded up to 16, of which 8 are reserved; 2 of `c`, rounded up to 8.
    assert queue.env_status(b).queue_size == (24 + 8 + 8) // 8
    assert queue.env_status(c).env_weight == 0.01
    assert queue.env_status(c).queue_size == (2 + 8 + 16) // 2
    queue.disconnect_env(a)
    assert queue.env_status(b).env_weight == 1.0
    assert queue.env_status(b).unallocated_fraction == 0.75
    assert queue.env_status(b).queue_size == (24 + 16 + 8) // 8  # The minimum share of `a` is no longer reserved.
    assert queue.env_status(9) is None


def test_groups_that_fit_into_no_batch_do_not_pause_other_environments():
    queue = started()
    five, three = join(queue, 5).env_id, join(queue, 3).env_id
    send(queue, *[5] * 100, env_id=five)
    assert queue.env_status(three).queue_size == 0  # The next batch waits for a group of this environment.
    assert queue.env_status(five).queue_size == 100
    send(queue, 3, env_id=three)
    assert queue.env_status(three).queue_size == (3 + 500) // 3


def test_paused_environments_wait_and_do_not_quit():
    queue = started(num_steps=100)
    env_id = join(queue, 4).env_id
    assert not queue.env_status(env_id).hold
    queue.pause()
    status = queue.env_status(env_id)
    assert (status.hold, status.queue_size, status.self_queue_size) == (True, 64 * 8 // 4, 64 * 8 // 4)
    queue.resume()
    assert queue.env_status(env_id).queue_size == 0
    assert queue.env_status(env_id, hold=True).queue_size == 128
    queue = started(num_steps=100, starting_step=90)
    queue.pause()
    status = queue.env_status(join(queue, 4).env_id)
    # atroposlib's client stops if current_step plus the number of queued batches exceeds num_steps, here 100.
    assert status.current_step + status.queue_size * 4 // 8 == 100


def test_limited_report_has_environments_with_latest_heartbeats():
    queue = started(lapse_after=10.0)
    for now in range(6):
        join(queue, now=float(now))
    queue.heartbeat(1, 6.0)
    queue.disconnect_env(5)
    send(queue, 4, now=7.0)
    reports = [queue.report(12.0, envs) for envs in (0, 2, 5, 6)]
    assert [[env.env_id for env in report.envs] for report in reports] == [[], [1, 4], [0, 1, 2, 3, 4], list(range(6))]
    assert {(report.registered_envs, report.oldest_age) for report in reports} == {(6, 5.0)}
    queue.expire(14.5)
    assert [env.env_id for env in queue.report(14.5, 2).envs] == [1, 5]
    assert queue.report(14.5, 3).envs[1].live is False


# Epochs.


def test_same_registration_is_confirmed_and_different_registration_resets_run():
    queue = started()
    join(queue)
    send(queue, 4, 4, 4)
    assert queue.register(SETTINGS, "other", 0.0) == "uuid"
    assert batch_of(queue, lease_seconds=5.0) == [0, 1]
    assert queue.register({**SETTINGS, "batch_size": 4, "starting_step": 3}, "other", 0.0) == "other"
    assert queue.epoch.number == 1
    assert queue.epoch.released == [2, 0, 1]
    status = queue.status()
    assert (status.current_step, status.queue_size, status.leased, status.stored_bytes) == (3, 0, 0, 0)
    assert not queue.epoch.started
    assert send(queue, 4) == [3]
    assert batch_of(queue) == [3]


def test_groups_sent_after_reset_are_kept_for_next_registration():
    queue = started()
    send(queue, 4)
    queue.reset(0.0)
    assert queue.epoch.released == [0]
    assert queue.epoch.registration is None
    send(queue, 8)
    queue.register(SETTINGS, "uuid", 0.0)
    assert queue.epoch.number == 1
    assert queue.epoch.released == []
    assert batch_of(queue) == [1]


def test_same_run_key_continues_run_and_different_key_resets_run():
    queue = Queue()
    one = {**SETTINGS, "run_key": "one"}
    assert queue.register(one, "a", 0.0) == "a"
    queue.note_trainer()
    env = join(queue, 4, minimum=0.5)
    send(queue, 4, 4, 4, 4, env_id=env.env_id)
    assert batch_of(queue) == [0, 1]
    assert queue.register(one, "b", 0.0) == "a"  # another rank
    assert queue.register({**one, "batch_size": 4, "lapse_after": 5.0}, "c", 0.0) == "a"  # resumed
    assert (queue.status().current_step, queue.status().epoch, queue.due(5.1)) == (1, 0, True)
    assert batch_of(queue) == [2]
    for key in ("two", None):
        assert queue.register({**SETTINGS, "run_key": key}, f"{key}", 0.0) == f"{key}"
        assert (queue.status().current_step, queue.status().queue_size) == (0, 0)
        send(queue, 4)


def test_invalid_registration_changes_nothing():
    queue = started()
    before = queue.get_state()
    with pytest.raises(UsageError, match="needs max_staleness"):
        queue.register({**SETTINGS, "stale": "discard"}, "uuid", 5.0)
    assert queue.get_state() == before


# Tests of idempotency keys and leases.


def test_request_with_repeated_idempotency_key_gets_answer_of_first_request():
    queue = started()
    env_id = join(queue, 8).env_id
    first = add(queue, 3, 0, 100, env_id, None, "key", 0.0)
    send(queue, 2, env_id=env_id)
    again = add(queue, 3, 0, 100, env_id, None, "key", 1.0)
    assert again.duplicate
    assert (again.status, again.buffer_size) == (first.status, first.buffer_size) == ("buffered", 3)
    assert queue.status().buffered == 2
    assert add(queue, 3, 0, 100, env_id, None, "key", leases.KEY_TTL).duplicate
    assert not add(queue, 3, 0, 100, env_id, None, "key", 2 * leases.KEY_TTL).duplicate


def test_only_latest_idempotency_keys_are_kept(monkeypatch):
    monkeypatch.setattr(leases, "MAX_KEYS", 2)
    queue = started()
    for key in "abc":
        send(queue, 1, key=key)
    assert add(queue, 1, 0, 1, None, None, "b", 0.0).duplicate
    for key in "de":
        send(queue, 1, key=key)
    assert add(queue, 1, 0, 1, None, None, "c", 0.0).duplicate
    assert not add(queue, 1, 0, 1, None, None, "a", 0.0).duplicate
    restored = Queue()
    restored.set_state(msgpack.decode(msgpack.encode(queue.get_state())))
    for key, known in {"a": True, "c": True, "d": True, "e": True, "b": False}.items():
        assert add(restored, 1, 0, 1, None, None, key, 0.0).duplicate == known


def test_batch_with_expired_lease_is_redelivered_with_same_step_before_new_batches():
    queue = started()
    send(queue, 4, 4, 4, 4)
    first = queue.take(0.0, lease_seconds=10.0, consumer="a")
    assert (first.lease_until, first.delivery) == (10.0, 1)
    assert queue.epoch.released == []
    assert not queue.due(9.9)
    assert queue.due(10.0)
    queue.expire(10.0)
    assert list(queue.epoch.leases.returned) == [first.batch_id]
    again = queue.take(11.0, lease_seconds=10.0, consumer="b")
    assert (again.batch_id, again.group_ids, again.step, again.delivery) == (0, (0, 1), 0, 2)
    assert not queue.nack(0, consumer="a")  # Client `a` no longer owns the batch.
    assert queue.nack(0, consumer="b")
    assert queue.ack(0)  # A late acknowledgment is accepted.
    assert queue.epoch.released == [0, 1]
    assert not queue.ack(0)
    assert batch_of(queue, now=11.0) == [2, 3]
    assert queue.epoch.released == [2, 3]
    assert (queue.status().current_step, queue.status().stored_bytes) == (2, 0)


def test_renewed_lease_ends_later():
    queue = started()
    send(queue, 8)
    queue.take(0.0, lease_seconds=10.0, consumer="a")
    assert not queue.renew(0, 10.0, 5.0, consumer="b")
    assert queue.renew(0, 10.0, 5.0, consumer="a")
    assert not queue.due(14.9)
    assert queue.take(12.0, 5.0, consumer="b") is None
    queue.expire(15.0)
    assert list(queue.epoch.leases.returned) == [0]
    assert not queue.renew(0, 10.0, 15.0, consumer="a")  # The lease has expired, so the batch has no owner.
    for now in range(1000):
        queue.take(20.0 + now, 5.0) if now == 0 else queue.renew(0, 5.0, 20.0 + now)
    assert len(queue.get_state()["epoch"]["leases"][0]) == 1
    assert queue.due(1024.0) and not queue.due(1023.9)


def test_same_request_gets_same_batch():
    queue = started()
    send(queue, 8, 8, 8, 8)
    first = queue.take(0.0, consumer="a", request="1")
    assert queue.take(0.0, consumer="a", request="1") == first
    assert queue.epoch.released == []  # The queue keeps the batch for further retries of request "1".
    leased = queue.take(0.0, 5.0, consumer="a", request="2")
    assert queue.epoch.released == [0]
    assert leased.group_ids == (1,)
    assert queue.take(1.0, 5.0, consumer="a", request="2") == leased
    # The lease has ended, but no other consumer has taken the batch.
    back = queue.take(6.0, 5.0, consumer="a", request="2")
    assert (back.batch_id, back.delivery, back.lease_until) == (1, 2, 11.0)
    queue.nack(1)
    assert queue.take(6.0, 5.0, consumer="b", request="1").batch_id == 1
    assert queue.take(6.0, 5.0, consumer="a", request="2").batch_id == 2


def test_batch_without_lease_is_kept_one_hour_for_retries_of_its_request():
    queue = started()
    send(queue, 8, 8, 8)
    first = queue.take(0.0, consumer="a", request="1")
    assert queue.report(0.0).batches_kept == 1
    assert not queue.due(3599.0) and queue.take(3599.0, consumer="a", request="1") == first
    queue.take(100.0, 1e6, consumer="b", request="1")
    restored = Queue()
    restored.set_state(queue.get_state())
    for one in (queue, restored):
        assert one.due(3600.0)
        one.expire(3600.0)
        assert not one.epoch.leases.returned  # No batch goes back to the queue, because no lease ended.
        assert one.epoch.released == [0]
        assert (one.report(3600.0).batches_kept, one.status().stored_bytes) == (0, 200)
        assert not one.due(3600.0)
    assert batch_of(queue, 3600.0, consumer="a", request="1") == [2]
    queue.reset(7300.0)  # One hour has passed since the last request of each consumer.
    assert sorted(queue.epoch.released) == [1, 2]


# Staleness.


def test_staleness_is_counted_per_group():
    queue = started()
    send(queue, 4, version=3)
    send(queue, 4)
    queue.set_policy_version(5)
    batch = queue.take(0.0)
    assert batch.staleness == (2, None)
    queue.set_policy_version(6)
    send(queue, 8, version=6)
    assert queue.take(0.0).staleness == (0,)
    assert queue.report(0.0).staleness == type(queue.report(0.0).staleness)(groups=2, mean=1.0, largest=2)


def test_group_that_would_become_stale_is_refused_and_environment_waits():
    queue = started(max_staleness=1)
    env_id = join(queue, 8).env_id
    queue.set_policy_version(4)
    send(queue, 8, env_id=env_id, version=3)
    assert not queue.env_status(env_id).hold
    refused = add(
        queue, 8, 0, 100, env_id, 3, None, 0.0
    )  # The group is one version old, and one batch is queued before it.
    assert (refused.status, refused.too_large) == ("refused", False)
    assert "2 policy versions old; the trainer accepts at most 1" in refused.reason
    assert send(queue, 8, env_id=env_id) == [1]  # The queue accepts a group without a policy version.
    assert queue.env_status(env_id).hold
    queue.take(0.0)
    assert not queue.env_status(env_id).hold


def test_group_is_not_refused_as_stale_if_next_batch_needs_it():
    queue = started(max_staleness=0)
    queue.set_policy_version(1)
    five, three = join(queue, 5).env_id, join(queue, 3).env_id
    send(queue, 5, 5, env_id=five)
    send(queue, 3, env_id=three, version=1)
    assert batch_of(queue) == [0, 2]
    queue = started(max_staleness=0)
    queue.set_policy_version(1)
    eight, four = join(queue, 8).env_id, join(queue, 4, minimum=0.5).env_id
    send(queue, 8, 8, env_id=eight)
    assert batch_of(queue) is None
    send(
        queue, 4, 4, env_id=four, version=1
    )  # After one group of 4, a group of 8 does not fit, so a second group of 4 must fill the batch.
    assert add(queue, 4, 0, 100, four, 1, None, 0.0).status == "refused"
    assert batch_of(queue) == [2, 3]


def test_environment_is_not_paused_if_next_batch_needs_its_groups():
    queue = started(max_staleness=0)
    five, three = join(queue, 5).env_id, join(queue, 3).env_id
    send(queue, *[5] * 10, env_id=five)
    assert queue.env_status(five).hold
    assert not queue.env_status(three).hold
    four, eight = join(queue, 4, minimum=0.5).env_id, join(queue, 8).env_id
    send(queue, 8, 8, env_id=eight)
    send(queue, 4, env_id=four)
    assert queue.env_status(eight).hold
    assert not queue.env_status(four).hold


def test_stale_groups_are_dropped_only_if_option_stale_is_discard():
    for stale, expected in (("keep", [0, 1]), ("discard", [3, 4])):
        queue = started(max_staleness=1, stale=stale)
        send(queue, 4, 4, 4, version=1)
        send(queue, 4, version=2)
        send(queue, 4)
        queue.set_policy_version(3)
        assert batch_of(queue) == expected
    assert queue.report(0.0).discarded == 3
    assert sorted(queue.epoch.released) == [0, 1, 2, 3, 4]
    assert queue.status().stored_bytes == 0


def test_fresh_group_is_kept_if_other_group_of_its_unit_is_stale():
    queue = started(max_staleness=1, stale="discard")
    env_id = join(queue, 4).env_id
    send(queue, 3, env_id=env_id, version=1)
    send(queue, 1, env_id=env_id, version=2)
    send(queue, 4, env_id=env_id, version=2)
    queue.set_policy_version(3)
    assert batch_of(queue) is None
    assert queue.epoch.released == [0]
    send(queue, 3, env_id=env_id)
    assert batch_of(queue) == [2, 1, 3]


# Tests of the saved state and of the amount of work.


def test_restored_queue_gives_same_answers():
    queue = started(max_staleness=3, stale="discard")
    env_id = join(queue, 4, minimum=0.5, token="a").env_id
    send(queue, 4, 1, 4, 2, 4, env_id=env_id, version=1, key=None)
    send(queue, 8, 4, key="k")
    queue.set_policy_version(2)
    queue.take(1.0, 5.0, "a", "1")
    restored = Queue()
    restored.set_state(msgpack.decode(msgpack.encode(queue.get_state())))
    assert restored.get_state() == queue.get_state()
    for q in (queue, restored):
        q.nack(0)
    assert restored.env_status(env_id) == queue.env_status(env_id)
    assert restored.report(2.0) == queue.report(2.0)
    while (batch := queue.take(3.0)) is not None:
        assert restored.take(3.0) == batch
    assert restored.take(3.0) is None


def test_apply_refuses_methods_that_are_not_commands():
    with pytest.raises(UsageError, match="not a command"):
        Queue().apply("set_state", {})


def steps_of(function) -> int:
    """Return the number of bytecode instructions that the function executes. The number does not depend on timing."""
    steps = 0

    def trace(frame, event, _):
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if one frame already has this flag.
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return steps


def test_work_is_independent_of_queue_length():
    work = []
    for groups in (400, 8_000):
        queue = started()
        envs = [join(queue, 4 if i % 2 else 8, minimum=0.5 if i == 3 else None).env_id for i in range(20)]
        for i in range(groups):
            send(queue, 4 if i % 2 else 8, env_id=envs[i % 20], version=0)
        queue.env_status(0), queue.take(0.0), queue.take(0.0)
        calls = {
            "add": lambda queue=queue: send(queue, 4, env_id=1),
            "undersized": lambda queue=queue: send(queue, 2, env_id=1),
            "take": lambda queue=queue: queue.take(0.0),
            "env_status": lambda queue=queue: queue.env_status(5),
            "status": lambda queue=queue: queue.status(),
            "may_take": lambda queue=queue: queue.may_take(0.0),
        }
        work.append({name: steps_of(call) for name, call in calls.items()})
    short, long = work
    for name, steps in long.items():
        assert steps < 1.3 * short[name] + 100, work


def test_groups_wait_for_no_others_after_a_smaller_batch_size_is_registered():
    queue = Queue()
    queue.register({**SETTINGS, "batch_size": 8, "run_key": "k"}, "1", 0.0)
    queue.note_trainer()
    join(queue, group_size=4)
    send(queue, 2, env_id=0)
    queue.register({**SETTINGS, "batch_size": 2, "run_key": "k"}, "2", 1.0)
    batch = queue.take(2.0)
    assert batch is not None and batch.sequences == 2
