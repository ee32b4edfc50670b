"""Checkpoints: what is saved comes back, and nothing that was saved is lost."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from rlframe.errors import CheckpointError
from rlframe.learners import checkpoints
from rlframe.learners.checkpoints import Checkpointer, VersionCounter
from tests.waiting import wait_until


@pytest.fixture
def checkpointer(tmp_path):
    opened = Checkpointer(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


def tree(value: float) -> dict:
    return {"w": np.full((3, 2), value, np.float32), "count": [np.int32(7)], "rng": np.array([1, 2], np.uint32)}


def test_restore_gives_back_the_tree_and_the_extras(checkpointer):
    checkpointer.save(5, tree(1.5), extras={"env": b"\x00\x01", "steps": 3})
    restored, extras = checkpointer.restore(tree(0.0))
    np.testing.assert_array_equal(restored["w"], np.full((3, 2), 1.5, np.float32))
    assert restored["count"][0] == 7 and restored["rng"].dtype == np.uint32
    assert extras == {"env": b"\x00\x01", "steps": 3}


def test_logging_is_as_before_where_nobody_set_it_up(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    opened, added = Checkpointer(tmp_path), logging.NullHandler()
    opened.save(1, np.zeros(2))
    opened.close()
    opened.extras(1)
    opened.close()
    assert logging.getLogger().handlers == []
    # Another thread may set logging up during a save.
    manager = opened._manager
    monkeypatch.setattr(opened, "_manager", lambda: logging.getLogger().addHandler(added) or manager())
    opened.save(2, np.zeros(2))
    assert logging.getLogger().handlers == [added]


def test_the_last_n_are_kept(checkpointer):
    for step in (1, 2, 3):
        checkpointer.save(step, tree(step))
    assert checkpointer.steps() == [2, 3]


@pytest.mark.parametrize("name", [b"a\xff", "é".encode()])
def test_a_directory_need_not_be_utf_8(name, tmp_path):
    directory = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    opened = [Checkpointer(directory, keep=2) for _ in range(2)]
    for step in (1, 2, 3):
        opened[0].save(step, tree(step), extras=step)
    assert opened[1].steps() == [2, 3] and sorted(os.listdir(directory)) == ["2", "3"]
    assert opened[1].restore(tree(0.0))[0]["w"][0, 0] == 3.0
    for data in (opened[1].directory / "3" / "default").rglob("*"):
        if data.is_file():
            data.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=rf"{re.escape(directory)}/3 is damaged: "):
        opened[1].restore(tree(0.0))
    for each in opened:
        each.close()


def test_a_second_save_at_one_step_replaces_nothing(checkpointer):
    checkpointer.save(4, tree(1.0), extras="first")
    checkpointer.save(4, tree(2.0), extras="second")
    assert checkpointer.steps() == [4, 5]
    assert checkpointer.restore(tree(0.0))[1] == "second"
    assert checkpointer.restore(tree(0.0), step=4)[1] == "first"


def test_a_damaged_checkpoint_is_named(checkpointer):
    checkpointer.save(1, tree(1.0))
    checkpointer.save(2, tree(2.0))
    for data in (checkpointer.directory / "2" / "default").rglob("*"):
        if data.is_file():
            data.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"/2 is damaged: "):
        checkpointer.restore(tree(0.0))
    assert checkpointer.restore(tree(0.0), step=1)[0]["w"][0, 0] == 1.0


def test_a_single_changed_byte_of_the_data_is_noticed(checkpointer):
    checkpointer.save(1, {"w": np.arange(50_000, dtype=np.float32)}, extras="kept")
    data = max((p for p in (checkpointer.directory / "1").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="1 is damaged"):
        checkpointer.restore({"w": np.zeros(50_000)})


def test_a_checkpoint_of_another_network_is_refused_by_name(checkpointer):
    checkpointer.save(1, tree(1.0))
    with pytest.raises(CheckpointError, match=r"\['w'\] has shape \(3, 2\) where this agent has \(3, 4\)"):
        checkpointer.restore({**tree(0.0), "w": np.zeros((3, 4))})


def test_no_checkpoint_is_an_error_that_says_so(checkpointer):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpointer.restore(tree(0.0))


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
    monkeypatch.setattr(checkpoints, "time", clock)
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


SAVES = """
import itertools, sys
import numpy as np
from rlframe.learners import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
for step in itertools.count(1):
    checkpointer.save(step, {"w": np.full(5_000_000, step, np.float32)})
    print(step, flush=True)
"""


@pytest.mark.system
def test_a_writer_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path)], stdout=subprocess.PIPE) as process:
        saved = int(process.stdout.readline())
        wait_until(lambda: list(tmp_path.glob("*.orbax-checkpoint-tmp*")))
        process.kill()
        saved = [saved, *map(int, process.stdout)][-1]
    again = Checkpointer(tmp_path)
    assert again.steps()[-1] in (saved, saved + 1)  # the one under way may have been completed
    restored, _ = again.restore({"w": np.zeros(5_000_000)})
    assert (restored["w"] == again.steps()[-1]).all()
    again.save(9, {"w": np.zeros(3)})
    again.close()
    assert list(tmp_path.glob("*.orbax-checkpoint-tmp*")) == []
