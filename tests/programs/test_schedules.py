"""Schedules in runs: they equal loops with values computed here, continue on resume, and can be functions."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlframe
from rlframe import Actor, Inferencer, InferencerConfig, Learner, LearnerConfig, ReplayBuffer
from rlframe.errors import UsageError
from rlframe.metrics.files import read_jsonl
from rlframe.programs import load_experiment, make_experiment, run_experiment
from rlframe.programs.topologies.makers import env_builder, make_agent
from tests.programs.test_single_process import saved_arrays

UPDATES = 12
SMALL = {"network": "mlp", "network_hidden": (8,), "num_envs": 4, "eval_episodes": 0, "preset": "none"}
PPO = {"unroll_length": 8, "num_minibatches": 1, "num_epochs": 2, "steps": UPDATES * 32, "log_every": 32, **SMALL}
PPO |= {"learning_rate": "cosine:1e-2:1e-3", "clip_epsilon": "piecewise:0.3:0.1@0.5", "entropy_cost": "linear:0.1:0"}
DQN = {"batch_size": 8, "min_replay_size": 32, "update_period": 4, "steps": 32 + UPDATES * 4, "log_every": 4, **SMALL}
DQN |= {"learning_rate": "linear:1e-2:0", "epsilon": "linear:1:0.1@0.5", "optimizer": "adam"}

# The same schedules, without the functions of rlframe.
BY_HAND = {
    "ppo": {
        "learning_rate": lambda step: 1e-3 + 9e-3 * 0.5 * (1.0 + jnp.cos(jnp.pi * step / UPDATES)),
        "clip_epsilon": lambda step: jnp.where(step < UPDATES / 2, 0.3, 0.1),
        "entropy_cost": lambda step: 0.1 - 0.1 * step / UPDATES,
    },
    "dqn": {
        "learning_rate": lambda step: 1e-2 - 1e-2 * step / UPDATES,
        "epsilon": lambda step: jnp.maximum(1.0 - 0.9 * step / (UPDATES / 2), 0.1),
    },
}


def loop(experiment, functions) -> list[np.ndarray]:
    """Train in a loop with these functions as schedules. Return the parameters."""
    agent = make_agent(
        dataclasses.replace(experiment, agent_config=dataclasses.replace(experiment.agent_config, **functions))
    )
    replay_buffer = ReplayBuffer(agent, seed=experiment.seed)
    learner = Learner(LearnerConfig(seed=experiment.seed), agent, replay_buffer)
    inferencer = Inferencer(InferencerConfig(seed=experiment.seed), agent, learner)
    actor = Actor(env_builder(experiment), inferencer, replay_buffer, seed=experiment.seed)
    while learner.learner_steps < UPDATES:
        actor.step()
        while learner.learner_steps < UPDATES and (batch := replay_buffer.sample()) is not None:
            learner.step(batch)
    actor.close()
    learner.close()
    return [leaf for leaf in jax.tree.leaves(learner.get_params()[1]) if leaf.ndim]


def check_rows(run_dir, agent: str) -> None:
    """Check the scheduled values in the log rows of a run."""
    rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if "learning_rate" in row]
    assert len(rows) > UPDATES / 2
    for row in rows:
        for name, function in BY_HAND[agent].items():
            # The values of an update are those after the updates before it.
            np.testing.assert_allclose(row[name], function(row["learner_steps"] - 1), rtol=1e-4, atol=1e-8)


@pytest.mark.system
@pytest.mark.parametrize(("agent", "options"), [("ppo", PPO), ("dqn", DQN)], ids=["ppo", "dqn"])
def test_run_with_schedules_gives_the_same_parameters_as_a_loop(agent, options, tmp_path):
    for topology in ("single_process", "fused"):
        # Runs end at the same update, but not always at the same step.
        length = {"steps": 10_000, "schedule_steps": options["steps"], "until_learner_steps": UPDATES}
        experiment = make_experiment(agent, "jax:CartPole-v1", topology=topology, **{**options, **length})
        run_experiment(experiment, run_dir=tmp_path / topology)
        check_rows(tmp_path / topology, agent)
    expected = loop(make_experiment(agent, "jax:CartPole-v1", **options), BY_HAND[agent])
    # `fused` draws other items from a replay: test_fused.py compares its updates.
    for topology in ("single_process", "fused") if agent == "ppo" else ("single_process",):
        saved = saved_arrays(tmp_path / topology)
        for leaf in expected:
            assert min(np.abs(each - leaf).max() for each in saved if each.shape == leaf.shape) < 1e-5


RATES = """
import optax

rate = optax.cosine_decay_schedule(1e-2, 20)

def half(step):
    return 0.5
"""


@pytest.mark.system
def test_function_of_a_file_is_a_schedule_and_is_saved_by_its_name(tmp_path):
    (tmp_path / "rates.py").write_text(RATES)
    options = {**PPO, "learning_rate": f"{tmp_path}/rates.py:rate", "clip_epsilon": 0.2, "steps": 96, "quiet": True}
    rlframe.train("ppo", "jax:CartPole-v1", run_dir=tmp_path / "run", **options)
    rates = [row["learning_rate"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in row]
    np.testing.assert_allclose(rates, [5e-3 * (1 + np.cos(np.pi * step / 20)) for step in range(3)], rtol=1e-5)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["experiment"]["agent_config"]
    assert saved["learning_rate"] == f"{tmp_path}/rates.py:rate" and saved["entropy_cost"] == "linear:0.1:0"
    # The end of the entropy cost's schedule stays at step 96, and the function counts on.
    rlframe.train(run_dir=tmp_path / "run", resume=True, steps=160, quiet=True)
    row = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in row][-1]
    assert (row["learner_steps"], row["entropy_cost"]) == (5, 0.0)
    np.testing.assert_allclose(row["learning_rate"], 5e-3 * (1 + np.cos(np.pi * 4 / 20)), rtol=1e-5)
    assert load_experiment(tmp_path / "run").schedule_steps == 96


def test_function_without_a_file_works_in_one_process_and_is_refused_by_several(tmp_path):
    rate = optax.linear_schedule(1e-2, 0.0, 3)
    options = {**PPO, "learning_rate": rate, "clip_epsilon": 0.2, "entropy_cost": 0.0, "steps": 96, "quiet": True}
    rlframe.train("ppo", "jax:CartPole-v1", run_dir=tmp_path / "run", **options)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["experiment"]["agent_config"]
    assert saved["learning_rate"] == "__live__:schedule"
    rlframe.train(run_dir=tmp_path / "run", resume=True, steps=128, quiet=True)  # this process remembers the function
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["learning_rate"] == pytest.approx(0.0, abs=1e-8)
    with pytest.raises(UsageError, match=r"learning_rate=schedule is defined in a notebook.* my_learning_rate\.py"):
        make_experiment("ppo", "jax:CartPole-v1", topology="heavy_env", **{**PPO, "learning_rate": rate})


def test_schedule_that_has_no_value_in_a_run_is_refused_before_it_starts(tmp_path):
    (tmp_path / "rates.py").write_text("def rate(step):\n    return [0.1, 0.2]\n")
    for rate, message in (
        ("linear:0:1e-3@20:0", "in a run of 12 learner steps, the times of the schedule do not increase: 0, 20, 12"),
        (f"{tmp_path}/rates.py:rate", r"learning_rate must return one number .* got shape \(2,\)"),
    ):
        with pytest.raises(UsageError, match=message):
            run_experiment(make_experiment("ppo", **{**PPO, "learning_rate": rate}), run_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_saved_name_of_a_function_that_is_gone_is_an_error(tmp_path):
    experiment = make_experiment("ppo", **{**PPO, "learning_rate": "__live__:schedule"})
    with pytest.raises(
        UsageError, match=r"The learning_rate schedule was defined in the Python process.*learning_rate="
    ):
        make_agent(experiment)
    (tmp_path / "rates.py").write_text("rate = 3\n")
    with pytest.raises(
        UsageError, match=r"rates\.py:rate is 3\. A schedule must be a function: number of learner steps"
    ):
        make_agent(make_experiment("ppo", **{**PPO, "learning_rate": f"{tmp_path}/rates.py:rate"}))


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "light_env", "elastic"])
def test_schedules_of_a_program_of_several_processes_follow_the_updates(topology, tmp_path):
    (tmp_path / "rates.py").write_text(RATES)
    options = {**SMALL, "num_envs": 2, "steps": 6_000, "log_every": 100, "topology": topology, "batch_size": 8}
    experiment = make_experiment(
        "dqn", "gymnasium:CartPole-v1", min_replay_size=100, learning_rate="linear:1e-3:0",
        epsilon="piecewise:1:0.25@200", importance_exponent=f"{tmp_path}/rates.py:half", prioritized=True, **options,
    )  # fmt: skip
    result = run_experiment(experiment, run_dir=tmp_path / "run")
    total = (6_000 - 100) // 4
    assert 0.9 * total < result.learner_steps < 1.1 * total
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "learning_rate" in row]
    assert {row["epsilon"] for row in rows} == {1.0, 0.25}
    for row in rows:
        expected = max(1e-3 * (1.0 - row["learner_steps"] / total), 0.0)
        assert row["learning_rate"] == pytest.approx(expected, abs=0.1 * 1e-3)
    assert rows[-1]["learning_rate"] < 1e-4
