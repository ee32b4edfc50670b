"""Whole runs of agents with a memory: in one process, resumed and loaded, and in every topology."""

from __future__ import annotations

import numpy as np
import pytest

import rlframe
from rlframe.agents.recurrent import GRUConfig
from rlframe.programs import evaluate, make_experiment, train
from rlframe.programs.experiment import Experiment
from tests.programs.test_single_process import assert_same_arrays

ENV = "PositionOnlyCartPole-v1"
OPTIONS = {"network": "gru", "network_config": GRUConfig((8,), 8), "eval_episodes": 1, "env_type": "loop"}
OF = {
    "ppo": {"unroll_length": 16, "num_minibatches": 2, "num_epochs": 2},
    "impala": {"unroll_length": 8, "batch_size": 4},
}


def experiment(agent: str, **fields) -> Experiment:
    options = {**OPTIONS, **OF[agent], "preset": "none", "num_envs": 4, "steps": 800, "log_every": 200}
    return make_experiment(agent, ENV, **{**options, **fields})


@pytest.mark.parametrize("agent", ["ppo", pytest.param("impala", marks=pytest.mark.system)])
def test_a_run_may_be_stopped_and_resumed_and_its_policy_loaded(agent, tmp_path):
    described = experiment(agent)
    whole = train(described, run_dir=tmp_path / "whole")
    train(described, run_dir=tmp_path / "parts", stop_at=420)  # in the middle of episodes and sequences
    train(described, run_dir=tmp_path / "parts", resume=True)
    assert_same_arrays(tmp_path / "whole", tmp_path / "parts")
    assert whole.learner_steps >= 12
    assert evaluate(tmp_path / "whole", episodes=1)["return_mean"] == whole.return_mean
    policy = rlframe.load(tmp_path / "whole")
    assert policy.act(np.zeros(2, np.float32)) in (0, 1)


@pytest.mark.parametrize(
    ("agent", "topology"), [("ppo", "heavy_env"), pytest.param("impala", "light_env", marks=pytest.mark.system)]
)
def test_a_program_carries_the_state(agent, topology, tmp_path):
    described = experiment(agent, topology=topology, engine="threads")
    assert train(described, run_dir=tmp_path / "run").learner_steps >= 8
