"""A resumed run continues from the right checkpoint, and refuses a damaged checkpoint."""

from __future__ import annotations

import pathlib
import re

import pytest

from rlframe.errors import UsageError
from rlframe.learners import Checkpointer
from rlframe.programs import make_experiment, run_experiment
from rlframe.programs.run_dir.directory import RunDir
from rlframe.replay import ReplayBuffer
from tests.fakes import counting_agent
from tests.programs.test_single_process import assert_same_arrays, dqn


def damage(run_dir: pathlib.Path, step: int) -> None:
    for path in (run_dir / "checkpoints" / str(step) / "default").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")


@pytest.mark.system
def test_damaged_checkpoint_is_refused_and_an_older_checkpoint_can_be_resumed(tmp_path):
    run_dir, experiment = tmp_path / "run", dqn(steps=600, checkpoint_every=100)
    first = run_experiment(experiment, run_dir=run_dir)
    *_, good, bad = Checkpointer(run_dir / "checkpoints").steps()
    damage(run_dir, bad)
    before = sorted(path.name for path in run_dir.rglob("*"))
    refusal = f"{run_dir}/checkpoints/{bad} is damaged: .* good checkpoint is {good}. Use .*--resume-from {good} "
    with pytest.raises(UsageError, match=refusal):
        run_experiment(experiment, run_dir=run_dir, resume=True)
    assert sorted(path.name for path in run_dir.rglob("*")) == before
    with pytest.raises(UsageError, match=rf"There is no checkpoint 1 in .*; there are .*{good}, {bad}\."):
        run_experiment(experiment, run_dir=run_dir, resume=True, resume_from=1)

    second = run_experiment(experiment, run_dir=run_dir, resume=True, resume_from=good)
    assert (second.env_steps, second.learner_steps) == (first.env_steps, first.learner_steps)
    assert second.params_version > first.params_version  # no version number is used twice
    (aside,) = (run_dir / "aside").iterdir()
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == sorted([str(bad), "best", "replay"])
    assert [path.name for path in (aside / "checkpoints" / "replay").iterdir()] == [str(bad)]
    run_experiment(experiment, run_dir=tmp_path / "other")
    assert_same_arrays(run_dir, tmp_path / "other")


@pytest.mark.parametrize("moves", range(4))
def test_newest_checkpoint_has_its_replay_if_the_move_of_newer_ones_is_interrupted(tmp_path, monkeypatch, moves):
    directory = RunDir(tmp_path / "run")
    checkpointer, replay_buffer = Checkpointer(directory.checkpoints), ReplayBuffer(counting_agent())
    replay_buffer.claim_rank(1)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": step}, replay_buffer=replay_buffer)
    checkpointer.close()
    rename, moved = pathlib.Path.rename, []

    def interrupted_rename(path, target):
        if len(moved) == moves:
            raise KeyboardInterrupt
        moved.append(rename(path, target))

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pathlib.Path, "rename", interrupted_rename)
        Checkpointer(directory.checkpoints).check_and_go_back_to(1, tmp_path / "run/aside")
    newest = Checkpointer(directory.checkpoints).steps()[-1]
    assert newest == max(1, 3 - moves) and (directory.checkpoints / "replay" / str(newest)).exists()


def test_damaged_checkpoint_is_refused_before_processes_start(tmp_path):
    experiment = make_experiment("impala", topology="heavy_env", num_envs=8)
    directory = RunDir(tmp_path / "run")
    directory.create()
    directory.write_config(experiment, {})
    checkpointer = Checkpointer(directory.checkpoints)
    for step in (1, 2):
        checkpointer.save(step, {"w": step})
    checkpointer.close()
    damage(directory.path, 2)
    with pytest.raises(UsageError, match=re.escape("--resume-from 1")):
        run_experiment(experiment, run_dir=directory.path, resume=True)
    damage(directory.path, 1)
    with pytest.raises(UsageError, match="No other checkpoint is good"):
        run_experiment(experiment, run_dir=directory.path, resume=True)
