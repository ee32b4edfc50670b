"""Tests of learning curves: runs that differ only in their seed are grouped, smoothed and averaged."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.metrics import JSONLLogger
from rlframe.metrics.curves import group_runs, interquartile_mean, interval, load_run, smoothed


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


def test_smoothing_weights_each_row_by_its_number_of_episodes():
    returns, episodes = np.array([0.0, 10.0, 40.0]), np.array([1.0, 1.0, 3.0])
    np.testing.assert_allclose(smoothed(returns, episodes), [5.0, 130.0 / 5.0, 130.0 / 4.0])


def test_run_can_be_loaded_with_wall_time_on_the_x_axis(tmp_path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    logger.write(10, {"episode_return": 1.0, "wall_seconds": 2.5})
    logger.write(10, {"return_mean": 3.0})  # a row without a time gets the time of the row before
    logger.write(20, {"return_mean": 4.0, "wall_seconds": 7.5})
    logger.close()
    run = load_run(tmp_path, "seconds")
    assert (run.steps.tolist(), run.evaluated_steps.tolist()) == ([2.5], [2.5, 7.5])
    assert load_run(tmp_path).evaluated_steps.tolist() == [10, 20]


def test_times_of_a_resumed_run_continue_after_its_first_session(tmp_path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    for step, seconds in ((10, 100.0), (20, 200.0), (30, 50.0), (40, 150.0)):
        logger.write(step, {"episode_return": 1.0, "wall_seconds": seconds})
    logger.close()
    assert load_run(tmp_path, "seconds").steps.tolist() == [100.0, 200.0, 250.0, 350.0]


def test_runs_that_differ_only_in_their_seed_become_one_curve(tmp_path):
    one = make_run(tmp_path / "1", {0: 0.0, 100: 100.0, 200: 200.0}, agent="ppo", env="CartPole-v1", seed=1)
    two = make_run(tmp_path / "2", {0: 20.0, 100: 120.0}, agent="ppo", env="CartPole-v1", seed=2)
    (group,) = group_runs([load_run(one), load_run(two)])
    assert (group.label, group.env, len(group.runs)) == ("PPO", "CartPole-v1", 2)
    steps, mean, low, high = group.curve()
    assert steps[-1] == 100  # end of the shorter run
    # Smoothing replaces each value by the mean of the row and its neighbors. The smoothed first run goes from 50 to
    # 100, and the smoothed second run is always 70.
    np.testing.assert_allclose([mean[0], mean[-1]], [60.0, 85.0])
    np.testing.assert_allclose([low[0], high[0], low[-1], high[-1]], [50.0, 70.0, 70.0, 100.0])


def test_runs_with_different_options_become_labeled_curves(tmp_path):
    runs = [
        make_run(tmp_path / str(rate), {1: 1.0}, agent="ppo", env="Acrobot-v1", agent_config={"learning_rate": rate})
        for rate in (0.1, 0.2)
    ]
    groups = group_runs([load_run(run) for run in runs])
    assert [group.label for group in groups] == ["PPO (learning_rate 0.1)", "PPO (learning_rate 0.2)"]


def test_evaluations_have_mean_and_range_over_seeds(tmp_path):
    runs = [
        make_run(tmp_path / str(i), {}, {100: value}, agent="dqn", env="X", seed=i)
        for i, value in enumerate((1.0, 3.0, 8.0))
    ]
    (group,) = group_runs([load_run(run) for run in runs])
    assert [part.tolist() for part in group.evaluations()] == [[100], [4.0], [1.0], [8.0]]


def test_evaluations_at_almost_the_same_step_become_one_point(tmp_path):
    runs = [
        make_run(tmp_path / str(i), {}, dict(zip(steps, (1.0 * i, 10.0), strict=True)), agent="dqn", env="X", seed=i)
        for i, steps in enumerate([(1000, 2003), (1004, 2000), (1002, 2000)])
    ]
    (group,) = group_runs([load_run(run) for run in runs])
    assert [part.tolist() for part in group.evaluations()] == [[1002, 2001], [1, 10], [0, 10], [2, 10]]


def test_agent_from_a_file_is_labeled_with_its_class_name(tmp_path):
    run = load_run(make_run(tmp_path / "r", {1: 1.0}, agent="/home/me/agent.py:Reinforce", env="gymnasium:CartPole-v1"))
    assert (run.agent, run.env) == ("Reinforce", "CartPole-v1")


def test_environment_from_a_file_is_labeled_with_the_file_name(tmp_path):
    run = load_run(make_run(tmp_path / "r", {1: 1.0}, agent="ppo", env="/home/me/lander.py:make_env"))
    assert run.env == "lander.py:make_env"


def test_label_lists_only_options_that_the_run_itself_has(tmp_path):
    kwargs = [{}, {"gravity": 1.2}]
    runs = [make_run(tmp_path / str(i), {1: 1.0}, agent="ppo", env="X", env_kwargs=kwargs[i]) for i in range(2)]
    assert [group.label for group in group_runs([load_run(run) for run in runs])] == ["PPO", "PPO (gravity 1.2)"]


def labels_of(tmp_path: pathlib.Path, *configs: dict) -> list[str]:
    """Return the labels of runs with these configs, in the same order. Each run must have its own curve."""
    runs = [load_run(make_run(tmp_path / str(i), {1: 1.0}, **config)) for i, config in enumerate(configs)]
    groups = group_runs(runs)
    assert [len(group.runs) for group in groups] == [1] * len(runs)
    labels = [group.label for group in groups]
    assert len(set(labels)) == len(labels), labels
    return labels


def test_label_lists_each_option_whose_value_differs_between_runs(tmp_path):
    options = [{"agent": "ppo", "env": "X", "agent_config": dict.fromkeys("edcba", i)} for i in range(2)]
    assert labels_of(tmp_path, *options) == ["PPO (a 0, b 0, c 0, d 0, e 0)", "PPO (a 1, b 1, c 1, d 1, e 1)"]


def test_two_runs_have_different_labels_if_one_option_differs(tmp_path):
    several = [{"a": a, "b": a, "c": a, "z": z} for a, z in ((0, 0), (0, 1), (1, 1))]
    runs = [{"agent": "ppo", "env": "X", "agent_config": config} for config in several]
    assert labels_of(tmp_path, *runs)[:2] == ["PPO (a 0, b 0, c 0, z 0)", "PPO (a 0, b 0, c 0, z 1)"]


def test_options_with_the_same_name_are_shown_with_their_prefix(tmp_path):
    runs = [{"agent": "ppo", "env": "X", "env_kwargs": {"size": a}, "topology": {"network_config": {"size": b}},
             "num_envs": a, "agent_config": {"num_envs": b}} for a, b in ((1, 2), (2, 1))]  # fmt: skip
    first, _ = labels_of(tmp_path, *runs)
    assert first == "PPO (agent_config.num_envs 2, env_kwargs.size 1, num_envs 1, network.size 2)"


def test_numbers_in_labels_have_enough_digits_to_be_different(tmp_path):
    rates = (0.12345678, 0.12345679, 0.3)
    runs = [{"agent": "ppo", "env": "X", "agent_config": {"rate": rate, "cost": rate / 3}} for rate in rates[:2]]
    assert labels_of(tmp_path, *runs)[0] == "PPO (cost 0.04115226, rate 0.12345678)"


def test_numbers_in_labels_are_rounded_if_they_remain_different(tmp_path):
    runs = [{"agent": "ppo", "env": "X", "rate": rate} for rate in (1e-5, 1 / 3)]
    assert labels_of(tmp_path, *runs) == ["PPO (rate 1e-05)", "PPO (rate 0.333333)"]


def test_equal_int_and_float_are_the_same_setting(tmp_path):
    runs = [make_run(tmp_path / str(i), {1: 1.0}, agent="ppo", env="X", rate=rate) for i, rate in enumerate((1, 1.0))]
    assert len(group_runs([load_run(run) for run in runs])) == 1


def test_labels_quote_strings_that_look_like_other_values(tmp_path):
    values = (None, "None", True, "True", 1, "1", "a, b 2", [1, 2], "[1, 2]")
    labels = labels_of(tmp_path, *({"agent": "ppo", "env": "X", "env_kwargs": {"mode": value}} for value in values))
    assert labels[:2] == ["PPO (mode None)", "PPO (mode 'None')"]


def test_labels_show_the_folders_of_files_with_the_same_name(tmp_path):
    agents = [{"agent": f"/home/me/{name}/agent.py:Mine", "env": "X"} for name in "ab"]
    assert labels_of(tmp_path, *agents) == ["Mine (agent a/agent.py:Mine)", "Mine (agent b/agent.py:Mine)"]


def test_environments_from_different_sources_are_different_curves(tmp_path):
    envs = [{"agent": "ppo", "env": env} for env in ("gymnasium:X-v1", "X-v1")]
    assert labels_of(tmp_path, *envs) == ["PPO (env gymnasium:X-v1)", "PPO (env X-v1)"]


def test_label_names_topology_and_network_instead_of_their_options(tmp_path):
    topologies = [
        {"name": "single_process", "replay_every": 1, "network": None, "network_config": None},
        {"name": "heavy_env", "num_actors": 2, "network": "mlp", "network_config": {"hidden": [64, 64]}},
        {"name": "heavy_env", "num_actors": 4, "network": "mlp", "network_config": {"hidden": [64, 64]}},
    ]
    labels = labels_of(tmp_path, *({"agent": "ppo", "env": "X", "topology": each} for each in topologies))
    assert labels == [
        "PPO (topology single_process, network None)",
        "PPO (topology heavy_env, network mlp, num_actors 2)",
        "PPO (topology heavy_env, network mlp, num_actors 4)",
    ]


def test_label_contains_the_name_of_the_head_instead_of_its_options(tmp_path):
    heads = [
        {"name": "expectation", "huber_threshold": 1.0},
        {"name": "categorical", "num_atoms": 51, "value_min": -10.0},
        {"name": "categorical", "num_atoms": 21, "value_min": -10.0},
    ]
    labels = labels_of(tmp_path, *({"agent": "dqn", "env": "X", "agent_config": {"head": each}} for each in heads))
    assert labels == [
        "DQN (head expectation)",
        "DQN (head categorical, num_atoms 51)",
        "DQN (head categorical, num_atoms 21)",
    ]


def test_environment_options_are_shown_for_every_topology(tmp_path):
    runs = [{"agent": "ppo", "env": "X", "topology": {"name": name, "eval_env_kwargs": kwargs}}
            for name, kwargs in (("a", {}), ("b", {"wind": 3}))]  # fmt: skip
    assert labels_of(tmp_path, *runs) == ["PPO (topology a)", "PPO (wind 3, topology b)"]


def test_runs_without_a_config_are_separate_curves(tmp_path):
    runs = []
    for parent in "ab":
        (tmp_path / parent).mkdir()
        runs.append(make_run(tmp_path / parent / "run", {1: 1.0}))
        (runs[-1] / "config.json").unlink()
    labels = [group.label for group in group_runs([load_run(run) for run in runs])]
    assert labels == ["run (directory a/run)", "run (directory b/run)"]


def test_run_without_a_config_is_named_after_its_directory(tmp_path):
    directory = make_run(tmp_path / "mine", {1: 1.0})
    (directory / "config.json").unlink()
    assert load_run(directory).agent == "mine"


def test_rows_without_a_finite_return_are_omitted(tmp_path):
    run = load_run(make_run(tmp_path / "r", {1: 1.0, 2: float("nan"), 3: 3.0}))
    assert run.steps.tolist() == [1, 3]


def test_directory_without_metrics_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"nothing has no metrics\.jsonl"):
        load_run(tmp_path / "nothing")


# Compare interquartile means and bootstrap intervals with hand-computed examples and with the library rliable.


def test_interquartile_mean_averages_the_middle_half():
    assert interquartile_mean([1000.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -50.0]) == 3.5
    assert interquartile_mean([1.0, 2.0, 6.0]) == 3.0  # fewer than four values: the mean of all
    np.testing.assert_array_equal(interquartile_mean([[0.0, 1.0], [5.0, 1.0], [7.0, 3.0], [90.0, 9.0]]), [6.0, 2.0])


def test_interval_is_close_to_the_interval_over_all_resamples():
    assert [float(end) for end in interval([0.0, 10.0, 4.0])] == [
        0.0,
        10.0,
    ]  # fewer than four values: (lowest, highest)
    values = np.array([0.0, 1.3, 2.1, 4.7, 9.9])
    each = np.stack(np.meshgrid(*[values] * 5)).reshape(5, -1)  # all 5**5 = 3,125 possible resamples
    wanted = np.percentile(interquartile_mean(each), [2.5, 97.5])
    np.testing.assert_allclose(interval(values), wanted, atol=0.4)
    assert interval([7.0]) == (7.0, 7.0)


SCORES = [500.0, 481.5, 403.25, 352.5, 500.0, 429.75, 366.0, 12.0, 478.5, 455.0, 500.0]


@pytest.mark.parametrize(
    ("count", "wanted"), [(4, 442.375), (5, 461.583333), (7, 436.1), (8, 420.125), (11, 444.857143)]
)
def test_interquartile_means_equal_the_results_of_rliable(count, wanted):
    # rliable 1.2.0: metrics.aggregate_iqm(scores[:, None]).
    assert interquartile_mean(SCORES[:count]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("count", "wanted"), [(5, (369.4, 500.0)), (8, (283.4, 486.1))])
def test_intervals_are_close_to_the_results_of_rliable(count, wanted):
    # rliable 1.2.0: library.get_interval_estimates with aggregate_iqm and 50,000 resamples.
    assert np.array(interval(SCORES[:count])) == pytest.approx(wanted, abs=8.0)


def test_interval_of_curves_is_computed_for_each_point():
    curves = np.random.RandomState(0).randn(6, 3)
    low, high = interval(curves)
    for i in range(3):
        np.testing.assert_allclose([low[i], high[i]], interval(curves[:, i]))
