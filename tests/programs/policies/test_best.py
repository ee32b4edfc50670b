"""Every run keeps the checkpoint with the best evaluation, and `load`, `evaluate` and `export` read it by name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

import rlframe
from rlframe.cli import main
from rlframe.errors import CheckpointError, UsageError
from rlframe.learners import Checkpointer
from rlframe.learners.saving import BestCheckpoint
from rlframe.metrics import read_jsonl
from rlframe.programs.run_dir.directory import Result

# An environment whose episodes have one step. In evaluation number n, its reward is `returns[n]`.
ENV = """
import pathlib

import gymnasium
import numpy as np


class Scripted(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder=None, returns=(0.0,)):
        self.reward = returns[0]
        if folder is not None:
            made = len(list(pathlib.Path(folder).iterdir()))
            self.reward = returns[min(made, len(returns) - 1)]
            (pathlib.Path(folder) / str(made)).touch()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), self.reward, True, False, {}
"""
TOPOLOGIES = [
    ("single_process", None),
    pytest.param("heavy_env", "threads", marks=pytest.mark.system),
    pytest.param("heavy_env", "local", marks=pytest.mark.system),
    pytest.param("elastic", "local", marks=pytest.mark.system),
]
RETURNS = [1.0, 3.0, 7.0, 7.0, 2.0, -1.0]
BEST = 3  # number of the best evaluation, because of equal returns the newer one counts


def train(tmp_path: pathlib.Path, topology: str, engine: str | None, **options: Any) -> Result:
    values: dict[str, Any] = {
        "num_envs": 2,
        "env_type": "loop",
        "network": "mlp",
        "network_hidden": (4,),
        "steps": 10**8,
    }
    values |= {"unroll_length": 4, "batch_size": 2, "checkpoint_every": 8, "eval_every": 40, "topology": topology}
    values |= {"eval_episodes": 1, "preset": "none"} | ({} if engine is None else {"engine": engine})
    folder = tmp_path / "evaluations"
    folder.mkdir()
    values["eval_env_kwargs"] = {"folder": str(folder), "returns": RETURNS}
    (tmp_path / "env.py").write_text(ENV)
    values["env"] = f"{tmp_path}/env.py:Scripted"
    return rlframe.train("impala", run_dir=tmp_path / "run", quiet=True, **{**values, **options})


@pytest.mark.parametrize(("topology", "engine"), TOPOLOGIES)
def test_best_checkpoint_is_kept_and_can_be_loaded_and_survives_a_resume(tmp_path, topology, engine):
    at_best, evaluations = [], 0

    def callback(info):
        nonlocal evaluations
        if "return_mean" in info.values:
            evaluations += 1
            if evaluations == BEST + 1:  # this callback runs after the best checkpoint was kept
                at_best.append(BestCheckpoint(tmp_path / "run/checkpoints").read())
            if evaluations == len(RETURNS):
                info.stop()

    result = train(tmp_path, topology, engine, callbacks=[callback])
    run_dir = tmp_path / "run"
    best = BestCheckpoint(run_dir / "checkpoints")
    assert best.read() == at_best[0] and best.read().return_mean == 7.0
    assert [path.name for path in best.copies()] == [str(best.read().step)]
    newest = Checkpointer(run_dir / "checkpoints").steps()
    assert best.read().step < newest[0]  # its original was deleted
    policy = rlframe.load(run_dir, "best")
    assert policy.version < rlframe.load(run_dir).version == result.params_version
    assert rlframe.evaluate(run_dir, checkpoint="best", episodes=2)["params_version"] == policy.version
    rlframe.export(run_dir, tmp_path / "policy", "best")
    exported = jax.export.deserialize((tmp_path / "policy").read_bytes())
    observation = np.ones((1, 2), np.float32)
    assert exported.call(observation, np.ones(1, bool), [], np.uint32(0))[0][0] == policy.act(observation)[0]

    more = rlframe.train(run_dir=run_dir, resume=True, stop_at=result.env_steps + 100, quiet=True)
    assert more.return_mean == -1.0 and best.read() == at_best[0]
    assert rlframe.load(run_dir, "best").version == policy.version


@pytest.mark.system
def test_best_checkpoint_of_a_fused_run_has_the_highest_return(tmp_path):
    rlframe.train("pqn", "jax:CartPole-v1", topology="fused", run_dir=tmp_path / "run", quiet=True, num_envs=4,
                  steps=1_000, unroll_length=8, num_minibatches=1, num_epochs=1, preset="none", eval_every=200,
                  eval_episodes=2, checkpoint_every=0)  # fmt: skip
    returns = [row["return_mean"] for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "return_mean" in row]
    assert len(returns) == 5
    assert rlframe.evaluate(tmp_path / "run", checkpoint="best", episodes=2)["return_mean"] == max(returns)


def test_run_without_evaluations_has_no_best_checkpoint(tmp_path, capsys):
    run_dir = tmp_path / "run"
    train(tmp_path, "single_process", None, steps=40, eval_every=0, eval_episodes=0)
    with pytest.raises(CheckpointError, match="no best checkpoint in .*run/checkpoints: the run has not completed an"):
        rlframe.load(run_dir, "best")
    with pytest.raises(UsageError, match="checkpoint: expected int or 'best' or None, got 'worst'"):
        rlframe.load(run_dir, "worst")  # type: ignore[arg-type]
    assert main(["evaluate", str(run_dir), "--checkpoint", "worst"]) == 2
    assert "--checkpoint: expected the number of a checkpoint, or best, got 'worst'" in capsys.readouterr().err
    assert main(["evaluate", str(run_dir), "--checkpoint", "best"]) == 1


@pytest.mark.system
def test_evaluate_takes_a_checkpoint_and_another_environment(tmp_path, capsys):
    run_dir = tmp_path / "run"
    train(tmp_path, "single_process", None, steps=80, env_kwargs={"returns": [4.0]}, eval_env_kwargs={})
    steps = Checkpointer(run_dir / "checkpoints").steps()
    assert main(["evaluate", str(run_dir), "--checkpoint", str(steps[0]), "--episodes", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["params_version"] == rlframe.load(run_dir, steps[0]).version < rlframe.load(run_dir).version

    def return_mean(**options: Any) -> float:
        return rlframe.evaluate(run_dir, episodes=1, **options)["return_mean"]

    same = f"{tmp_path}/env.py:Scripted"
    assert return_mean() == answer["return_mean"] == 4.0
    assert return_mean(env_kwargs={"returns": [6.0]}) == 6.0
    assert return_mean(env=same) == 4.0  # the keyword arguments of the run
    assert return_mean(env=same, env_kwargs={}) == 0.0
    with pytest.raises(
        UsageError, match=r"which has the observations \(4,\): it was trained with the observations \(2,\)"
    ):
        return_mean(env="CartPole-v1", env_kwargs={})
