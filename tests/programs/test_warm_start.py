"""A new run starts from the parameters and statistics of another run (`init_from`)."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import rlframe
from rlframe.cli import main
from rlframe.errors import UsageError
from rlframe.learners import Checkpointer
from rlframe.metrics import read_jsonl
from rlframe.programs.options.saved_experiment import load_experiment
from rlframe.programs.policies.saved import mismatches, read_checkpoint, read_source
from rlframe.programs.run_dir.directory import Result, RunDir

PPO = {"num_envs": 4, "unroll_length": 8, "num_epochs": 1, "num_minibatches": 1, "preset": "none", "eval_episodes": 1}
PPO |= {"network": "mlp", "network_hidden": (8,), "env_type": "loop", "normalize_observations": True}
DQN = {"num_envs": 4, "min_replay_size": 64, "batch_size": 8, "preset": "none", "eval_episodes": 1, "env_type": "loop"}
DQN |= {"network": "mlp", "network_hidden": (8,), "replay_capacity": 1_000}
SAC = {**DQN, "env": "Pendulum-v1"}


def train(agent: str, run_dir: pathlib.Path, **options: Any) -> Result:
    return rlframe.train(agent, options.pop("env", "CartPole-v1"), run_dir=run_dir, quiet=True, **options)


def state_of(run_dir: pathlib.Path, checkpoint: Any = None) -> Any:
    """Return (params, learner_state) in a checkpoint."""
    name = str(run_dir) if checkpoint is None else f"{run_dir}@{checkpoint}"
    source = read_source(name, {})
    return source.params, source.learner_state


def assert_equal(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def are_equal(ours: Any, theirs: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    """A run of PPO with normalized observations and three checkpoints."""
    path = tmp_path_factory.mktemp("source") / "run"
    train("ppo", path, steps=192, checkpoint_every=32, eval_every=96, **PPO)
    return path


def test_new_run_starts_from_the_parameters_and_statistics_and_resumes_without_the_source(source, tmp_path):
    copy, run_dir = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(source, copy)
    result = train("ppo", run_dir, init_from=copy, steps=200, stop_at=64, seed=7, learning_rate=1e-5, **PPO)
    (params, learner_state), (params0, learner_state0) = state_of(copy), state_of(run_dir, 0)
    assert_equal(params0, params)
    assert_equal(learner_state0.statistics, learner_state.statistics)
    assert learner_state.statistics.observation.count > 190.0
    assert learner_state.agent.steps > 0 and learner_state0.agent.steps == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(learner_state0.agent.opt_state))  # Adam starts again
    assert read_checkpoint(RunDir(run_dir), 0).extras["counters"] == {"learner_steps": 0, "version": 1}
    assert (result.learner_steps, result.params_version) == (2, 3)
    params_after, learner_state_after = state_of(run_dir)
    moved = max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(params_after), jax.tree.leaves(params)))
    assert 0.0 < moved < 1e-3  # two updates with a small learning rate
    assert learner_state_after.statistics.observation.count > learner_state.statistics.observation.count
    assert load_experiment(run_dir).init_from == str(copy)

    shutil.rmtree(copy)
    more = rlframe.train(run_dir=run_dir, resume=True, quiet=True)
    assert more.env_steps >= 200 and more.learner_steps > 2
    with pytest.raises(UsageError, match="There is no run in .*copy"):  # a repetition needs the source
        rlframe.train(config=run_dir / "config.json", run_dir=tmp_path / "again", quiet=True)
    assert not (tmp_path / "again").exists()


@pytest.mark.system
def test_checkpoint_can_be_chosen_and_the_run_resumes_from_its_initial_one(source, tmp_path):
    steps = Checkpointer(source / "checkpoints").steps()
    best = json.loads((source / "checkpoints/best/best.json").read_text())["step"]
    for at, step in ((steps[0], steps[0]), ("best", best)):
        train("ppo", tmp_path / str(at), init_from=f"{source}@{at}", steps=100, stop_at=4, **PPO)
        assert_equal(state_of(tmp_path / str(at), 0)[0], state_of(source, step)[0])
    # A run that was killed before its first own checkpoint continues from the initial one.
    run_dir = tmp_path / "best"
    for step in Checkpointer(run_dir / "checkpoints").steps():
        if step:
            shutil.rmtree(run_dir / "checkpoints" / str(step))
    (run_dir / "result.json").unlink()
    resumed = rlframe.train(run_dir=run_dir, resume=True, stop_at=36, quiet=True)
    assert (resumed.env_steps, resumed.learner_steps) == (36, 1)
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(UsageError, match="ended before it had loaded .*Start it again in another directory"):
        rlframe.train(run_dir=run_dir, resume=True, quiet=True)


def test_arrays_that_do_not_fit_are_refused_by_name_or_skipped(source, tmp_path, capsys):
    run_dir, other = tmp_path / "run", {**PPO, "env": "Acrobot-v1", "steps": 100}
    expected = (
        r"checkpoints/\d+ does not fit this run\. params\['head0'\]\['b'\]: \(2,\) float32 in the checkpoint, \(3,\) "
        r"float32 in this run; .*statistics\.observation\.mean\[0\]: \(4,\) float32 in the checkpoint, \(6,\) float32 "
        rf"in this run; .*add --config {source}/config\.json\. .*add --init-skip-mismatched"
    )
    with pytest.raises(UsageError, match=expected):
        train("ppo", run_dir, init_from=source, **other)
    with pytest.raises(
        UsageError, match=r"statistics\.observation\.count: \(\) float32 in the checkpoint, not in this"
    ):
        train("ppo", run_dir, init_from=source, steps=100, **{**PPO, "normalize_observations": False})
    with pytest.raises(UsageError, match="does not fit this run.* No array fits"):
        no_fit = {**DQN, "env": "Acrobot-v1", "network_hidden": (16,)}
        train("dqn", run_dir, init_from=source, init_skip_mismatched=True, steps=100, **no_fit)
    with pytest.raises(UsageError, match="init_from: expected the number of a checkpoint, or best, got 'last'"):
        train("ppo", run_dir, init_from=f"{source}@last", steps=100, **PPO)
    with pytest.raises(UsageError, match="init_skip_mismatched needs init_from"):
        train("ppo", run_dir, init_skip_mismatched=True, steps=100, **PPO)
    assert not run_dir.exists()

    options = ["--num-envs", "4", "--unroll-length", "8", "--num-epochs", "1", "--num-minibatches", "1", "--env-type"]
    options += ["loop", "--preset", "none", "--eval-episodes", "1", "--network", "mlp", "--network.hidden", "8"]
    options += ["--normalize-observations", "--env", "Acrobot-v1", "--steps", "100", "--stop-at", "4", "--init-from"]
    assert main(["train", *options, str(source), "--init-skip-mismatched", "--run-dir", str(run_dir)]) == 0
    said = capsys.readouterr().err
    assert (
        f"The run starts from {source}/checkpoints/" in said and "4 of 11 arrays. Not loaded: params['head0']" in said
    )
    assert "statistics.observation.count: belongs to statistics.observation.mean[0]" in said
    assert "has no replay buffer" not in said
    (params, _), (params0, learner_state0) = state_of(source), state_of(run_dir, 0)
    np.testing.assert_array_equal(params0["head1"]["w"], params["head1"]["w"])
    assert params0["head0"]["w"].shape == (8, 3)
    assert float(learner_state0.statistics.observation.count) < 1.0  # the count belongs to the mean


def test_mismatches_name_missing_and_additional_arrays_and_other_dtypes():
    wanted = {"params['a']": np.zeros(2, np.float32), "params['b']": np.zeros(2, np.float32)}
    wanted["statistics.returns.count"] = np.zeros((), np.float32)
    given = {"params['a']": np.zeros(2, np.float16), "params['c']": np.zeros((1, 3), np.int32)}
    given["statistics.returns.count"] = np.ones((), np.float32)
    assert mismatches(wanted, given) == {
        "params['a']": "(2,) float16 in the checkpoint, (2,) float32 in this run",
        "params['b']": "not in the checkpoint, (2,) float32 in this run",
        "params['c']": "(1, 3) int32 in the checkpoint, not in this run",
    }
    assert mismatches(wanted, wanted) == {}


def check_start(agent: str, options: dict[str, Any], path: pathlib.Path) -> tuple[Any, Any]:
    """Train a run, and another run from it. Return the initial (params, learner_state) of the other run."""
    train(agent, path / "source", steps=300, **options)
    options = {**options, "init_from": path / "source", "checkpoint_every": 0}
    assert train(agent, path / "run", steps=300, **options).learner_steps > 0
    params, learner_state = state_of(path / "run", 0)
    assert_equal(params, state_of(path / "source")[0])
    return params, learner_state


@pytest.mark.system
def test_target_networks_start_from_the_loaded_parameters(tmp_path):
    params, learner_state = check_start("dqn", DQN, tmp_path)
    assert_equal(learner_state.target_params, params)
    assert not are_equal(state_of(tmp_path / "source")[1].target_params, params)  # they differ in the source


@pytest.mark.system
@pytest.mark.parametrize("agent", ["sac", "td3"])
def test_target_critics_start_from_the_loaded_parameters(tmp_path, agent):
    params, learner_state = check_start(agent, SAC, tmp_path)
    of_target = learner_state.target_params if agent == "sac" else learner_state.target_params.critics
    assert_equal(of_target, params.critics)


@pytest.mark.system
@pytest.mark.parametrize("agent", ["impala", "pqn", "r2d2"])
def test_every_other_agent_starts_from_a_run(tmp_path, agent):
    options: dict[str, Any] = {"num_envs": 4, "preset": "none", "eval_episodes": 1, "env_type": "loop"}
    sequences = {
        "sequence_length": 8,
        "burn_in": 4,
        "period": 4,
        "n_step": 2,
        "min_replay_size": 4,
        "update_period": 32,
    }
    options |= {
        "impala": {"unroll_length": 8, "batch_size": 2},
        "pqn": {"unroll_length": 8, "num_minibatches": 1, "num_epochs": 1},
        "r2d2": {**sequences, "batch_size": 2, "replay_capacity": 2_000},
    }[agent]
    check_start(agent, options, tmp_path)


@pytest.mark.system
def test_fused_run_starts_from_a_run_in_another_topology_and_resumes(tmp_path):
    jax_env = {**PPO, "env": "jax:CartPole-v1", "env_type": "auto"}
    train("ppo", tmp_path / "source", steps=64, **jax_env)
    options = {**jax_env, "topology": "fused", "steps": 200, "learning_rate": 1e-6, "checkpoint_every": 0}
    first = train("ppo", tmp_path / "run", init_from=tmp_path / "source", stop_at=64, **options)
    assert first.learner_steps >= 2
    assert_equal(state_of(tmp_path / "run", 0)[0], state_of(tmp_path / "source")[0])
    shutil.rmtree(tmp_path / "source")
    assert rlframe.train(run_dir=tmp_path / "run", resume=True, quiet=True).env_steps >= 200


TOPOLOGIES = [
    pytest.param("heavy_env", "threads", marks=pytest.mark.system),
    pytest.param("light_env", "threads", marks=pytest.mark.system),
    pytest.param("heavy_env", "local", marks=pytest.mark.system),
    pytest.param("elastic", "local", marks=pytest.mark.system),
]


@pytest.mark.parametrize(("topology", "engine"), TOPOLOGIES)
def test_programs_start_from_a_run(source, tmp_path, topology, engine):
    run_dir = tmp_path / "run"
    shutil.copytree(source, tmp_path / "copy")
    options = {**PPO, "topology": topology, "engine": engine, "num_actors": 2, "learning_rate": 1e-7}
    train("ppo", run_dir, init_from=tmp_path / "copy", steps=400, stop_at=128, checkpoint_every=0, **options)
    before, after = state_of(tmp_path / "copy"), state_of(run_dir)
    largest = max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(before[0]), jax.tree.leaves(after[0])))
    assert 0.0 < largest < 1e-4
    count = before[1].statistics.observation.count
    assert after[1].statistics.observation.count >= count + 60.0
    shutil.rmtree(tmp_path / "copy")
    assert rlframe.train(run_dir=run_dir, resume=True, stop_at=256, quiet=True).env_steps >= 256
    versions = [row["params_version"] for row in read_jsonl(run_dir / "metrics.jsonl") if "params_version" in row]
    assert versions == sorted(versions) and versions[0] < 10
