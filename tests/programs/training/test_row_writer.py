"""The rows of the logs have the same columns in all topologies."""

from __future__ import annotations

import pytest

from rlframe.learners.update import LearnerUpdate
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
def single_process_columns(tmp_path_factory):
    training, evaluation = columns(tmp_path_factory.mktemp("rows") / "run", topology="single_process")
    assert {"episode_return", "loss", "staleness", "replay_items", "replay_sampled", "wall_seconds"} <= training
    return training, evaluation


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", pytest.param("light_env", marks=pytest.mark.system)])
def test_program_rows_have_the_same_columns_as_a_single_process(tmp_path, single_process_columns, topology):
    assert columns(tmp_path / "run", topology=topology, engine="threads") == single_process_columns


@pytest.mark.system
def test_rows_of_an_elastic_run_also_contain_the_number_of_collectors(tmp_path, single_process_columns):
    training, evaluation = columns(tmp_path / "run", topology="elastic", engine="local")
    assert (training - {"collectors"}, evaluation) == single_process_columns and "collectors" in training


fetched: list[tuple[int, str]] = []  # the update and the name of each log that was fetched


class CountedLog:
    """A log of an update on the device. It notes that it is fetched."""

    def __init__(self, value, *key):
        self.size, self.dtype, self.shape = value.size, value.dtype, value.shape
        self._value, self._key = value, key

    def __array__(self, dtype=None, copy=None):
        fetched.append(self._key)
        return self._value.__array__(dtype)


def test_one_process_fetches_the_logs_of_updates_only_for_rows(tmp_path, monkeypatch):
    update, count = LearnerUpdate.__call__, []

    def counted(self, *args):
        count.append(None)
        result = update(self, *args)
        return result._replace(logs={name: CountedLog(log, len(count), name) for name, log in result.logs.items()})

    monkeypatch.setattr(LearnerUpdate, "__call__", counted)
    fetched.clear()
    fields = {**FIELDS, "steps": 600, "min_replay_size": 100, "log_every": 200}
    run_experiment(make_experiment("dqn", **fields), run_dir=tmp_path / "run")
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(count) > 20 * len(rows) > 0
    assert sorted({update for update, _ in fetched}) == [row["learner_steps"] for row in rows]
    assert len(fetched) == len(set(fetched))
