"""The agent PQN makes updates in every topology, and its resumed runs are exact."""

from __future__ import annotations

import pytest

from rlframe.agents.networks import MLPConfig
from rlframe.programs import make_experiment, run_experiment
from tests.programs.running_program import FOR_EACH_AGENT, RunningProgram, options_of
from tests.programs.test_single_process import assert_same_arrays


@pytest.mark.system
def test_resumed_run_is_identical_to_an_uninterrupted_run(tmp_path):
    network = MLPConfig((8,), "relu", layer_norm=True)
    options = {"network": "mlp", "network_config": network, "unroll_length": 16, "num_minibatches": 4}
    options |= {"num_envs": 4, "steps": 1_280, "log_every": 256, "eval_episodes": 1, "env_type": "loop"}
    experiment = make_experiment("pqn", "CartPole-v1", preset="none", **options)
    whole = run_experiment(experiment, run_dir=tmp_path / "whole")
    run_experiment(experiment, run_dir=tmp_path / "parts", stop_at=700)
    run_experiment(experiment, run_dir=tmp_path / "parts", resume=True)
    assert_same_arrays(tmp_path / "whole", tmp_path / "parts")
    assert whole.learner_steps >= 20


@pytest.mark.system
@pytest.mark.parametrize("program_name", FOR_EACH_AGENT)
def test_agent_makes_updates_in_every_topology(program_name, tmp_path):
    options = ["--agent", "pqn", "--env", "CartPole-v1", "--preset", "none", "--unroll-length", "32", "--num-envs", "4"]
    options += ["--num-minibatches", "4", "--num-epochs", "4", "--num-actors", "2", "--steps", "20000"]
    with RunningProgram(tmp_path / "run", *options, *options_of(program_name)) as program:
        code, result = program.finish(300.0)
    assert code == 0 and result is not None
    assert result["learner_steps"] >= 0.5 * 20_000 / (32 * 8)
