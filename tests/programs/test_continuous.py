"""Agents for continuous control run in one process, in every topology, and with robots of every library."""

from __future__ import annotations

import numpy as np
import pytest

import rlframe
from rlframe.agents.networks import MLPConfig
from rlframe.programs import evaluate, make_experiment, run_experiment
from rlframe.programs.experiment import Experiment
from tests.extras import import_or_skip, needs
from tests.programs.running_program import FOR_EACH_AGENT, RunningProgram, options_of
from tests.programs.test_single_process import assert_same_arrays

OPTIONS = {"network": "mlp", "network_config": MLPConfig((16,), "relu"), "eval_episodes": 1, "env_type": "loop"}
OPTIONS |= {"preset": "none", "min_replay_size": 100, "batch_size": 16, "learning_rate": 1e-3}


def small_experiment(agent: str, env: str = "Pendulum-v1", **fields) -> Experiment:
    return make_experiment(agent, env, **{**OPTIONS, "num_envs": 2, "steps": 500, "log_every": 100, **fields})


@pytest.mark.system
def test_resumed_normalized_run_is_identical_to_an_uninterrupted_run(tmp_path):
    fields = {"unroll_length": 32, "num_minibatches": 2, "normalize_observations": True, "normalize_rewards": True}
    fields |= {"num_envs": 2, "steps": 600, "eval_episodes": 1, "env_type": "loop", "preset": "none", "num_epochs": 2}
    experiment = make_experiment("ppo", "Pendulum-v1", **fields)
    whole = run_experiment(experiment, run_dir=tmp_path / "whole")
    # Stop in the middle of an episode and of an unroll.
    run_experiment(experiment, run_dir=tmp_path / "parts", stop_at=231)
    run_experiment(experiment, run_dir=tmp_path / "parts", resume=True)
    assert_same_arrays(tmp_path / "whole", tmp_path / "parts")
    assert evaluate(tmp_path / "whole", episodes=1)["return_mean"] == whole.return_mean


@pytest.mark.system
@pytest.mark.parametrize("agent", ["sac", "td3"])
def test_resumed_run_is_identical_to_an_uninterrupted_run_and_its_policy_loads(agent, tmp_path):
    experiment = small_experiment(agent)
    whole = run_experiment(experiment, run_dir=tmp_path / "whole")
    # After 315 steps, the number of updates is odd, and the episode is incomplete.
    run_experiment(experiment, run_dir=tmp_path / "parts", stop_at=315)
    run_experiment(experiment, run_dir=tmp_path / "parts", resume=True)
    assert_same_arrays(tmp_path / "whole", tmp_path / "parts")
    assert 380 <= whole.learner_steps <= 402
    assert evaluate(tmp_path / "whole", episodes=1)["return_mean"] == whole.return_mean
    policy = rlframe.load(tmp_path / "whole")
    action = policy.act(np.zeros(3, np.float32))
    assert action.shape == (1,) and np.all(np.abs(action) <= 2.0)


@pytest.mark.system
@pytest.mark.parametrize(("agent", "topology"), [("sac", "heavy_env"), ("td3", "light_env")])
def test_program_makes_updates_at_the_configured_ratio(agent, topology, tmp_path):
    experiment = small_experiment(agent, topology=topology, engine="threads", num_envs=4, update_period=4, steps=1_000)
    result = run_experiment(experiment, run_dir=tmp_path / "run")
    due = (result.env_steps - 100) / 4
    assert 0.8 * due <= result.learner_steps <= 1.1 * due


@pytest.mark.parametrize(
    ("replay", "options"),
    [
        pytest.param("shared_memory", {}, marks=pytest.mark.system),
        pytest.param("service", {}, marks=pytest.mark.system),
        pytest.param("service", {"replay_shards": 2}, marks=pytest.mark.system),
        pytest.param("reverb", {}, marks=pytest.mark.system),
    ],
)
def test_program_makes_all_updates_with_every_replay_buffer(replay, options, tmp_path):
    if replay == "reverb":
        needs("reverb")
    # The agent makes updates only in the second half of the run.
    fields = {"num_envs": 4, "min_replay_size": 500, "update_period": 1, "steps": 1_000}
    experiment = small_experiment("td3", topology="heavy_env", engine="threads", replay=replay, **fields, **options)
    result = run_experiment(experiment, run_dir=tmp_path / "run")
    due = result.env_steps - 500
    assert 0.9 * due <= result.learner_steps <= 1.1 * due


@pytest.mark.system
@pytest.mark.parametrize("agent", ["sac", "td3"])
@pytest.mark.parametrize("program_name", FOR_EACH_AGENT)
def test_agent_learns_pendulum_in_every_topology(agent, program_name, tmp_path):
    options = ["--agent", agent, "--env", "Pendulum-v1", "--min-replay-size", "500", "--network", "mlp"]
    options += ["--network.hidden", "64", "64", "--network.activation", "relu", "--batch-size", "64"]
    options += ["--steps", "10000", "--num-envs", "2", "--num-actors", "2", "--learning-rate", "1e-3"]
    with RunningProgram(tmp_path / "run", *options, *options_of(program_name)) as program:
        code, result = program.finish(300.0)
    assert code == 0 and result is not None
    assert result["learner_steps"] >= 0.8 * (result["env_steps"] - 500)
    # A random policy has a return of -1,200. TD3 has returns from -670 to -130 after 6,000 steps, and from -360 to -120
    # after 10,000 steps. These ranges hold in one process and in several processes.
    assert result["return_mean"] > -600.0


@pytest.mark.parametrize(
    ("env", "type", "package"),
    [
        pytest.param("envpool:HalfCheetah-v4", "envpool", "envpool", marks=pytest.mark.system),
        pytest.param("gymnasium:HalfCheetah-v5", "loop", "mujoco", marks=pytest.mark.system),
        # The observations of this environment are dicts.
        pytest.param("dm_control:cheetah-run", "loop", "dm_control", marks=pytest.mark.system),
    ],
)
def test_sac_trains_on_robots_of_every_library(env, type, package, tmp_path):
    import_or_skip(package, "pip install 'rlframe[envs]'")
    experiment = small_experiment("sac", env, env_type=type, num_envs=1, steps=120)
    result = run_experiment(experiment, run_dir=tmp_path / "run")
    assert result.learner_steps >= 15
