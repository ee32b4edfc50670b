"""Tests of checkpoints: saved data is restored, and no saved data is lost."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from rlframe.errors import CheckpointError
from rlframe.learners import Checkpointer
from rlframe.replay import ReplayBuffer
from rlframe.testing.streams import fake_agent
from rlframe.types import Transition
from tests.waiting import wait_until


@pytest.fixture
def checkpointer(tmp_path):
    opened = Checkpointer(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


def tree(value: float) -> dict:
    return {"w": np.full((3, 2), value, np.float32), "count": [np.int32(7)], "rng": np.array([1, 2], np.uint32)}


def test_restore_returns_the_saved_tree_and_extras(checkpointer):
    checkpointer.save(5, tree(1.5), extras={"env": b"\x00\x01", "steps": 3})
    restored, extras, _ = checkpointer.restore(tree(0.0))
    np.testing.assert_array_equal(restored["w"], np.full((3, 2), 1.5, np.float32))
    assert restored["count"][0] == 7 and restored["rng"].dtype == np.uint32
    assert extras == {"env": b"\x00\x01", "steps": 3}


def test_save_adds_no_handler_to_the_root_logger(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    opened, added = Checkpointer(tmp_path), logging.NullHandler()
    opened.save(1, np.zeros(2))
    opened.close()
    opened.read(1)
    opened.close()
    assert logging.getLogger().handlers == []
    # Simulate another thread that configures logging during a save.
    manager = opened._manager
    monkeypatch.setattr(opened, "_manager", lambda: logging.getLogger().addHandler(added) or manager())
    opened.save(2, np.zeros(2))
    assert logging.getLogger().handlers == [added]


def test_only_the_latest_checkpoints_are_kept(checkpointer):
    for step in (1, 2, 3):
        checkpointer.save(step, tree(step))
    assert checkpointer.steps() == [2, 3]


@pytest.mark.parametrize("name", [b"a\xff", "é".encode()])
def test_checkpoints_work_in_a_directory_whose_name_is_not_utf_8(name, tmp_path):
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


def test_second_save_at_the_same_step_does_not_overwrite_the_first(checkpointer):
    checkpointer.save(4, tree(1.0), extras="first")
    checkpointer.save(4, tree(2.0), extras="second")
    assert checkpointer.steps() == [4, 5]
    assert checkpointer.restore(tree(0.0))[1] == "second"
    assert checkpointer.restore(tree(0.0), step=4)[1] == "first"


def test_error_names_the_damaged_checkpoint(checkpointer):
    checkpointer.save(1, tree(1.0))
    checkpointer.save(2, tree(2.0))
    for data in (checkpointer.directory / "2" / "default").rglob("*"):
        if data.is_file():
            data.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"/2 is damaged: "):
        checkpointer.restore(tree(0.0))
    assert checkpointer.restore(tree(0.0), step=1)[0]["w"][0, 0] == 1.0


def test_restore_detects_a_single_changed_byte(checkpointer):
    checkpointer.save(1, {"w": np.arange(50_000, dtype=np.float32)}, extras="kept")
    data = max((p for p in (checkpointer.directory / "1").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="1 is damaged"):
        checkpointer.restore({"w": np.zeros(50_000)})


def test_checkpoint_of_another_network_is_rejected(checkpointer):
    checkpointer.save(1, tree(1.0))
    with pytest.raises(CheckpointError, match=r"\['w'\] has shape \(3, 2\), but this agent has \(3, 4\)"):
        checkpointer.restore({**tree(0.0), "w": np.zeros((3, 4))})


def test_restore_without_a_checkpoint_raises(checkpointer):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpointer.restore(tree(0.0))


SAVES = """
import itertools, sys
import numpy as np
from rlframe.learners import Checkpointer
from rlframe.replay import ReplayBuffer
from rlframe.testing.streams import StepStream, fake_agent
from rlframe.types import Transition
checkpointer, replay_buffer = Checkpointer(sys.argv[1]), ReplayBuffer(fake_agent("uniform", Transition(1), 4, 20_000))
replay_buffer.claim_rank(2)
stream = StepStream(2)
for step in itertools.count(1):
    replay_buffer.add(*stream.step())
    checkpointer.save(step, {"w": np.full(5_000_000, step, np.float32)}, step, replay_buffer)
    print(step, flush=True)
"""


@pytest.mark.system
@pytest.mark.parametrize("moment", ["*.orbax-checkpoint-tmp*", "replay/.*.new"])
def test_killed_writer_leaves_the_previous_checkpoint_with_its_replay(tmp_path, moment):
    with subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path)], stdout=subprocess.PIPE) as process:
        saved = int(process.stdout.readline())
        wait_until(lambda: list(tmp_path.glob(moment)))
        process.kill()
        saved = [saved, *map(int, process.stdout)][-1]
    again, replay_buffer = Checkpointer(tmp_path), ReplayBuffer(fake_agent("uniform", Transition(1), 4, 20_000))
    assert again.steps()[-1] in (saved, saved + 1)  # saved + 1: killed after the save, but before the print
    restored, extras, has_replay = again.restore({"w": np.zeros(5_000_000)}, replay_buffer=replay_buffer)
    assert (restored["w"] == again.steps()[-1]).all() and has_replay
    assert replay_buffer.stats()["steps"] == 2 * extras == 2 * again.steps()[-1]
    again.save(again.steps()[-1] + 1, {"w": np.zeros(3)})
    again.close()
    assert not [*tmp_path.glob("*.orbax-checkpoint-tmp*"), *tmp_path.glob("replay/.*")]
    assert again.replays.newest() < again.steps()[-1]
