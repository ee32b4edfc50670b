from __future__ import annotations

import threading

import pytest

from rlframe.errors import StoreError, UnavailableError
from rlframe.trajectories.stores import base
from rlframe.trajectories.stores.base import GroupCommitStore

DEADLINE = 60.0


class Disk(GroupCommitStore):
    """A fake store that records its commits. Each commit waits until the test sets `may_write`."""

    def __init__(self):
        self.commits = []
        self.may_write = threading.Event()
        self.writing = threading.Event()
        self.error = None  # error that every commit with appends raises
        self.last = 0
        super().__init__("The disk")

    def _write(self, commit):
        self.writing.set()
        assert self.may_write.wait(DEADLINE)
        if self.error and commit.appends:
            raise self.error
        self.commits.append(commit)
        self.last += len(commit.appends)
        return self.last - len(commit.appends) + 1


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.may_write.set()
    disk.close()


def test_appends_during_commit_go_into_next_commit(disk):
    first = disk.append(b"a", None)
    assert disk.writing.wait(DEADLINE)
    others = [disk.append(b"b", b"payload"), disk.append(b"c", None)]
    disk.delete_payloads([7, 8])
    snapshots = [disk.snapshot(5, b"five"), disk.snapshot(4, b"four")]
    disk.may_write.set()
    assert [future.result(DEADLINE) for future in [first, *others]] == [1, 2, 3]
    assert [future.result(DEADLINE) for future in snapshots] == [None, None]
    assert [[append.record for append in commit.appends] for commit in disk.commits] == [[b"a"], [b"b", b"c"]]
    assert disk.commits[1].deleted == [7, 8]
    assert disk.commits[1].snapshot == (5, b"five")


def test_snapshot_during_a_commit_that_fails_is_written(disk):
    disk.error = UnavailableError("the disk is full")
    append = disk.append(b"a", None)
    assert disk.writing.wait(DEADLINE)
    snapshot = disk.snapshot(5, b"five")
    disk.may_write.set()
    assert append.exception(DEADLINE) is disk.error and snapshot.result(DEADLINE) is None


def test_append_is_refused_if_too_many_bytes_wait(disk, monkeypatch):
    monkeypatch.setattr(base, "MAX_WAITING_BYTES", 1000)
    disk.append(b"a", None)
    assert disk.writing.wait(DEADLINE)
    disk.append(b"b", bytes(2000))  # This append is accepted in spite of its size, because no other append waits.
    with pytest.raises(UnavailableError, match="The disk is behind"):
        disk.append(b"c", None)
    disk.may_write.set()


def test_commit_size_is_limited(disk, monkeypatch):
    monkeypatch.setattr(base, "MAX_COMMIT_BYTES", 1000)
    futures = [disk.append(b"a", None)]
    assert disk.writing.wait(DEADLINE)
    futures += [disk.append(b"b", bytes(size)) for size in (400, 400, 400, 5000, 100)]
    disk.may_write.set()
    assert [future.result(DEADLINE) for future in futures] == [1, 2, 3, 4, 5, 6]
    assert [len(commit.appends) for commit in disk.commits] == [1, 2, 1, 1, 1]


def test_payloads_are_deleted_although_append_is_refused(disk):
    disk.error = UnavailableError("full")
    disk.append(b"a", None)
    assert disk.writing.wait(DEADLINE)
    refused = disk.append(b"b", None)
    disk.delete_payloads([3])
    disk.may_write.set()
    with pytest.raises(UnavailableError, match="full"):
        refused.result(DEADLINE)
    disk.close()
    assert [(commit.appends, commit.deleted) for commit in disk.commits] == [([], [3])]


def test_many_deletions_are_split_into_several_commits(disk):
    disk.delete_payloads(range(5000))
    disk.may_write.set()
    disk.close()
    assert [len(commit.deleted) for commit in disk.commits] == [2000, 2000, 1000]


def test_failed_deletions_are_retried_with_next_append(disk):
    failing = threading.Event()
    failing.set()
    calls = []
    succeed = disk._write

    def write(commit):
        calls.append(commit)
        if failing.is_set():
            raise UnavailableError("full")
        return succeed(commit)

    disk._write = write
    disk.may_write.set()
    disk.delete_payloads(range(5000))
    with pytest.raises(UnavailableError):
        disk.snapshot(1, b"").result(DEADLINE)
    assert len(calls) <= 4  # The store does not retry endlessly.
    failing.clear()
    disk.append(b"a", None).result(DEADLINE)
    disk.close()
    assert sorted(position for commit in disk.commits for position in commit.deleted) == list(range(5000))


def test_nothing_is_written_after_store_error(disk):
    disk.error = StoreError("broken")
    disk.may_write.set()
    with pytest.raises(StoreError, match="broken"):
        disk.append(b"a", None).result(DEADLINE)
    with pytest.raises(StoreError, match="broken"):
        disk.append(b"b", None)
    assert disk.commits == []


def test_append_cannot_be_cancelled(disk):
    future = disk.append(b"a", None)
    assert not future.cancel()
    disk.may_write.set()
    assert future.result(DEADLINE) == 1
