"""Runs on a small real disk. The disk becomes full during the run, and is freed later."""

from __future__ import annotations

import pytest

from rlframe.errors import CheckpointError
from rlframe.learners import Checkpointer
from rlframe.programs import run_experiment
from tests.extras import needs
from tests.programs.test_single_process import dqn, ppo
from tests.small_disk import small_disk

__all__ = ["small_disk"]


@pytest.mark.system
def test_run_survives_a_full_disk_and_saves_again_later(small_disk, caplog):
    run_dir = small_disk.path / "run"
    steps: dict[str, list[int]] = {}

    def on_row(info):
        step = info.step
        if step >= 200 and "full" not in steps:
            steps["full"] = Checkpointer(run_dir / "checkpoints").steps()
            small_disk.fill()
        if step >= 600 and "free" not in steps:
            steps["free"] = Checkpointer(run_dir / "checkpoints").steps()
            small_disk.free()

    result = run_experiment(ppo(steps=900, checkpoint_every=100, log_every=50), run_dir=run_dir, callbacks=[on_row])
    assert steps["free"] == steps["full"] and len(steps["full"]) > 0
    assert Checkpointer(run_dir / "checkpoints").steps()[-1] == result.learner_steps > steps["full"][-1]
    warnings = [record.getMessage() for record in caplog.records]
    assert any("No space left on device" in text and "saves again at the next checkpoint" in text for text in warnings)
    assert any(f"A row of the logs is lost: Could not write {run_dir}/metrics.jsonl" in text for text in warnings)


@pytest.mark.system
@pytest.mark.parametrize("make", [ppo, dqn])
def test_run_whose_last_checkpoint_fails_raises_an_error_with_the_previous_checkpoint(make, small_disk):
    run_dir = small_disk.path / "run"

    def on_row(info):
        if info.step >= 300:
            small_disk.fill()

    experiment = make(steps=400, checkpoint_every=100, log_every=50)
    with pytest.raises(CheckpointError) as caught:
        run_experiment(experiment, run_dir=run_dir, callbacks=[on_row])
    newest = Checkpointer(run_dir / "checkpoints").steps()[-1]
    text = f"The last checkpoint is {run_dir}/checkpoints/{newest}. Resume with: rlframe train --resume"
    assert text in str(caught.value) and caught.value.exit_code == 1
    small_disk.free()
    assert run_experiment(experiment, run_dir=run_dir, resume=True).env_steps >= 400


@pytest.mark.system
def test_elastic_run_survives_a_full_disk_and_completes(tmp_path, small_disk):
    needs("trajectories")
    from tests.programs.elastic_program import ElasticProgram

    (tmp_path / "run").symlink_to(small_disk.path)  # only the run directory is on the small disk
    options = ["--agent", "impala", "--steps", "30000", "--log-every", "200", "--checkpoint-every", "50"]
    with ElasticProgram(tmp_path / "run", *options, "--num-actors", "1", "--max-actors", "1") as program:
        program.wait_for_steps(1_000)
        small_disk.fill()
        at = program.env_steps[-1] if program.status() else 0
        program.wait_until(lambda: program.status() is not None and program.env_steps[-1] > at + 5_000)
        small_disk.free()
        code, result = program.finish(200.0)
        assert code == 0 and result is not None and result["env_steps"] >= 30_000
        assert Checkpointer(tmp_path / "run/checkpoints").steps()[-1] == result["learner_steps"]
