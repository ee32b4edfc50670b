"""The best checkpoint is kept after other checkpoints are deleted, a save fails or a process is killed."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest

from rlframe.learners import Checkpointer
from rlframe.learners.saving import Best, BestCheckpoint


@pytest.fixture
def checkpointer(tmp_path):
    opened = Checkpointer(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


def evaluate(checkpointer: Checkpointer, step: int, return_mean: float) -> None:
    checkpointer.save(step, {"w": np.full(3, step, np.float32)})
    BestCheckpoint(checkpointer.directory).offer(step, return_mean)


def saved_value(best: BestCheckpoint, step: int) -> float:
    checkpointer = Checkpointer(best.directory)
    (leaf,) = checkpointer.read(step).leaves
    checkpointer.close()
    return float(leaf[0])


def test_best_checkpoint_outlives_the_other_checkpoints(checkpointer):
    best = BestCheckpoint(checkpointer.directory)
    assert best.read() is None and best.copies() == []
    for step, value in enumerate([1.0, 5.0, float("nan"), 5.0, 4.0, -1.0, 2.0], start=1):
        evaluate(checkpointer, step, value)
    assert best.read() == Best(4, 5.0)  # of two equal returns, the newer checkpoint
    assert [path.name for path in best.copies()] == ["4"] and checkpointer.steps() == [6, 7]
    assert saved_value(best, 4) == 4.0


def test_unfinished_evaluation_changes_nothing_and_its_copy_is_removed_later(checkpointer):
    best = BestCheckpoint(checkpointer.directory)
    evaluate(checkpointer, 1, 5.0)
    checkpointer.save(2, {"w": np.zeros(3, np.float32)})
    best.keep(2)  # a process that is killed now leaves this copy
    (best.directory / "3.tmp").mkdir()  # a process that is killed while it copies leaves this directory
    assert best.read() == Best(1, 5.0) and len(best.copies()) == 3
    evaluate(checkpointer, 3, 4.0)
    assert best.read() == Best(1, 5.0) and [path.name for path in best.copies()] == ["1"]


def test_checkpoint_that_is_kept_during_its_evaluation_can_become_the_best_one(checkpointer):
    best = BestCheckpoint(checkpointer.directory)
    checkpointer.save(1, {"w": np.ones(3, np.float32)})
    best.keep(1)
    for step in (2, 3):
        checkpointer.save(step, {"w": np.zeros(3, np.float32)})
    assert checkpointer.steps() == [2, 3]
    best.offer(1, 0.0)
    assert best.read() == Best(1, 0.0) and saved_value(best, 1) == 1.0


def test_earlier_best_checkpoint_stays_if_a_better_one_cannot_be_copied(checkpointer, monkeypatch, caplog):
    best = BestCheckpoint(checkpointer.directory)
    evaluate(checkpointer, 1, 1.0)

    def fail(*_, **__):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", fail)
        evaluate(checkpointer, 2, 2.0)
    assert "Checkpoint 2 cannot be kept as the best one: the disk is full" in caplog.text
    assert best.read() == Best(1, 1.0) and saved_value(best, 1) == 1.0


def test_files_are_copied_if_the_file_system_has_no_hard_links(checkpointer, monkeypatch):
    def fail(*_):
        raise PermissionError("no hard links")

    monkeypatch.setattr("os.link", fail)
    evaluate(checkpointer, 1, 1.0)
    assert saved_value(BestCheckpoint(checkpointer.directory), 1) == 1.0


def test_run_that_goes_back_to_an_earlier_checkpoint_has_no_later_best_one(checkpointer, tmp_path):
    best = BestCheckpoint(checkpointer.directory)
    evaluate(checkpointer, 1, 1.0)
    evaluate(checkpointer, 2, 2.0)
    checkpointer.check_and_go_back_to(2, tmp_path / "aside")
    assert best.read() == Best(2, 2.0)
    checkpointer.check_and_go_back_to(1, tmp_path / "aside")
    assert best.read() is None and len(list((tmp_path / "aside").glob("*/checkpoints/best/2"))) == 1
    evaluate(checkpointer, 3, -3.0)
    assert best.read() == Best(3, -3.0)


@pytest.mark.parametrize("text", ["", "{", "[1]", json.dumps({"step": 1}), json.dumps({"step": 9, "return_mean": 1.0})])
def test_damaged_record_means_that_there_is_no_best_checkpoint(checkpointer, text):
    evaluate(checkpointer, 1, 1.0)
    best = BestCheckpoint(checkpointer.directory)
    pathlib.Path(best.directory / "best.json").write_text(text)
    assert best.read() is None
    evaluate(checkpointer, 2, 0.0)
    assert best.read() == Best(2, 0.0)
