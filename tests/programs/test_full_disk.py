"""Runs on a real disk that is filled, and emptied, under them."""

from __future__ import annotations

import pytest

from rlframe.errors import CheckpointError
from rlframe.learners import Checkpointer
from rlframe.programs import run_experiment
from tests.extras import needs
from tests.programs.test_single_process import dqn, ppo
from tests.small_disk import small_disk

__all__ = ["small_disk"]


def test_a_run_outlives_a_full_disk_and_saves_when_there_is_room_again(small_disk, caplog):
    run_dir = small_disk.path / "run"
    steps: dict[str, list[int]] = {}

    def look(info):
        step = info.step
        if step >= 200 and "full" not in steps:
            steps["full"] = Checkpointer(run_dir / "checkpoints").steps()
            small_disk.fill()
        if step >= 600 and "free" not in steps:
            steps["free"] = Checkpointer(run_dir / "checkpoints").steps()
            small_disk.free()

    result = run_experiment(ppo(steps=900, checkpoint_every=100, log_every=50), run_dir=run_dir, callbacks=[look])
    assert steps["free"] == steps["full"] and len(steps["full"]) > 0
    assert Checkpointer(run_dir / "checkpoints").steps()[-1] == result.learner_steps > steps["full"][-1]
    warnings = [record.getMessage() for record in caplog.records]
    assert any("No space left on device" in text and "the next checkpoint is another try" in text for text in warnings)
    assert any(f"A row of the logs is lost: Could not write {run_dir}/metrics.jsonl" in text for text in warnings)


@pytest.mark.system
@pytest.mark.parametrize("make", [ppo, dqn])
def test_a_last_checkpoint_that_cannot_be_written_fails_and_names_the_one_before(make, small_disk):
    run_dir = small_disk.path / "run"

    def look(info):
        if info.step >= 300:
            small_disk.fill()

    described = make(steps=400, checkpoint_every=100, log_every=50)
    with pytest.raises(CheckpointError) as caught:
        run_experiment(described, run_dir=run_dir, callbacks=[look])
    newest = Checkpointer(run_dir / "checkpoints").steps()[-1]
    text = f"The last checkpoint is {run_dir}/checkpoints/{newest}. Resume with: rlframe train --resume"
    assert text in str(caught.value) and caught.value.exit_code == 1
    small_disk.free()
    assert run_experiment(described, run_dir=run_dir, resume=True).env_steps >= 400


@pytest.mark.system
def test_an_elastic_run_outlives_a_full_disk_and_ends_well_when_there_is_room_again(tmp_path, small_disk):
    needs("trajectories")
    from tests.programs.elastic_program import ElasticProgram

    (tmp_path / "run").symlink_to(small_disk.path)  # what the test writes beside it has room
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
