"""The agent R2D2 makes updates in every topology, and its resumed runs are exact."""

from __future__ import annotations

import numpy as np
import pytest

import rlframe
from rlframe.agents.recurrent import GRUConfig
from rlframe.programs import evaluate, make_experiment, run_experiment
from rlframe.programs.experiment import Experiment
from tests.programs.running_program import FOR_EACH_AGENT, RunningProgram, options_of
from tests.programs.test_single_process import assert_same_arrays

ENV = "PositionOnlyCartPole-v1"
OPTIONS = {"batch_size": 8, "sequence_length": 8, "burn_in": 4, "period": 4, "min_replay_size": 20}
OPTIONS |= {"network": "gru", "network_config": GRUConfig((8,), 8), "update_period": 8, "env_type": "loop"}


def small_experiment(**fields) -> Experiment:
    options = {**OPTIONS, "num_envs": 2, "steps": 600, "log_every": 100, "eval_episodes": 1, **fields}
    return make_experiment("r2d2", ENV, preset="none", **options)


@pytest.mark.system
def test_resumed_run_is_identical_to_an_uninterrupted_run_and_its_policy_loads(tmp_path):
    experiment = small_experiment()
    whole = run_experiment(experiment, run_dir=tmp_path / "whole")
    # Stop in the middle of an episode and of a sequence.
    run_experiment(experiment, run_dir=tmp_path / "parts", stop_at=315)
    run_experiment(experiment, run_dir=tmp_path / "parts", resume=True)
    assert_same_arrays(tmp_path / "whole", tmp_path / "parts")
    assert 0.8 * (600 - 88) / 8 <= whole.learner_steps <= 1.2 * (600 - 88) / 8
    assert evaluate(tmp_path / "whole", episodes=1)["return_mean"] == whole.return_mean
    assert rlframe.load(tmp_path / "whole").act(np.zeros(2, np.float32)) in (0, 1)


@pytest.mark.system
def test_program_makes_updates_at_the_configured_ratio(tmp_path):
    experiment = small_experiment(topology="heavy_env", engine="threads", num_envs=4, steps=1_000)
    result = run_experiment(experiment, run_dir=tmp_path / "run")
    due = (result.env_steps - 100) / 8
    assert 0.7 * due <= result.learner_steps <= 1.3 * due


@pytest.mark.system
@pytest.mark.parametrize("program_name", FOR_EACH_AGENT)
def test_agent_makes_updates_in_every_topology(program_name, tmp_path):
    options = ["--agent", "r2d2", "--env", ENV, "--preset", "none", "--min-replay-size", "50", "--update-period", "8"]
    options += [
        "--batch-size",
        "16",
        "--sequence-length",
        "16",
        "--burn-in",
        "4",
        "--period",
        "8",
        "--discount",
        "0.99",
    ]
    options += ["--network", "lstm", "--network.hidden", "32", "--network.size", "32", "--learning-rate", "1e-3"]
    options += ["--adam-epsilon", "1e-5", "--target-update-period", "100", "--steps", "10000", "--num-envs", "2"]
    options += ["--num-actors", "2"]
    with RunningProgram(tmp_path / "run", *options, *options_of(program_name)) as program:
        code, result = program.finish(300.0)
    assert code == 0 and result is not None
    assert result["learner_steps"] >= 0.8 * (result["env_steps"] - 500) / 8
