"""Runs grouped over their seeds, smoothed and averaged."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.metrics import JSONLLogger
from rlframe.metrics.curves import group_runs, load_run, smoothed


def make_run(
    directory: pathlib.Path, returns: dict[int, float], evaluations: dict[int, float] | None = None, **config
) -> pathlib.Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"experiment": config}))
    logger = JSONLLogger(directory / "metrics.jsonl")
    for step, value in returns.items():
        logger.write(step, {"episode_return": value, "episodes": 1})
        logger.write(step, {"loss": 0.0})
    for step, value in (evaluations or {}).items():
        logger.write(step, {"return_mean": value})
    logger.close()
    return directory


def test_smoothing_weighs_each_row_by_its_episodes():
    returns, episodes = np.array([0.0, 10.0, 40.0]), np.array([1.0, 1.0, 3.0])
    np.testing.assert_allclose(smoothed(returns, episodes), [5.0, 130.0 / 5.0, 130.0 / 4.0])


def test_a_run_may_be_read_over_its_wall_time(tmp_path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    logger.write(10, {"episode_return": 1.0, "wall_seconds": 2.5})
    logger.write(10, {"return_mean": 3.0})  # evaluated at the time of the row before, as it says none
    logger.write(20, {"return_mean": 4.0, "wall_seconds": 7.5})
    logger.close()
    run = load_run(tmp_path, "seconds")
    assert (run.steps.tolist(), run.evaluated_steps.tolist()) == ([2.5], [2.5, 7.5])
    assert load_run(tmp_path).evaluated_steps.tolist() == [10, 20]


def test_seeds_of_one_experiment_are_one_curve(tmp_path):
    one = make_run(tmp_path / "1", {0: 0.0, 100: 100.0, 200: 200.0}, agent="ppo", env="CartPole-v1", seed=1)
    two = make_run(tmp_path / "2", {0: 20.0, 100: 120.0}, agent="ppo", env="CartPole-v1", seed=2)
    (group,) = group_runs([load_run(one), load_run(two)])
    assert (group.label, group.env, len(group.runs)) == ("PPO", "CartPole-v1", 2)
    steps, mean, low, high = group.curve()
    assert steps[-1] == 100  # where the shorter one ends
    # Smoothed over a neighbour on each side: 50 and 100 at the ends of the first, 70 and 70 of the second.
    np.testing.assert_allclose([mean[0], mean[-1]], [60.0, 85.0])
    np.testing.assert_allclose([low[0], high[0], low[-1], high[-1]], [50.0, 70.0, 70.0, 100.0])


def test_another_setting_is_another_curve_named_after_it(tmp_path):
    runs = [
        make_run(tmp_path / str(rate), {1: 1.0}, agent="ppo", env="Acrobot-v1", agent_config={"learning_rate": rate})
        for rate in (0.1, 0.2)
    ]
    groups = group_runs([load_run(run) for run in runs])
    assert [group.label for group in groups] == ["PPO (learning_rate 0.1)", "PPO (learning_rate 0.2)"]


def test_evaluations_show_mean_and_range_over_seeds(tmp_path):
    runs = [
        make_run(tmp_path / str(i), {}, {100: value}, agent="dqn", env="X", seed=i)
        for i, value in enumerate((1.0, 3.0, 8.0))
    ]
    (group,) = group_runs([load_run(run) for run in runs])
    assert [part.tolist() for part in group.evaluations()] == [[100], [4.0], [1.0], [8.0]]


def test_evaluations_at_about_the_same_step_are_one_point(tmp_path):
    runs = [
        make_run(tmp_path / str(i), {}, dict(zip(steps, (1.0 * i, 10.0), strict=True)), agent="dqn", env="X", seed=i)
        for i, steps in enumerate([(1000, 2003), (1004, 2000), (1002, 2000)])
    ]
    (group,) = group_runs([load_run(run) for run in runs])
    assert [part.tolist() for part in group.evaluations()] == [[1002, 2001], [1, 10], [0, 10], [2, 10]]


def test_an_agent_named_by_its_file_is_labelled_by_its_class(tmp_path):
    run = load_run(make_run(tmp_path / "r", {1: 1.0}, agent="/home/me/agent.py:Reinforce", env="gymnasium:CartPole-v1"))
    assert (run.agent, run.env) == ("Reinforce", "CartPole-v1")


def test_an_environment_of_a_file_is_named_with_the_file(tmp_path):
    run = load_run(make_run(tmp_path / "r", {1: 1.0}, agent="ppo", env="/home/me/lander.py:make_env"))
    assert run.env == "lander.py:make_env"


def test_options_that_a_run_was_not_given_are_not_said(tmp_path):
    kwargs = [{}, {"gravity": 1.2}]
    runs = [make_run(tmp_path / str(i), {1: 1.0}, agent="ppo", env="X", env_kwargs=kwargs[i]) for i in range(2)]
    assert [group.label for group in group_runs([load_run(run) for run in runs])] == ["PPO", "PPO (gravity 1.2)"]


def test_a_run_without_a_config_is_named_after_its_directory(tmp_path):
    directory = make_run(tmp_path / "mine", {1: 1.0})
    (directory / "config.json").unlink()
    assert load_run(directory).agent == "mine"


def test_rows_whose_return_was_not_finite_are_left_out(tmp_path):
    run = load_run(make_run(tmp_path / "r", {1: 1.0, 2: float("nan"), 3: 3.0}))
    assert run.steps.tolist() == [1, 3]


def test_a_directory_without_metrics_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nothing has no metrics\.jsonl"):
        load_run(tmp_path / "nothing")
