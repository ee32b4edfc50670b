from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import pytest
import redis

from rlframe.errors import PeerError, StoreError, UnavailableError
from rlframe.trajectories.stores import RecordsDroppedError, open_store
from rlframe.trajectories.stores.redis import RedisStore
from tests.ports import free_port
from tests.trajectories.redis_server import running_redis

DEADLINE = 60.0
ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def server(tmp_path):
    with running_redis(tmp_path, appendonly="yes", appendfsync="always") as server:
        yield server


@pytest.fixture
def forgetful(tmp_path):
    """Run a Redis server that does not save its data to disk."""
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture
def opened():
    """Return a function that opens stores. Close the stores at the end."""
    with contextlib.ExitStack() as stack:

        def open_(url, **settings):
            return stack.enter_context(contextlib.closing(RedisStore(url, **settings)))

        yield open_


def append(store, *records):
    return [future.result(DEADLINE) for future in [store.append(record, b"of " + record) for record in records]]


APPENDING = """
import sys
from rlframe.trajectories.stores import open_store
url, name = sys.argv[1:]
store = open_store(url)
print("open", flush=True)
sys.stdin.readline()
positions = []
while len(positions) < 1000 or positions[-1] == len(positions):  # until the other process has appended too
    records = [b"%s %d" % (name.encode(), n) for n in range(len(positions), len(positions) + 20)]
    positions += [future.result(60) for future in [store.append(record, record * 100) for record in records]]
print(*positions)
store.close()
"""


def test_two_processes_get_distinct_positions_without_gaps(server, opened):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", APPENDING, server.url, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for name in "ab"
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == b"open\n"
        positions = []
        for process in processes:
            process.stdin.write(b"go\n")
            process.stdin.flush()
        for process in processes:
            positions.append([int(word) for word in process.communicate(timeout=DEADLINE)[0].split()])
    finally:
        for process in processes:
            process.kill()
            process.wait(DEADLINE)
    total = len(positions[0]) + len(positions[1])
    assert sorted(positions[0] + positions[1]) == list(range(1, total + 1))
    # The positions of the two processes are interleaved, so the processes appended at the same time.
    assert min(positions[1]) < max(positions[0]) and min(positions[0]) < max(positions[1])
    log = dict(opened(server.url).read(0, total))
    for name, mine in zip(b"ab", positions):
        assert mine == sorted(mine)
        assert [log[position] for position in mine] == [b"%c %d" % (name, n) for n in range(len(mine))]


def test_wait_ends_when_another_process_appends(server, opened):
    one, other = opened(server.url), opened(server.url)
    assert one.shared
    waited = []
    thread = threading.Thread(target=lambda: waited.append(one.wait(0, DEADLINE)))
    thread.start()
    append(other, b"a")
    thread.join(DEADLINE)
    assert waited == [True]
    assert one.read(0, 10) == [(1, b"a")]
    assert one.payloads([1]) == [b"of a"]


def test_acknowledged_records_survive_kill_9_of_server(server, opened):
    acknowledged, threads, stop = {}, [], threading.Event()
    store = opened(server.url)

    def write(name):
        number = 0
        while not stop.is_set():
            record = b"%d.%d" % (name, number)
            acknowledged[store.append(record, record * 3000).result(DEADLINE)] = record
            number += 1

    for name in range(4):
        threads.append(threading.Thread(target=write, args=(name,)))
        threads[-1].start()
    try:
        for delay in (0.05, 0.2, 0.1):
            before = len(acknowledged)
            end = time.monotonic() + DEADLINE
            while len(acknowledged) < before + 20 and time.monotonic() < end:
                time.sleep(0.005)
            time.sleep(delay)  # so that the kill comes at an arbitrary point of the writing
            server.kill()
            server.start()
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
    log = store.read(0, 1_000_000)
    assert len(acknowledged) >= 60
    # The store retried each append until it was acknowledged, and each record is stored once.
    assert dict(log) == acknowledged
    assert [position for position, _ in log] == list(range(1, len(log) + 1))
    for name in range(4):
        mine = [record for _, record in log if record.startswith(b"%d." % name)]
        assert mine == [b"%d.%d" % (name, number) for number in range(len(mine))]
    assert store.payloads([position for position, _ in log]) == [record * 3000 for _, record in log]


@pytest.mark.parametrize("torn_in", [b"L" * 100, b"lost 2", b"EXEC"])
def test_commit_that_kill_9_interrupted_does_not_reappear(tmp_path, opened, torn_in):
    """The file of Redis ends with an incomplete commit. At a later start, Redis would execute the part in the file."""
    with running_redis(tmp_path, appendonly="yes", appendfsync="always") as server:
        store = opened(server.url)
        assert append(store, b"before") == [1]
        futures = [store.append(b"lost %d" % number, b"L" * 5000) for number in range(3)]
        assert [future.result(DEADLINE) for future in futures] == [2, 3, 4]
        server.kill()
        file = max((path for path in tmp_path.rglob("*aof*") if path.is_file()), key=lambda path: path.stat().st_size)
        content = file.read_bytes()
        file.write_bytes(content[: content.rfind(torn_in) + 2])
        server.start()
        store = opened(server.url)
        kept = store.read(0, 10)  # "before" and perhaps records of the interrupted commit
        assert kept[0] == (1, b"before") and len(kept) < 4
        assert append(store, b"after") == [len(kept) + 1]
        store.delete_payloads([1])
        assert append(store, b"later", b"last") == [len(kept) + 2, len(kept) + 3]
        server.kill()
        server.start()
        store = opened(server.url)
        log = [*kept, *enumerate([b"after", b"later", b"last"], start=len(kept) + 1)]
        assert store.read(0, 10) == log
        assert store.payloads([position for position, _ in log[-3:]]) == [b"of after", b"of later", b"of last"]
        assert append(store, b"next") == [len(log) + 1]


class Proxy:
    """A proxy in front of Redis. If a request contains the bytes `lose`, the proxy drops the answer and disconnects."""

    def __init__(self, port):
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.lose = None
        self.lost = 0
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        self._relays = []

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                relay = threading.Thread(target=self._relay, args=(client,))
                relay.start()
                self._relays.append(relay)

    def _relay(self, client):
        """Relay one connection. The client sends the next request only after it has received the answer."""
        server = socket.create_connection(("127.0.0.1", self._server_port))
        losing = False

        def requests():
            nonlocal losing
            with contextlib.suppress(OSError):
                while data := client.recv(1 << 20):
                    if self.lose and self.lose in data:
                        self.lose, losing = None, True
                    server.sendall(data)
                server.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=requests)
        thread.start()
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if losing:  # drop the answer: the server has executed the request
                    self.lost += 1
                    break
                client.sendall(data)
        for connection in (client, server):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE)
        client.close()
        server.close()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE)
        for relay in self._relays:
            relay.join(DEADLINE)


def test_append_with_lost_answer_is_stored_once(server):
    proxy = Proxy(server.port)
    try:
        with contextlib.closing(RedisStore(proxy.url)) as store:
            assert append(store, b"first") == [1]
            proxy.lose = b"second"
            assert append(store, b"second", b"third") == [2, 3]
            assert proxy.lost == 1
            assert store.read(0, 10) == [(1, b"first"), (2, b"second"), (3, b"third")]
            assert store.payloads([1, 2, 3]) == [b"of first", b"of second", b"of third"]
            store.delete_payloads([1])
            proxy.lose = b"fourth"
            assert append(store, b"fourth") == [4]
            assert store.payloads([1, 2, 3, 4]) == [None, b"of second", b"of third", b"of fourth"]
    finally:
        proxy.close()


@pytest.mark.system
def test_silent_server_raises_peer_error_by_deadline(server, opened):
    store = opened(server.url, deadline=3.0)
    append(store, b"first")
    os.kill(server.process.pid, 19)  # SIGSTOP: the server accepts connections, but does not answer
    try:
        future = store.append(b"given up")
        with pytest.raises(PeerError, match=f"127.0.0.1:{server.port} did not answer for .* while appending"):
            future.result(DEADLINE)
        with pytest.raises(PeerError, match="reading the log"):
            store.read(0, 10)
    finally:
        os.kill(server.process.pid, 18)  # SIGCONT
    assert append(store, b"next")[0] in (2, 3)
    records = [record for _, record in store.read(0, 10)]
    # The server stores the abandoned append before the next append, or does not store it.
    assert records in ([b"first", b"next"], [b"first", b"given up", b"next"])


def test_abandoned_commit_that_arrives_late_is_refused(server, opened):
    store = opened(server.url)
    append(store, b"first", b"second")
    keys = ["rlframe:trajectories:" + name for name in ("log", "payloads", f"writer:{store._writer}")]
    with redis.Redis.from_url(server.url) as late, pytest.raises(redis.ResponseError, match="given up"):
        late.register_script(store._append.script)(keys, [0, "late", 60, "0", b"\x91\xc4\x04late"])
    assert [record for _, record in store.read(0, 10)] == [b"first", b"second"]


def test_connection_error_names_server_without_password():
    port = free_port()
    with pytest.raises(PeerError) as raised:
        RedisStore(f"redis://:secret@127.0.0.1:{port}/0", deadline=0.3)
    assert f"Redis at 127.0.0.1:{port} did not answer" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_lost_records_are_detected(forgetful, opened):
    store = opened(forgetful.url)
    append(store, b"a", b"b")
    assert store.read(0, 10) == [(1, b"a"), (2, b"b")]
    forgetful.kill()
    forgetful.start()
    with pytest.raises(StoreError, match="lost records that it had acknowledged"):
        store.read(2, 10)
    with pytest.raises(StoreError, match="gave position 1 after 2"):
        append(store, b"c")
    with pytest.raises(StoreError, match="gave position 1 after 2"):
        store.append(b"d")


def test_lost_records_are_detected_after_new_appends(forgetful, opened):
    store = opened(forgetful.url)
    append(store, b"a", b"b")
    assert store.read(0, 10) == [(1, b"a"), (2, b"b")]
    forgetful.kill()
    forgetful.start()
    append(opened(forgetful.url), b"a", b"b", b"c")
    with pytest.raises(StoreError, match="no longer the one that was read up to position 2"):
        store.read(2, 10)


def test_slow_reader_can_continue_after_one_snapshot_but_must_load_state_after_two(server, opened):
    ahead, behind = opened(server.url), opened(server.url)
    for number in range(1, 10):  # Commit each record alone, because a snapshot drops only whole commits.
        append(ahead, b"%d" % number)
    assert len(behind.read(0, 4)) == 4
    ahead.snapshot(6, b"six").result(DEADLINE)
    assert behind.read(4, 1) == [(5, b"5")]
    ahead.snapshot(8, b"eight").result(DEADLINE)
    with pytest.raises(RecordsDroppedError):
        behind.read(4, 10)
    assert behind.load() == (8, b"eight")
    assert behind.read(8, 10) == [(9, b"9")]
    behind.snapshot(7, b"older").result(DEADLINE)
    assert ahead.load() == (8, b"eight")


def test_full_server_refuses_appends_until_payloads_are_deleted(tmp_path, opened):
    with running_redis(tmp_path, maxmemory="20mb") as server:
        store = opened(server.url)
        held = []
        with pytest.raises(UnavailableError, match=r"memory|OOM"):
            for _ in range(100):
                held.append(store.append(b"record", bytes(1_000_000)).result(DEADLINE))
        assert 5 < len(held) < 25
        assert store.payload_positions() == held
        store.delete_payloads(held[:5])
        assert store.append(b"again", bytes(1_000_000)).result(DEADLINE) == held[-1] + 1
        assert store.payload_positions() == [*held[5:], held[-1] + 1]
        assert [position for position, _ in store.read(0, 100)] == [*held, held[-1] + 1]


def test_server_that_evicts_data_is_refused(tmp_path):
    refused = pytest.raises(StoreError, match="allkeys-lru.*Set `maxmemory-policy noeviction`")
    with running_redis(tmp_path, maxmemory="20mb", maxmemory_policy="allkeys-lru") as server, refused:
        open_store(server.url)


def test_data_in_unknown_format_and_keys_of_other_programs_are_refused(server):
    with redis.Redis.from_url(server.url) as client:
        client.hset("rlframe:trajectories:meta", "format", "7")
        with pytest.raises(StoreError, match="format b'7'"):
            open_store(server.url)
        client.delete("rlframe:trajectories:meta")
        client.set("rlframe:trajectories:meta", "theirs")
        with pytest.raises(StoreError, match="belong to another program"):
            open_store(server.url)


def test_durability_describes_settings_of_server(server, opened, caplog):
    with caplog.at_level(logging.WARNING):
        assert "a crash of Redis, and a power failure" in opened(server.url).durability
        assert caplog.text == ""
        with redis.Redis.from_url(server.url) as client:
            client.config_set("appendfsync", "everysec")
        assert "last second" in opened(server.url).durability
        assert "Set `appendfsync always`" in caplog.text
        with redis.Redis.from_url(server.url) as client:
            client.config_set("appendonly", "no")
        assert "are lost when the Redis server ends" in opened(server.url).durability
        assert "Set `appendonly yes`" in caplog.text
