from __future__ import annotations

import json
import os
import pathlib
import random
import sqlite3
import subprocess
import sys
import threading

import pytest

from rlframe.errors import StoreError, UnavailableError, UsageError
from rlframe.trajectories.stores import open_store
from tests.trajectories.stores.killed_writer import THREADS, payload_of

DEADLINE = 60.0
ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trajectories.db"


@pytest.fixture
def opened(path):
    """Return a function that opens the store at `path`. Close the stores at the end."""
    stores = []

    def open_(option=""):
        stores.append(open_store(f"sqlite:{path}{option}"))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


class WriterOutput:
    """The parsed output of a `killed_writer` process until the test killed it."""

    def __init__(self, lines):
        words = [line.split() for line in lines]
        self.appended = {int(line[1]): line[2].encode() for line in words if line[0] == "appended"}
        self.deleted = {int(position) for line in words if line[0] == "deletes" for position in line[1:]}
        self.snapshot = max((int(line[1]) for line in words if line[0] == "snapshot"), default=0)


def write_and_kill(url, round_, delay, once_it_appends):
    process = start("-m", "tests.trajectories.stores.killed_writer", url, str(round_))
    watchdog = threading.Timer(DEADLINE, process.kill)
    watchdog.start()
    try:
        with process.stdout as output:
            assert output.readline() == b"opened\n"
            first = output.readline() if once_it_appends else b""
            killer = threading.Timer(delay, process.kill)
            killer.start()
            lines = (first + output.read()).decode().splitlines()
            killer.join()
    finally:
        process.kill()
        process.wait(DEADLINE)
        watchdog.cancel()
    return WriterOutput(lines)


@pytest.mark.system
@pytest.mark.parametrize("option", ["", pytest.param("?sync=off", marks=pytest.mark.system)])
def test_acknowledged_records_are_stored_once_and_in_order_after_kill_9(path, opened, option):
    acknowledged, deleted, before = {}, set(), 0
    for round_ in range(5):
        delay = random.uniform(0.02, 0.6)
        output = write_and_kill(f"sqlite:{path}{option}", round_, delay, once_it_appends=round_ == 4)
        acknowledged.update(output.appended)
        deleted |= output.deleted
        store = opened(option)
        # The snapshot's state and the records after the snapshot are together the whole log.
        snapshot, state = store.load() or (0, b"[]")
        log = dict(enumerate((record.encode() for record in json.loads(state)), start=1))
        assert snapshot >= output.snapshot and len(log) == snapshot
        log.update(store.read(snapshot, 1_000_000))
        assert sorted(log) == list(range(1, len(log) + 1))
        assert {position: log.get(position) for position in acknowledged} == acknowledged
        # The kill can leave one append of each thread without an acknowledgment.
        for thread in range(THREADS):
            prefix = b"%d.%d." % (round_, thread)
            written = [record for position, record in log.items() if position > before and record.startswith(prefix)]
            assert written == [prefix + b"%d" % number for number in range(len(written))]
            assert len(written) <= sum(record.startswith(prefix) for record in output.appended.values()) + 1
        assert len(log) - before <= len(output.appended) + THREADS  # each thread has at most one unacknowledged record
        before = len(log)
        held = store.payload_positions()
        assert set(log) - deleted <= set(held)
        assert store.payloads(held) == [payload_of(log[position]) for position in held]
        deleted |= set(held)
        store.delete_payloads(held)  # The service deletes orphaned payloads in the same way.
        store.close()
    assert acknowledged


OWNER = """
import sys
from rlframe.trajectories.stores import open_store
store = open_store(sys.argv[1])
store.append(b"a", b"payload").result(60)
print("open", flush=True)
sys.stdin.read()
"""


def test_second_owner_is_refused_until_first_is_dead(path, opened):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, f"sqlite:{path}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(StoreError, match=f"in use by process {process.pid}"):
            opened()
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)
    store = opened()
    assert store.read(0, 10) == [(1, b"a")]
    with pytest.raises(StoreError, match=f"this process .{os.getpid()}."):
        opened()
    assert store.append(b"b").result(DEADLINE) == 2  # The refused process has changed nothing.


LIMITED = """
import resource, sys
from rlframe.errors import UnavailableError
from rlframe.trajectories.stores import open_store
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
store = open_store(sys.argv[1])
for number in range(100):
    try:
        store.append(b"%d" % number, bytes(500_000)).result(60)
    except UnavailableError as error:
        print(number, error)
        break
store.delete_payloads([1, 2])
print(store.append(b"again", bytes(900_000)).result(60), len(store.payload_positions()))
store.close()
"""


def test_full_disk_refuses_appends_until_payloads_are_deleted(path, opened):
    process = start("-c", LIMITED, f"sqlite:{path}")
    output = process.communicate(timeout=DEADLINE)[0].decode().splitlines()
    assert process.returncode == 0
    assert output[0].startswith("5 ") and "cannot grow" in output[0] and str(path) in output[0]
    assert output[1] == "6 4"
    assert opened().read(0, 10) == [(number + 1, b"%d" % number) for number in range(5)] + [(6, b"again")]


def test_payload_file_shrinks_when_much_of_the_file_is_free(path, opened):
    store = opened()
    positions = [store.append(b"record", bytes(20_000_000)).result(DEADLINE) for _ in range(5)]
    payloads = pathlib.Path(f"{path}-payloads")
    assert payloads.stat().st_size > 100_000_000
    store.delete_payloads(positions)
    store.append(b"after").result(DEADLINE)  # The store shortens the file not later than with this commit.
    assert payloads.stat().st_size < 1_000_000


def test_replaced_records_are_deleted_in_several_commits(path, opened):
    store = opened("?sync=off")
    futures = [store.append(b"%d" % number) for number in range(12_000)]
    last = futures[-1].result(DEADLINE)
    store.snapshot(last - 1, b"state").result(DEADLINE)
    for expected in (7_000, 2_000, 1, 1):
        with sqlite3.connect(path) as database:
            assert database.execute("SELECT count(*) FROM log").fetchone() == (expected + store._last - last,)
        database.close()
        store.append(b"more").result(DEADLINE)
    assert store.read(last - 1, 1) == [(last, b"11999")]


def test_store_returns_none_for_damaged_payload(path, opened, caplog):
    store = opened()
    for number in range(3):
        store.append(b"record", bytes([number]) * 10_000).result(DEADLINE)
    store.close()
    with open(f"{path}-payloads", "r+b") as file:
        file.seek(4096 + 12_288 + 5)
        file.write(b"?")
    store = opened()
    assert store.payloads([1, 2, 3]) == [bytes(10_000), None, b"\x02" * 10_000]
    assert "position 2 is damaged" in caplog.text


def test_damaged_snapshot_raises_store_error(path, opened):
    store = opened()
    store.append(b"record").result(DEADLINE)
    store.snapshot(1, b"state").result(DEADLINE)
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE snapshot SET state = ?", (b"stake",))
    database.close()
    with pytest.raises(StoreError, match="the checksum of its snapshot does not match"):
        opened().load()


def test_file_that_is_not_rlframe_store_is_refused(path, opened):
    path.write_bytes(b"something else, and long enough" * 1000)
    with pytest.raises(StoreError, match="not a SQLite database"):
        opened()
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE theirs (number)")
    database.close()
    with pytest.raises(StoreError, match="the database of another program"):
        opened()
    assert os.listdir(path.parent) == [path.name]  # The refused store has deleted its new payload file.


def test_store_with_unknown_format_is_refused(path, opened):
    opened().close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 7")
    database.close()
    with pytest.raises(StoreError, match="has format 7; this version of rlframe reads format 2"):
        opened()


def test_payload_file_of_other_database_is_refused(path, opened, tmp_path):
    opened().close()
    payloads = pathlib.Path(f"{path}-payloads")
    payloads.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="-payloads is missing"):
        opened()
    assert not payloads.exists()
    open_store(f"sqlite:{tmp_path}/other.db").close()
    (tmp_path / "other.db-payloads").rename(payloads)
    with pytest.raises(StoreError, match="does not belong to"):
        opened()
    payloads.write_bytes(b"something else")
    with pytest.raises(StoreError, match="is something else"):
        opened()


def test_unwritable_path_is_refused(tmp_path):
    with pytest.raises(UsageError, match="its directory does not exist"):
        open_store(f"sqlite:{tmp_path}/missing/store.db")
    with pytest.raises(UsageError, match="is a directory"):
        open_store(f"sqlite:{tmp_path}")
    with pytest.raises(UsageError, match="cannot be opened"):
        open_store("sqlite:/proc/store.db")


def test_store_refuses_appends_after_disk_failure(path, opened):
    store = opened()
    store.append(b"a").result(DEADLINE)
    os.close(store._file._fd)  # Later writes fail, because the file is closed.
    with pytest.raises(StoreError, match=r"failed, and accepts nothing more: .*Bad file descriptor"):
        store.append(b"b", b"payload").result(DEADLINE)
    with pytest.raises(StoreError, match="failed"):
        store.append(b"c")
    store._file._fd = -1
    store.close()
    assert opened().read(0, 10) == [(1, b"a")]


def test_durability_describes_sync_option(opened):
    store = opened()
    assert not store.shared
    assert "and a power failure" in store.durability
    store.close()
    assert "not a power failure" in opened("?sync=off").durability


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlit:store.db", "names no store. Did you mean 'sqlite'?"),
        ("", "names no store"),
        ("sqlite:", "names no store"),
        ("memory:store", "names no store"),
        ("sqlite:store.db?fsync=off", "has the option sync=on or sync=off"),
        ("redis://localhost:port", "not a valid Redis URL"),
    ],
)
def test_invalid_store_url_is_refused(url, message):
    with pytest.raises(UsageError) as raised:
        open_store(url)
    assert message in str(raised.value)


def test_closed_store_raises_unavailable_error(opened):
    store = opened()
    store.close()
    with pytest.raises(UnavailableError, match="is closed"):
        store.append(b"a")
