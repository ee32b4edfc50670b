"""The rows of every topology have the same names."""

from __future__ import annotations

import pytest

from rlframe.metrics import read_jsonl
from rlframe.programs import make_experiment, run_experiment

FIELDS = {"preset": "none", "steps": 3000, "num_envs": 4, "env_type": "loop", "network": "mlp", "eval_episodes": 1}


def columns(path, **topology):
    experiment = make_experiment("dqn", min_replay_size=100, log_every=500, **FIELDS, **topology)
    run_experiment(experiment, run_dir=path)
    rows = read_jsonl(path / "metrics.jsonl")
    training = [set(row) for row in rows if "steps_per_second" in row]
    (evaluation,) = [set(row) for row in rows if "steps_per_second" not in row]
    return set.union(*training), evaluation


@pytest.fixture(scope="module")
def of_single_process(tmp_path_factory):
    training, evaluation = columns(tmp_path_factory.mktemp("rows") / "run", topology="single_process")
    assert {"episode_return", "loss", "staleness", "replay_items", "replay_sampled", "wall_seconds"} <= training
    return training, evaluation


@pytest.mark.parametrize("topology", ["heavy_env", pytest.param("light_env", marks=pytest.mark.system)])
def test_a_program_has_the_columns_of_a_single_process(tmp_path, of_single_process, topology):
    assert columns(tmp_path / "run", topology=topology, engine="threads") == of_single_process


@pytest.mark.system
def test_elastic_also_has_the_number_of_its_collectors(tmp_path, of_single_process):
    training, evaluation = columns(tmp_path / "run", topology="elastic", engine="local")
    assert (training - {"collectors"}, evaluation) == of_single_process and "collectors" in training
