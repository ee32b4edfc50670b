"""Recurrent agents make updates in every topology, their resumed runs are exact, and their policies load."""

from __future__ import annotations

import numpy as np
import pytest

import rlframe
from rlframe.agents.recurrent import GRUConfig
from rlframe.programs import evaluate, make_experiment, run_experiment
from rlframe.programs.experiment import Experiment
from tests.extras import needs
from tests.programs.running_program import FOR_EACH_AGENT, ROOT, RunningProgram, options_of
from tests.programs.test_single_process import assert_same_arrays

ENV = "PositionOnlyCartPole-v1"
OPTIONS = {"network": "gru", "network_config": GRUConfig((8,), 8), "eval_episodes": 1, "env_type": "loop"}
AGENT_OPTIONS = {
    "ppo": {"unroll_length": 16, "num_minibatches": 2, "num_epochs": 2},
    "impala": {"unroll_length": 8, "batch_size": 4},
}
NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}


def small_experiment(agent: str, **fields) -> Experiment:
    options = {**OPTIONS, **AGENT_OPTIONS[agent], "preset": "none", "num_envs": 4, "steps": 800, "log_every": 200}
    return make_experiment(agent, ENV, **{**options, **fields})


@pytest.mark.parametrize(
    ("agent", "fields"),
    [
        pytest.param("ppo", {}, marks=pytest.mark.system),
        pytest.param("ppo", NORMALIZED, marks=pytest.mark.system),
        pytest.param("impala", {}, marks=pytest.mark.system),
    ],
    ids=["ppo", "normalized ppo", "impala"],
)
def test_resumed_run_is_identical_to_an_uninterrupted_run_and_its_policy_loads(agent, fields, tmp_path):
    experiment = small_experiment(agent, **fields)
    whole = run_experiment(experiment, run_dir=tmp_path / "whole")
    run_experiment(experiment, run_dir=tmp_path / "parts", stop_at=420)  # in the middle of episodes and sequences
    run_experiment(experiment, run_dir=tmp_path / "parts", resume=True)
    assert_same_arrays(tmp_path / "whole", tmp_path / "parts")
    assert whole.learner_steps >= 12
    assert evaluate(tmp_path / "whole", episodes=1)["return_mean"] == whole.return_mean
    policy = rlframe.load(tmp_path / "whole")
    assert policy.act(np.zeros(2, np.float32)) in (0, 1)


@pytest.mark.system
@pytest.mark.parametrize(("agent", "topology"), [("ppo", "heavy_env"), ("impala", "light_env")])
def test_recurrent_agent_makes_updates_in_threads(agent, topology, tmp_path):
    experiment = small_experiment(agent, topology=topology, engine="threads")
    assert run_experiment(experiment, run_dir=tmp_path / "run").learner_steps >= 8


STEPS = 10_000
COMMON = ["--env", ENV, "--num-envs", "8", "--num-actors", "2", "--steps", str(STEPS), "--eval-episodes", "2"]
PPO = ["--agent", "ppo", "--preset", "none", "--network", "gru", "--unroll-length", "32", "--num-epochs", "2"]
IMPALA = ["--agent", "impala", "--preset", "none", "--network", "lstm", "--unroll-length", "16", "--batch-size", "8"]
CUSTOM = ["--agent", str(ROOT / "examples" / "recurrent_agent.py:Remembering")]


def run_program(run_dir, program_name: str, *options: str) -> tuple[dict, list[dict]]:
    """Run a program, and check that it succeeds. Return its result and the rows of its logs."""
    with RunningProgram(run_dir, *COMMON, *options, *options_of(program_name)) as program:
        code, result = program.finish(300.0)
        assert code == 0 and result is not None, program.errors()
        return result, program.rows()


@pytest.mark.system
@pytest.mark.parametrize("program_name", FOR_EACH_AGENT)
def test_agent_makes_updates_in_every_topology(program_name, tmp_path):
    result, _ = run_program(tmp_path / "run", program_name, *PPO, "--num-minibatches", "4", "--normalize-observations")
    assert result["learner_steps"] >= 0.9 * STEPS / (32 * 8)


@pytest.mark.system
@pytest.mark.parametrize(
    ("program_name", "replay"),
    [
        ("local heavy_env", "service"),
        ("local light_env", "service"),
        ("local light_env", "reverb"),
        ("launchpad heavy_env", "reverb"),
        ("launchpad elastic", "auto"),
    ],
)
def test_recurrent_agent_makes_updates_with_every_replay_buffer(program_name, replay, tmp_path):
    if replay == "reverb":
        needs("reverb")
    result, _ = run_program(tmp_path / "run", program_name, *IMPALA, "--replay", replay)
    assert result["learner_steps"] >= 0.8 * STEPS / (16 * 8)


@pytest.mark.system
@pytest.mark.parametrize(("program_name", "replay"), [("launchpad elastic", "service"), ("ray elastic", "service")])
def test_custom_recurrent_agent_runs_in_the_elastic_topology_with_every_engine(program_name, replay, tmp_path):
    assert run_program(tmp_path / "run", program_name, *CUSTOM, "--replay", replay)[0]["learner_steps"] > 10


@pytest.mark.system
def test_learning_rate_follows_environment_steps_if_there_are_fewer_collectors(tmp_path):
    options = ["--max-actors", "1", "--num-minibatches", "8", "--learning-rate", "linear:3e-4:0", "--log-every", "500"]
    result, rows = run_program(tmp_path / "run", "local elastic", *PPO, *options)
    assert result["learner_steps"] >= 0.9 * STEPS / (
        32 * 4
    )  # a batch has the unrolls of one collector with 4 environments
    for row in rows:
        if "learning_rate" in row:
            assert row["learning_rate"] == pytest.approx(3e-4 * (1.0 - row["step"] / STEPS), abs=0.1 * 3e-4)
    assert max(row["step"] for row in rows if "learning_rate" in row) > 0.75 * STEPS
