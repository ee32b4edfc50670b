"""Tests that every store (memory, SQLite, Redis) behaves as the class `Store` documents."""

from __future__ import annotations

import os
import threading
import time

import pytest
import redis

from rlframe.errors import StoreError, UnavailableError
from rlframe.trajectories.stores import RecordsDroppedError, open_store
from tests.trajectories.redis_server import redis_server  # noqa: F401

DEADLINE = 60.0


class StoreLocation:
    """The URL of a store. A test can open the store several times."""

    def __init__(self, url, space):
        self.url = url
        self.space = space  # a function that returns the number of bytes that the store uses
        self.opened = []

    def open(self):
        self.opened.append(open_store(self.url))
        return self.opened[-1]


DURABLE = ["sqlite", "sqlite without sync", "redis"]
SURVIVES = pytest.mark.parametrize("location", DURABLE, indirect=True)  # without the memory store, which loses its data


SHARED = pytest.mark.parametrize("location", ["redis"], indirect=True)


@pytest.fixture(params=["memory", *DURABLE])
def location(request, tmp_path):
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
            # Count only the memory of the keys, because the size of the server's buffers varies.
            location = StoreLocation(
                server.url, lambda: sum(client.memory_usage(key, samples=0) for key in client.keys("*"))
            )
            yield location
            for store in location.opened:
                store.close()
            client.flushall()
        return
    if request.param == "memory":
        location = StoreLocation("memory", lambda: sum(map(len, location.opened[0]._payloads.values())))
    else:
        option = "?sync=off" if "without" in request.param else ""
        url = f"sqlite:{tmp_path}/store.db{option}"
        location = StoreLocation(url, lambda: sum(entry.stat().st_blocks * 512 for entry in os.scandir(tmp_path)))
    yield location
    for store in location.opened:
        store.close()


@pytest.fixture
def store(location):
    return location.open()


def append_all(store, records):
    return [future.result(DEADLINE) for future in [store.append(*record) for record in records]]


def test_positions_follow_order_of_calls_without_gaps(store):
    resolved = []
    futures = [store.append(b"record %d" % number) for number in range(1, 301)]
    for future in futures:
        future.add_done_callback(lambda done: resolved.append(done.result()))
    assert [future.result(DEADLINE) for future in futures] == list(range(1, 301))
    assert store.read(0, 1000) == [(number, b"record %d" % number) for number in range(1, 301)]
    # After this append, the callbacks of all earlier appends have run.
    assert store.append(b"last").result(DEADLINE) == 301
    assert sorted(resolved) == list(range(1, 301))


def test_read_returns_records_after_position_up_to_limit(store):
    assert store.read(0, 10) == []
    append_all(store, [(b"a",), (b"b",), (b"",), (b"d",)])
    assert store.read(0, 2) == [(1, b"a"), (2, b"b")]
    assert store.read(2, 2) == [(3, b""), (4, b"d")]
    assert store.read(4, 2) == []


def test_appends_of_each_thread_keep_their_order(store):
    given = {}

    def append(thread):
        for number in range(40):
            record = b"%d %d" % (thread, number)
            given[store.append(record, record * 500).result(DEADLINE)] = record

    threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    log = store.read(0, 1000)
    assert dict(log) == given
    assert [position for position, _ in log] == list(range(1, 321))
    for thread in range(8):
        mine = [record for _, record in log if record.startswith(b"%d " % thread)]
        assert mine == [b"%d %d" % (thread, number) for number in range(40)]
    assert store.payloads(range(1, 321)) == [given[position] * 500 for position in range(1, 321)]


def test_payloads_are_found_by_position_of_their_record(store):
    large = os.urandom(20_000_000)
    append_all(store, [(b"a", b"payload of a"), (b"b",), (b"c", b""), (b"d", large)])
    assert store.payloads([4, 3, 2, 1, 99]) == [large, b"", None, b"payload of a", None]
    assert store.payloads([]) == []
    assert store.payload_positions() == [1, 3, 4]


def wait_for_payload_positions(store, expected):
    """Wait until the store has the expected payload positions, because deletions take time. Return the positions."""
    end = time.monotonic() + DEADLINE
    while store.payload_positions() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return store.payload_positions()


def test_deletion_of_payloads_keeps_their_records(store):
    append_all(store, [(b"a", b"12345"), (b"b", b"123"), (b"c", b"1")])
    store.delete_payloads([1, 3, 99])
    store.delete_payloads([1])
    store.delete_payloads([])
    assert wait_for_payload_positions(store, [2]) == [2]
    assert store.payloads([1, 2, 3]) == [None, b"123", None]
    assert [record for _, record in store.read(0, 10)] == [b"a", b"b", b"c"]


def test_space_of_deleted_payloads_is_reused(store, location):
    sizes = []
    for _ in range(25):
        positions = append_all(store, [(b"record", os.urandom(size)) for size in range(50_000, 250_000, 10_000)])
        store.delete_payloads(positions[1:])
        store.delete_payloads(positions[:1])
        assert wait_for_payload_positions(store, []) == []
        store.snapshot(positions[-1], b"state").result(DEADLINE)
        sizes.append(location.space())
    smallest_payload = 50_000
    assert sizes[-1] < 1.5 * max(sizes[:5]) + smallest_payload


@SHARED
def test_wait_ends_when_record_is_appended(store):
    assert not store.wait(0, 0.05)
    appended = []
    timer = threading.Timer(0.1, lambda: appended.append(store.append(b"a").result(DEADLINE)))
    timer.start()
    assert store.wait(0, DEADLINE)
    timer.join(DEADLINE)
    assert appended == [1]
    assert store.wait(0, 0.0)
    assert not store.wait(1, 0.0)


def test_snapshot_replaces_records_up_to_its_position(store):
    assert store.load() is None
    for number in range(1, 11):  # Commit each record alone, because a store can drop only a whole commit.
        append_all(store, [(b"%d" % number, b"payload")])
    state = os.urandom(1_000_000)
    assert store.snapshot(6, state).result(DEADLINE) is None
    assert store.load() == (6, state)
    assert store.read(6, 2) == [(7, b"7"), (8, b"8")]
    store.snapshot(4, b"older").result(DEADLINE)
    assert store.load() == (6, state)
    assert store.payload_positions() == list(range(1, 11))  # A snapshot deletes no payloads.
    store.snapshot(10, b"all").result(DEADLINE)
    assert store.load() == (10, b"all")
    assert store.read(10, 10) == []
    with pytest.raises(RecordsDroppedError, match="load the snapshot"):
        store.read(0, 10)
    with pytest.raises(RecordsDroppedError, match="load the snapshot"):
        store.read(3, 10)
    assert append_all(store, [(b"11",)]) == [11]
    assert store.read(10, 10) == [(11, b"11")]


def test_read_after_unknown_position_is_refused(store):
    append_all(store, [(b"a",)])
    with pytest.raises(StoreError, match="lost"):
        store.read(2, 10)


@SURVIVES
def test_reopened_store_has_everything(location):
    store = location.open()
    state = os.urandom(100_000)
    payloads = [os.urandom(size) for size in (1, 4096, 5000, 300_000)]
    append_all(store, [(b"%d" % number, payload) for number, payload in enumerate(payloads, start=1)])
    store.snapshot(2, state).result(DEADLINE)
    store.delete_payloads([2])
    assert wait_for_payload_positions(store, [1, 3, 4]) == [1, 3, 4]
    store.close()
    for opened in range(2):
        store = location.open()
        assert store.load() == (2, state)
        assert store.read(2, 10)[:2] == [(3, b"3"), (4, b"4")]
        assert store.payload_positions() == [1, 3, 4]
        assert store.payloads([1, 2, 3, 4]) == [payloads[0], None, payloads[2], payloads[3]]
        assert append_all(store, [(b"more",)]) == [5 + opened]
        store.close()


@SURVIVES
def test_positions_continue_after_all_records_are_replaced_by_snapshot(location):
    store = location.open()
    append_all(store, [(b"a",), (b"b",)])
    store.snapshot(2, b"state").result(DEADLINE)
    store.close()
    store = location.open()
    assert store.read(2, 10) == []
    assert append_all(store, [(b"c",)]) == [3]


@SURVIVES
def test_close_writes_pending_appends(location):
    store = location.open()
    futures = [store.append(b"%d" % number, bytes(10_000)) for number in range(100)]
    store.close()
    store.close()
    assert [future.result(0) for future in futures] == list(range(1, 101))
    with pytest.raises(UnavailableError, match="closed"):
        store.append(b"late")
    assert len(location.open().read(0, 1000)) == 100


@SHARED
def test_close_ends_wait(store):
    waited = []
    thread = threading.Thread(target=lambda: waited.append(store.wait(0, DEADLINE)))
    thread.start()
    store.close()
    thread.join(DEADLINE)
    assert waited == [False]


def test_append_to_closed_store_is_refused(store):
    store.close()
    with pytest.raises(UnavailableError, match="closed"):
        store.append(b"late")
