"""Runs whose learner has several devices, which are simulated."""

from __future__ import annotations

import json

import pytest

from rlframe.learners import Checkpointer
from tests.programs.running_program import RunningProgram

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
ENVS = {"fused": "jax:CartPole-v1"}
HEAVY_ENV = ("--topology", "heavy_env", "--num-actors", "2")


def finish(run_dir, *arguments):
    with RunningProgram(run_dir, *arguments) as program:
        code, result = program.finish(600.0)
    assert code == 0 and result is not None, program.errors()
    return result


@pytest.mark.parametrize("topology", ["single_process", "fused", "heavy_env"])
def test_ppo_solves_cartpole_on_four_devices(tmp_path, monkeypatch, topology):
    monkeypatch.setenv("XLA_FLAGS", FOUR_DEVICES)
    arguments = ["--topology", topology, "--env", ENVS.get(topology, "CartPole-v1"), "--learner-devices", "4"]
    arguments += ["--steps", "60000"]
    returns = []
    for seed in ("1", "2"):
        returns.append(finish(tmp_path / seed, *arguments, "--seed", seed)["return_mean"])
        if returns[-1] >= 475.0:
            return
    pytest.fail(f"{topology}: returns {returns}")


def test_killed_run_resumes_on_another_number_of_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FOUR_DEVICES)
    run_dir = tmp_path / "run"
    with RunningProgram(
        run_dir, *HEAVY_ENV, "--learner-devices", "4", "--steps", "1000000", "--checkpoint-every", "2000"
    ) as program:
        program.wait_until(lambda: len(Checkpointer(run_dir / "checkpoints").steps()) > 2)
        program.process.kill()
    before = Checkpointer(run_dir / "checkpoints").steps()[-1]
    saved = json.loads((run_dir / "config.json").read_text())["experiment"]["topology"]["learner_devices"]
    result = finish(run_dir, "--resume", "--learner-devices", "2", "--until-learner-steps", str(before + 5))
    assert saved == 4 and result["learner_steps"] == before + 5


@pytest.mark.parametrize("agent", ["ppo", "impala"])
def test_actors_and_learner_use_different_devices_of_one_process(tmp_path, monkeypatch, agent):
    monkeypatch.setenv("XLA_FLAGS", FOUR_DEVICES)
    arguments = [*HEAVY_ENV, "--engine", "threads", "--actor-device-ids", "0", "--learner-device-ids", "1-3"]
    result = finish(tmp_path / "run", "--agent", agent, *arguments, "--steps", "20000", "--seed", "1")
    assert result["return_mean"] > 150.0


def test_language_model_learns_with_divided_parameters(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FOUR_DEVICES)
    from tests.programs.test_language import SMALL

    result = finish(tmp_path / "run", *SMALL, "--learner-devices", "4", "--shard-params", "--steps", "5")
    assert result["learner_steps"] == 5
