"""A run predicts its number of updates before it starts, and the prediction is right."""

from __future__ import annotations

import dataclasses
import re

import pytest

from rlframe.cli.main import main
from rlframe.errors import UsageError
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.runner import run_experiment
from rlframe.programs.topologies.makers import make_agent
from rlframe.programs.training.updates import check_updates, min_updates, steps_until_first_update
from rlframe.types import ReplaySpec, Sequence, Transition

UNROLLS = ReplaySpec("queue", Sequence(32), None, 1000)
SENTENCE = r"About ([\d,]+) updates? of ([\d,]+) items each, the first after ([\d,]+) environment steps\."


@pytest.mark.parametrize(
    "spec, num_envs, steps",
    [
        (UNROLLS, 8, 32 * 8),  # a batch has one unroll of each environment
        (dataclasses.replace(UNROLLS, batch_size=20), 8, 3 * 32 * 8),
        (ReplaySpec("uniform", Transition(1), 32, 10_000, min_size=1000, samples_per_insert=8.0), 1, 1000),
        (ReplaySpec("uniform", Transition(3), 32, 10_000, min_size=1000, samples_per_insert=8.0), 8, (125 + 2) * 8),
        (ReplaySpec("uniform", Sequence(20, 5), 32, 10_000, min_size=10, samples_per_insert=8.0), 2, (20 + 4 * 5) * 2),
    ],
)
def test_first_update_waits_for_enough_items(spec, num_envs, steps):
    assert steps_until_first_update(spec, num_envs) == steps


def test_min_updates_is_lower_if_writers_are_ahead_or_sequences_are_long():
    every_step = ReplaySpec("uniform", Transition(1), 32, 10_000, min_size=1000, samples_per_insert=32.0)
    assert min_updates(every_step, 11_000, 1) == int(0.9 * (10_000 - 2))
    assert min_updates(every_step, 11_000, 8) == int(0.9 * (10_000 - 2 * 8))
    sequences = ReplaySpec("uniform", Sequence(20, 5), 32, 10_000, min_size=10, samples_per_insert=8.0)
    due = (10_000 - 8 * 15) / 5 - 10  # number of items; each item is sampled 8 times
    assert min_updates(sequences, 10_000, 8) == int(0.9 * (int(due * 8 / 32) - 2 * 8 * 8 / 32))


@pytest.mark.system
@pytest.mark.parametrize(
    "agent, fields",
    [
        ("ppo", {"unroll_length": 16, "steps": 320}),
        pytest.param("impala", {"unroll_length": 8, "batch_size": 4, "steps": 640}, marks=pytest.mark.system),
        pytest.param("dqn", {"min_replay_size": 100, "batch_size": 8, "steps": 400}, marks=pytest.mark.system),
    ],
)
def test_run_makes_about_the_predicted_number_of_updates(agent, fields, tmp_path):
    experiment = make_experiment(agent, preset="none", num_envs=2, eval_episodes=1, **fields)
    match = re.fullmatch(SENTENCE, check_updates(experiment, make_agent(experiment)))
    assert match is not None
    updates, _, first = (int(number.replace(",", "")) for number in match.groups())
    result = run_experiment(experiment, run_dir=tmp_path / "run")
    # More updates are possible, because the prediction does not include the first steps after the end of an episode.
    assert updates <= result.learner_steps <= 1.2 * updates + 1
    before = run_experiment(experiment, run_dir=tmp_path / "before", stop_at=int(0.8 * first))
    assert before.learner_steps == 0


@pytest.mark.system
def test_train_command_prints_the_number_of_updates_unless_quiet(tmp_path, capsys):
    arguments = ["train", "--agent", "ppo", "--preset", "none", "--num-envs", "2", "--unroll-length", "16"]
    arguments += ["--steps", "64", "--eval-episodes", "1", "--num-epochs", "1", "--env-type", "loop"]
    assert main([*arguments, "--run-dir", str(tmp_path / "run")]) == 0
    assert "About 2 updates of 2 items each, the first after 32 environment steps." in capsys.readouterr().err
    assert main([*arguments, "--run-dir", str(tmp_path / "quiet"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "agent, first, options",
    [("ppo", "16,384", "--unroll-length or --num-envs"), ("dqn", "50,000", "or lower --min-replay-size.")],
)
@pytest.mark.parametrize("topology", ["single_process", "heavy_env"])
def test_new_run_without_updates_is_refused_and_leaves_no_directory(agent, first, options, topology, tmp_path, capsys):
    arguments = ["--agent", agent, "--preset", "none", "--steps", "5000", "--topology", topology]
    if topology != "single_process":
        arguments += ["--engine", "threads"]
    assert main(["train", *arguments, "--run-dir", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        f"rlframe: A run of 5,000 environment steps would make no update. The first update needs {first}."
    )
    assert options in message and not (tmp_path / "run").exists()


def test_recurrent_agent_with_fewer_environments_than_minibatches_is_refused(tmp_path, capsys):
    arguments = ["--agent", "ppo", "--network", "lstm", "--preset", "none", "--steps", "50000", "--num-envs", "8"]
    assert main(["train", *arguments, "--run-dir", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        message.startswith("rlframe: PPO: num_minibatches=32 is above the number of rows in a batch (8)")
        and "--num-minibatches" in message
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.system
def test_session_can_stop_before_the_first_update(tmp_path):
    experiment = make_experiment("ppo", preset="none", num_envs=2, unroll_length=64, steps=256, eval_episodes=1)
    assert run_experiment(experiment, run_dir=tmp_path / "run", stop_at=32).learner_steps == 0
    assert run_experiment(experiment, run_dir=tmp_path / "run", resume=True).learner_steps == 2


NETWORKS = """
from rlframe.agents.networks import MLPConfig, action_values

def plain(observation_spec, action_spec):
    return MLPConfig().build(observation_spec, (action_values(action_spec.num_values, 1),))

def noisy(observation_spec, action_spec):
    return MLPConfig(noisy=0.5).build(observation_spec, (action_values(action_spec.num_values, 1),))
"""


@pytest.mark.parametrize("network", ["mlp", "FILE:plain"])
@pytest.mark.parametrize("normalized", [False, True])
def test_agent_that_never_explores_is_refused(tmp_path, network, normalized):
    (tmp_path / "net.py").write_text(NETWORKS)
    options = {"epsilon": 0.0, "normalize_observations": normalized}
    experiment = make_experiment("dqn", network=network.replace("FILE", f"{tmp_path}/net.py"), **options)
    with pytest.raises(UsageError, match="dqn would never explore: epsilon is 0"):
        check_updates(experiment, make_agent(experiment))
    noisy = make_experiment("dqn", network=f"{tmp_path}/net.py:noisy", **options)
    assert check_updates(noisy, make_agent(noisy))
    explores = make_experiment("dqn", network="mlp", **{**options, "epsilon": "linear:0:0.1"})
    assert check_updates(explores, make_agent(explores))
