"""What every store does: one suite over all of them."""

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


class Place:
    """Where a store is: it can be opened again there."""

    def __init__(self, url, space):
        self.url = url
        self.space = space  # the bytes that it takes there
        self.opened = []

    def open(self):
        self.opened.append(open_store(self.url))
        return self.opened[-1]


DURABLE = ["sqlite", "sqlite without sync", "redis"]
SURVIVES = pytest.mark.parametrize("place", DURABLE, indirect=True)  # nothing does in memory


SHARED = pytest.mark.parametrize("place", ["redis"], indirect=True)


@pytest.fixture(params=["memory", *DURABLE])
def place(request, tmp_path):
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
            # The keys only: the server's buffers grow and shrink when it likes.
            place = Place(server.url, lambda: sum(client.memory_usage(key, samples=0) for key in client.keys("*")))
            yield place
            for store in place.opened:
                store.close()
            client.flushall()
        return
    if request.param == "memory":
        place = Place("memory", lambda: sum(map(len, place.opened[0]._payloads.values())))
    else:
        option = "?sync=off" if "without" in request.param else ""
        url = f"sqlite:{tmp_path}/store.db{option}"
        place = Place(url, lambda: sum(entry.stat().st_blocks * 512 for entry in os.scandir(tmp_path)))
    yield place
    for store in place.opened:
        store.close()


@pytest.fixture
def store(place):
    return place.open()


def append_all(store, records):
    return [future.result(DEADLINE) for future in [store.append(*record) for record in records]]


def test_positions_are_in_the_order_of_the_calls_without_gaps(store):
    resolved = []
    futures = [store.append(b"record %d" % number) for number in range(1, 301)]
    for future in futures:
        future.add_done_callback(lambda done: resolved.append(done.result()))
    assert [future.result(DEADLINE) for future in futures] == list(range(1, 301))
    assert store.read(0, 1000) == [(number, b"record %d" % number) for number in range(1, 301)]
    assert store.append(b"last").result(DEADLINE) == 301  # so the callbacks before it are through
    assert sorted(resolved) == list(range(1, 301))


def test_reading_goes_on_after_a_position_and_up_to_a_limit(store):
    assert store.read(0, 10) == []
    append_all(store, [(b"a",), (b"b",), (b"",), (b"d",)])
    assert store.read(0, 2) == [(1, b"a"), (2, b"b")]
    assert store.read(2, 2) == [(3, b""), (4, b"d")]
    assert store.read(4, 2) == []


def test_appends_of_many_threads_keep_each_ones_order(store):
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


def test_payloads_lie_under_the_position_of_their_record(store):
    large = os.urandom(20_000_000)
    append_all(store, [(b"a", b"payload of a"), (b"b",), (b"c", b""), (b"d", large)])
    assert store.payloads([4, 3, 2, 1, 99]) == [large, b"", None, b"payload of a", None]
    assert store.payloads([]) == []
    assert store.payload_positions() == [1, 3, 4]


def held(store, expected):
    """What it holds, after the moment that forgetting may take."""
    end = time.monotonic() + DEADLINE
    while store.payload_positions() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return store.payload_positions()


def test_forgotten_payloads_are_gone_and_their_records_stay(store):
    append_all(store, [(b"a", b"12345"), (b"b", b"123"), (b"c", b"1")])
    store.delete_payloads([1, 3, 99])
    store.delete_payloads([1])
    store.delete_payloads([])
    assert held(store, [2]) == [2]
    assert store.payloads([1, 2, 3]) == [None, b"123", None]
    assert [record for _, record in store.read(0, 10)] == [b"a", b"b", b"c"]


def test_the_space_of_forgotten_payloads_is_used_again(store, place):
    sizes = []
    for _ in range(25):
        positions = append_all(store, [(b"record", os.urandom(size)) for size in range(50_000, 250_000, 10_000)])
        store.delete_payloads(positions[1:])
        store.delete_payloads(positions[:1])
        assert held(store, []) == []
        store.snapshot(positions[-1], b"state").result(DEADLINE)
        sizes.append(place.space())
    smallest_payload = 50_000
    assert sizes[-1] < 1.5 * max(sizes[:5]) + smallest_payload


@SHARED
def test_waiting_ends_when_a_record_is_there(store):
    assert not store.wait(0, 0.05)
    appended = []
    timer = threading.Timer(0.1, lambda: appended.append(store.append(b"a").result(DEADLINE)))
    timer.start()
    assert store.wait(0, DEADLINE)
    timer.join(DEADLINE)
    assert appended == [1]
    assert store.wait(0, 0.0)
    assert not store.wait(1, 0.0)


def test_a_snapshot_stands_for_the_records_up_to_it(store):
    assert store.load() is None
    for number in range(1, 11):  # one after the other: a store may keep what came in one commit for as long as its last
        append_all(store, [(b"%d" % number, b"payload")])
    state = os.urandom(1_000_000)
    assert store.snapshot(6, state).result(DEADLINE) is None
    assert store.load() == (6, state)
    assert store.read(6, 2) == [(7, b"7"), (8, b"8")]
    store.snapshot(4, b"older").result(DEADLINE)
    assert store.load() == (6, state)
    assert store.payload_positions() == list(range(1, 11))  # what is still needed only the service knows
    store.snapshot(10, b"all").result(DEADLINE)
    assert store.load() == (10, b"all")
    assert store.read(10, 10) == []
    with pytest.raises(RecordsDroppedError, match="load the snapshot"):
        store.read(0, 10)
    with pytest.raises(RecordsDroppedError, match="load the snapshot"):
        store.read(3, 10)
    assert append_all(store, [(b"11",)]) == [11]
    assert store.read(10, 10) == [(11, b"11")]


def test_reading_after_a_position_that_was_never_given_is_refused(store):
    append_all(store, [(b"a",)])
    with pytest.raises(StoreError, match="lost"):
        store.read(2, 10)


@SURVIVES
def test_everything_is_there_after_closing_and_opening_again(place):
    store = place.open()
    state = os.urandom(100_000)
    payloads = [os.urandom(size) for size in (1, 4096, 5000, 300_000)]
    append_all(store, [(b"%d" % number, payload) for number, payload in enumerate(payloads, start=1)])
    store.snapshot(2, state).result(DEADLINE)
    store.delete_payloads([2])
    assert held(store, [1, 3, 4]) == [1, 3, 4]
    store.close()
    for opened in range(2):
        store = place.open()
        assert store.load() == (2, state)
        assert store.read(2, 10)[:2] == [(3, b"3"), (4, b"4")]
        assert store.payload_positions() == [1, 3, 4]
        assert store.payloads([1, 2, 3, 4]) == [payloads[0], None, payloads[2], payloads[3]]
        assert append_all(store, [(b"more",)]) == [5 + opened]
        store.close()


@SURVIVES
def test_positions_go_on_where_a_snapshot_left_no_record(place):
    store = place.open()
    append_all(store, [(b"a",), (b"b",)])
    store.snapshot(2, b"state").result(DEADLINE)
    store.close()
    store = place.open()
    assert store.read(2, 10) == []
    assert append_all(store, [(b"c",)]) == [3]


@SURVIVES
def test_closing_writes_what_was_appended(place):
    store = place.open()
    futures = [store.append(b"%d" % number, bytes(10_000)) for number in range(100)]
    store.close()
    store.close()
    assert [future.result(0) for future in futures] == list(range(1, 101))
    with pytest.raises(UnavailableError, match="closed"):
        store.append(b"late")
    assert len(place.open().read(0, 1000)) == 100


@SHARED
def test_closing_ends_the_waiting(store):
    waited = []
    thread = threading.Thread(target=lambda: waited.append(store.wait(0, DEADLINE)))
    thread.start()
    store.close()
    thread.join(DEADLINE)
    assert waited == [False]


def test_nothing_is_appended_to_a_closed_store(store):
    store.close()
    with pytest.raises(UnavailableError, match="closed"):
        store.append(b"late")
