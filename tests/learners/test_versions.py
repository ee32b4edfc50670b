"""Versions rise, also after a crash."""

from __future__ import annotations

import pytest

from rlframe.errors import CheckpointError
from rlframe.learners import versions
from rlframe.learners.versions import VersionCounter


def test_versions_go_on_past_all_that_may_have_been_given(tmp_path):
    counter = VersionCounter(tmp_path)
    given = [counter.next() for _ in range(1_500)]
    after_crash = VersionCounter(tmp_path)
    after_crash.resume(value=given[10])  # the checkpoint is older than the last version given
    assert after_crash.next() > given[-1]


def test_a_version_is_never_given_twice_however_many_of_the_reserved_were_used(tmp_path):
    for used in range(1, 2_100, 100):
        counter = VersionCounter(tmp_path / str(used))
        given = [counter.next() for _ in range(used)]
        resumed = VersionCounter(tmp_path / str(used))
        resumed.resume(value=given[0])
        assert resumed.value not in given[1:]
    drawn_out = VersionCounter(tmp_path)
    while drawn_out.next() < drawn_out._reserved:
        pass
    resumed = VersionCounter(tmp_path)
    resumed.resume(value=1)
    assert resumed.value > drawn_out.value


def test_a_new_counter_does_not_forget_what_was_reserved_before_it_resumes(tmp_path):
    counter = VersionCounter(tmp_path)
    given = [counter.next() for _ in range(3_000)]
    resumed = VersionCounter(tmp_path)
    assert resumed.value == 1
    resumed.resume(value=2)
    assert resumed.value >= given[-1]


def test_versions_go_on_without_a_gap_after_a_clean_stop(tmp_path):
    counter = VersionCounter(tmp_path)
    assert [counter.next() for _ in range(2)] == [2, 3]
    counter.release()
    resumed = VersionCounter(tmp_path)
    resumed.resume(value=3)
    assert resumed.next() == 4


class Clock:
    """Time as a test says it: a write takes 20 ms."""

    def __init__(self):
        self.now = 1.0

    def monotonic(self):
        return self.now

    def perf_counter(self):
        self.now += 0.0005  # what a write takes
        return self.now


@pytest.mark.parametrize(("seconds", "skipped"), [(0.3, 1), (0.001, 1_001)])
def test_where_updates_are_slow_a_learner_that_was_killed_skips_no_version(tmp_path, monkeypatch, seconds, skipped):
    clock = Clock()
    monkeypatch.setattr(versions, "time", clock)
    counter = VersionCounter(tmp_path)
    for _ in range(5):
        given = counter.next()
        clock.now += seconds  # an update
    after_crash = VersionCounter(tmp_path)
    after_crash.resume(value=2)
    assert given < after_crash.value <= given + skipped


@pytest.mark.parametrize("content", ['{"other": 1}', '{"reserved": null}', '[{"reserved": 1}]', '{"res'])
def test_a_damaged_versions_file_is_named(tmp_path, content):
    (tmp_path / "versions.json").write_text(content)
    with pytest.raises(CheckpointError, match=r'versions\.json is damaged: .*It must hold {"reserved": N}'):
        VersionCounter(tmp_path).resume(value=3)
