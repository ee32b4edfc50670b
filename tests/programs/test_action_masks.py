"""Complete runs with action masks: no topology makes an illegal move, and masked agents learn a game."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from jax import export

import rlframe
from rlframe.errors import EnvError, UsageError
from rlframe.metrics.files import read_jsonl
from rlframe.programs import evaluate, load_experiment, make_experiment, run_experiment
from tests import masked_game
from tests.masked_game import NUM_ACTIONS, SIZE, STEPS

GAME = f"{pathlib.Path(masked_game.__file__)}:MaskedGame"
JAX_GAME = f"{pathlib.Path(masked_game.__file__)}:MaskedJaxGame"
SMALL = {"network": "mlp", "network.hidden": (16,)}
ON_POLICY = {"unroll_length": 8, "num_minibatches": 2, "num_epochs": 1, **SMALL}
REPLAY = {"min_replay_size": 20, "update_period": 8, "batch_size": 8, "preset": "none"}
AGENTS = {
    "ppo": {**ON_POLICY, "network": "gru", "network.hidden": (8,), "normalize_observations": True},
    "impala": {"unroll_length": 8, "batch_size": 4, **SMALL},
    "pqn": ON_POLICY,
    "dqn": {**REPLAY, "prioritized": True, "n_step": 3, **SMALL, "head": "categorical", "epsilon": 0.5},
    "r2d2": {**REPLAY, "sequence_length": 8, "burn_in": 2, "period": 4, "network": "gru", "network.hidden": (8,)},
}


def run(agent, run_dir, env=GAME, topology="single_process", **options):
    values = {"num_envs": 4, "steps": 160, "eval_episodes": 2, "seed": 1, "log_every": 40, **AGENTS[agent]}
    if topology not in ("single_process", "fused"):
        values |= {"num_actors": 2, "engine": "local"}
    if env == GAME:  # an illegal move raises
        options["env_kwargs"] = {"strict": True, **options.get("env_kwargs", {})}
    return run_experiment(make_experiment(agent, env, topology=topology, **{**values, **options}), run_dir=run_dir)


def check_all_moves_were_legal(result, run_dir):
    """An illegal move ends an episode early, so every episode must have all steps."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    lengths = [row["episode_length"] for row in rows if "episode_length" in row]
    assert lengths and set(lengths) == {STEPS} and result.evaluation["length_mean"] == STEPS
    assert result.learner_steps > 0


@pytest.mark.system
def test_policy_of_a_masked_run_is_evaluated_loaded_exported_and_resumed(tmp_path):
    options = {"env_kwargs": {"mask": "legal"}, "action_mask": "legal", "frame_stack": 2}
    result = run("ppo", tmp_path / "run", **options)
    check_all_moves_were_legal(result, tmp_path / "run")
    assert evaluate(tmp_path / "run", episodes=2)["return_mean"] == result.return_mean
    policy, random = rlframe.load(tmp_path / "run"), np.random.RandomState(0)
    observation = {
        "observation": random.rand(16, SIZE).astype(np.float32),
        "legal": (random.rand(16, NUM_ACTIONS) < 0.2).astype(np.int8),
    }
    observation["legal"][:, 3] = 1
    action = policy.act(observation)
    assert observation["legal"][np.arange(16), action].all()
    exported = export.deserialize(rlframe.export(tmp_path / "run", tmp_path / "policy").read_bytes())
    initial = [np.zeros((16, *leaf.shape[1:]), leaf.dtype) for leaf in exported.in_avals[3:-1]]
    blocked = {**observation, "legal": observation["legal"] * (np.arange(16) != 5)[:, None].astype(np.int8)}
    seen, _ = exported.call(blocked, np.ones(16, bool), initial, np.uint32(0))
    np.testing.assert_array_equal(seen, np.where(np.arange(16) == 5, np.iinfo(np.int32).min, action))
    with pytest.raises(UsageError, match="action mask in row 5 of the observations allows no action"):
        policy.act(blocked)
    resumed = run_experiment(load_experiment(tmp_path / "run"), run_dir=tmp_path / "run", resume=True)
    assert resumed.env_steps == result.env_steps


@pytest.mark.parametrize(
    "agent", ["dqn", *(pytest.param(name, marks=pytest.mark.system) for name in ("impala", "pqn", "r2d2"))]
)
def test_agents_make_only_legal_moves_in_one_process(agent, tmp_path):
    check_all_moves_were_legal(run(agent, tmp_path), tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("agent", ["ppo", "impala", "pqn", "dqn", "r2d2"])
def test_agents_make_only_legal_moves_in_one_jitted_call(agent, tmp_path):
    check_all_moves_were_legal(run(agent, tmp_path, JAX_GAME, "fused"), tmp_path)


@pytest.mark.system
@pytest.mark.parametrize(
    ("agent", "topology"),
    [
        ("dqn", "heavy_env"),
        ("impala", "heavy_env"),
        ("ppo", "heavy_env"),
        ("pqn", "light_env"),
        ("r2d2", "distributed"),
        ("ppo", "elastic"),
        ("dqn", "light_env"),
    ],
)
def test_agents_make_only_legal_moves_in_several_processes(agent, topology, tmp_path):
    check_all_moves_were_legal(run(agent, tmp_path, topology=topology, steps=800), tmp_path)


FUSED_GAME = pytest.param(JAX_GAME, "fused", marks=pytest.mark.system)


@pytest.mark.parametrize(("env", "topology"), [(GAME, "single_process"), FUSED_GAME])
def test_environment_without_a_legal_action_ends_the_run(env, topology, tmp_path):
    options = {"env_kwargs": {"blocked": 3}, "eval_episodes": 0}
    with pytest.raises(EnvError, match="Environment 0 gave an action mask without a legal action"):
        run("pqn", tmp_path, env, topology, **options)


def test_wrong_mask_is_refused_before_the_run_starts(tmp_path):
    with pytest.raises(UsageError, match="action_mask='leagl' must be a key of the observation"):
        run("dqn", tmp_path / "run", action_mask="leagl")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


LEARNING = {
    "ppo": {
        "num_envs": 16,
        "unroll_length": 32,
        "num_minibatches": 4,
        "num_epochs": 4,
        "learning_rate": 2.5e-3,
        "steps": 40_000,
    },
    "dqn": {
        "num_envs": 8,
        "min_replay_size": 1000,
        "update_period": 4,
        "target_update_period": 250,
        "preset": "none",
        "optimizer": "adam",
        "learning_rate": 1e-3,
        "epsilon": "linear:1:0.05@2500",
        "replay_capacity": 20_000,
        "steps": 20_000,
    },
}


def learned_share(agent, seed, run_dir, **env_kwargs) -> float:
    """Train an agent in the game. Return its mean return, as a share of the optimal return."""
    options = {**LEARNING[agent], "seed": seed, "eval_episodes": 200, "env_type": "loop", "env_kwargs": env_kwargs}
    result = run_experiment(make_experiment(agent, GAME, **options), run_dir=run_dir)
    return result.return_mean / masked_game.optimal_return()


@pytest.mark.system
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("agent", LEARNING)
def test_masked_agents_learn_at_least_90_percent_of_the_optimal_return(agent, seed, tmp_path):
    assert learned_share(agent, seed, tmp_path) >= 0.9
