from __future__ import annotations

import threading

import pytest

from rlframe.errors import StoreError, UnavailableError
from rlframe.trajectories.stores import group_commit
from rlframe.trajectories.stores.group_commit import GroupCommit

DEADLINE = 60.0


class Disk:
    """Writes when it may, and remembers what."""

    def __init__(self):
        self.commits = []
        self.may_write = threading.Event()
        self.writing = threading.Event()
        self.error = None  # raised for a commit that has appends
        self.last = 0

    def __call__(self, commit):
        self.writing.set()
        assert self.may_write.wait(DEADLINE)
        if self.error and commit.appends:
            raise self.error
        self.commits.append(commit)
        self.last += len(commit.appends)
        return self.last - len(commit.appends) + 1


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def commits(disk):
    commits = GroupCommit("The disk", disk)
    yield commits
    disk.may_write.set()
    commits.close()


def test_what_came_during_a_commit_goes_into_the_next(disk, commits):
    first = commits.append(b"a", None)
    assert disk.writing.wait(DEADLINE)
    others = [commits.append(b"b", b"payload"), commits.append(b"c", None)]
    commits.forget([7, 8])
    snapshots = [commits.snapshot(5, b"five"), commits.snapshot(4, b"four")]
    disk.may_write.set()
    assert [future.result(DEADLINE) for future in [first, *others]] == [1, 2, 3]
    assert [future.result(DEADLINE) for future in snapshots] == [None, None]
    assert [[append.record for append in commit.appends] for commit in disk.commits] == [[b"a"], [b"b", b"c"]]
    assert disk.commits[1].forgotten == [7, 8]
    assert disk.commits[1].snapshot == (5, b"five")


def test_what_may_wait_is_bounded(disk, commits, monkeypatch):
    monkeypatch.setattr(group_commit, "MAX_WAITING_BYTES", 1000)
    commits.append(b"a", None)
    assert disk.writing.wait(DEADLINE)
    commits.append(b"b", bytes(2000))  # nothing else waits: else it could never be sent
    with pytest.raises(UnavailableError, match="The disk is behind"):
        commits.append(b"c", None)
    disk.may_write.set()


def test_one_commit_is_bounded(disk, commits, monkeypatch):
    monkeypatch.setattr(group_commit, "MAX_COMMIT_BYTES", 1000)
    futures = [commits.append(b"a", None)]
    assert disk.writing.wait(DEADLINE)
    futures += [commits.append(b"b", bytes(size)) for size in (400, 400, 400, 5000, 100)]
    disk.may_write.set()
    assert [future.result(DEADLINE) for future in futures] == [1, 2, 3, 4, 5, 6]
    assert [len(commit.appends) for commit in disk.commits] == [1, 2, 1, 1, 1]


def test_space_is_given_back_although_an_append_finds_none(disk, commits):
    disk.error = UnavailableError("full")
    commits.append(b"a", None)
    assert disk.writing.wait(DEADLINE)
    refused = commits.append(b"b", None)
    commits.forget([3])
    disk.may_write.set()
    with pytest.raises(UnavailableError, match="full"):
        refused.result(DEADLINE)
    commits.close()
    assert [(commit.appends, commit.forgotten) for commit in disk.commits] == [([], [3])]


def test_what_is_forgotten_in_great_numbers_goes_into_several_commits(disk, commits):
    commits.forget(range(5000))
    disk.may_write.set()
    commits.close()
    assert [len(commit.forgotten) for commit in disk.commits] == [2000, 2000, 1000]


def test_positions_whose_commit_failed_wait_for_the_next_occasion(disk, commits):
    failing = threading.Event()
    failing.set()
    calls = []

    def write(commit):
        calls.append(commit)
        if failing.is_set():
            raise UnavailableError("full")
        return disk(commit)

    commits._write = write
    disk.may_write.set()
    commits.forget(range(5000))
    with pytest.raises(UnavailableError):
        commits.snapshot(1, b"").result(DEADLINE)
    assert len(calls) <= 4  # not again and again
    failing.clear()
    commits.append(b"a", None).result(DEADLINE)
    commits.close()
    assert sorted(position for commit in disk.commits for position in commit.forgotten) == list(range(5000))


def test_after_a_failure_nothing_more_is_written(disk, commits):
    disk.error = StoreError("broken")
    disk.may_write.set()
    with pytest.raises(StoreError, match="broken"):
        commits.append(b"a", None).result(DEADLINE)
    with pytest.raises(StoreError, match="broken"):
        commits.append(b"b", None)
    assert disk.commits == []


def test_a_future_cannot_be_cancelled(disk, commits):
    future = commits.append(b"a", None)
    assert not future.cancel()
    disk.may_write.set()
    assert future.result(DEADLINE) == 1
