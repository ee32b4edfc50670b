"""Tests that version numbers increase, even after a crash."""

from __future__ import annotations

import pytest

from rlframe.errors import CheckpointError
from rlframe.learners import versions
from rlframe.learners.versions import VersionCounter


def test_versions_after_a_crash_are_higher_than_all_used_versions(tmp_path):
    counter = VersionCounter(tmp_path)
    given = [counter.next() for _ in range(1_500)]
    after_crash = VersionCounter(tmp_path)
    after_crash.resume(value=given[10])  # the checkpoint is older than the last used version
    assert after_crash.next() > given[-1]


def test_no_version_is_used_twice_after_a_crash_at_any_version(tmp_path):
    for used in range(1, 2_100, 100):
        counter = VersionCounter(tmp_path / str(used))
        given = [counter.next() for _ in range(used)]
        resumed = VersionCounter(tmp_path / str(used))
        resumed.resume(value=given[0])
        assert resumed.value not in given[1:]
    exhausted = VersionCounter(tmp_path)
    while exhausted.next() < exhausted._reserved:
        pass
    resumed = VersionCounter(tmp_path)
    resumed.resume(value=1)
    assert resumed.value > exhausted.value


def test_resume_skips_the_versions_that_an_earlier_counter_reserved(tmp_path):
    counter = VersionCounter(tmp_path)
    given = [counter.next() for _ in range(3_000)]
    resumed = VersionCounter(tmp_path)
    assert resumed.value == 1
    resumed.resume(value=2)
    assert resumed.value >= given[-1]


def test_versions_continue_without_a_gap_after_a_clean_stop(tmp_path):
    counter = VersionCounter(tmp_path)
    assert [counter.next() for _ in range(2)] == [2, 3]
    counter.release()
    resumed = VersionCounter(tmp_path)
    resumed.resume(value=3)
    assert resumed.next() == 4


class Clock:
    """A fake clock that the test advances. It makes each write of the file take 0.5 ms."""

    def __init__(self):
        self.now = 1.0

    def monotonic(self):
        return self.now

    def perf_counter(self):
        self.now += 0.0005  # duration of one write
        return self.now


@pytest.mark.parametrize(("seconds", "skipped"), [(0.3, 1), (0.001, 1_001)])
def test_killed_learner_skips_few_versions_if_updates_are_slow(tmp_path, monkeypatch, seconds, skipped):
    clock = Clock()
    monkeypatch.setattr(versions, "time", clock)
    counter = VersionCounter(tmp_path)
    for _ in range(5):
        given = counter.next()
        clock.now += seconds  # one update
    after_crash = VersionCounter(tmp_path)
    after_crash.resume(value=2)
    assert given < after_crash.value <= given + skipped


@pytest.mark.parametrize("content", ['{"other": 1}', '{"reserved": null}', '[{"reserved": 1}]', '{"res'])
def test_error_names_the_damaged_versions_file(tmp_path, content):
    (tmp_path / "versions.json").write_text(content)
    with pytest.raises(CheckpointError, match=r'versions\.json is damaged: .*It must hold {"reserved": N}'):
        VersionCounter(tmp_path).resume(value=3)
