"""Tests of plots of learning curves: what the figure contains, and which file is saved."""

from __future__ import annotations

import os

import pytest
from matplotlib import image

from rlframe.errors import RlframeError, UsageError
from rlframe.metrics import JSONLLogger, plot_learning_curve, plots
from rlframe.metrics.curves import interquartile_mean, interval
from tests.metrics.test_curves import make_run


@pytest.fixture
def figures(monkeypatch):
    """Return a list that collects each figure when it is saved."""
    kept = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, out: (kept.append(figure), save(figure, out)))
    return kept


def labels(axis) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_plot_of_one_run_has_training_and_evaluation(tmp_path, figures):
    run = make_run(
        tmp_path / "run", {0: 10.0, 1_500: 20.0, 3_000: 30.0}, {3_000: 28.5}, agent="ppo", env="CartPole-v1", seed=1
    )
    picture = plot_learning_curve(run)
    assert picture == run / "learning_curve.png"
    assert image.imread(picture).shape == (675, 1200, 4)
    (axis,) = figures[0].axes
    assert axis.get_title(loc="left") == "PPO on CartPole-v1"
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("environment steps", "episode return")
    assert labels(axis) == ["training", "evaluation: 28.5 at the end"]
    raw, line = axis.get_lines()[:2]
    assert raw.get_ydata().tolist() == [10.0, 20.0, 30.0]
    assert line.get_ydata().tolist() == [15.0, 20.0, 25.0]


def test_special_characters_in_names_are_escaped(tmp_path, figures):
    env = os.fsdecode(b"a\xff$x_$.py:Env")
    run = make_run(tmp_path / "run", {0: 10.0, 9: 20.0}, {}, agent="ppo", env=env, seed=1)
    plot_learning_curve(run)
    assert figures[0].axes[0].get_title(loc="left") == r"PPO on a\xff\$x_\$.py:Env"


def test_plot_has_a_panel_per_environment_and_a_line_per_agent(tmp_path, figures):
    runs = [
        make_run(tmp_path / f"{agent}{env}{seed}", {0: 0.0, 9: 9.0}, {9: 9.0}, agent=agent, env=env, seed=seed)
        for agent, env in (("ppo", "A-v1"), ("dqn", "A-v1"), ("ppo", "B-v1"))
        for seed in (1, 2)
    ]
    plot_learning_curve(runs, tmp_path / "out" / "all.png")
    first, second = figures[0].axes
    assert first.get_title(loc="left") == "A-v1"
    assert labels(first) == ["PPO, 2 seeds: evaluated 9.00", "DQN, 2 seeds: evaluated 9.00"]
    assert first.get_legend().get_title().get_text() == "mean, lowest to highest"
    assert second.get_title(loc="left") == "PPO on B-v1"
    assert labels(second) == [
        "training, 2 seeds: mean, lowest to highest",
        "evaluation: mean, lowest to highest, 9.00 at the end",
    ]
    more = [make_run(tmp_path / f"more{seed}", {0: 0.0}, agent="ppo", env="B-v1", seed=seed) for seed in (3, 4)]
    plot_learning_curve([*runs[4:], *more], tmp_path / "four.png")
    assert labels(figures[1].axes[0])[0] == "training, 4 seeds: IQM and 95% interval"


def test_legend_of_groups_with_different_numbers_of_seeds_names_both_averages(tmp_path, figures):
    runs = [
        make_run(tmp_path / f"{agent}{seed}", {0: 0.0, 9: 9.0}, {9: 9.0}, agent=agent, env="A-v1", seed=seed)
        for agent, count in (("ppo", 5), ("dqn", 3), ("pqn", 1))
        for seed in range(count)
    ]
    plot_learning_curve(runs, tmp_path / "out.png")
    title = figures[0].axes[0].get_legend().get_title().get_text()
    assert title.split("\n") == ["5 seeds: IQM and 95% interval", "3 seeds: mean, lowest to highest"]


def test_evaluations_have_the_average_and_interval_of_the_table(tmp_path, figures):
    returns = [0.9, 0.6, 0.8, 0.85, 0.95, 0.9, 0.2, 0.7]
    runs = [
        make_run(tmp_path / str(seed), {0: 0.0, 9: 1.0}, {100 + 3 * seed: value}, agent="ppo", env="A-v1", seed=seed)
        for seed, value in enumerate(returns)
    ]
    plot_learning_curve(runs, tmp_path / "out.png")
    (axis,) = figures[0].axes
    assert float(interquartile_mean(returns)) == pytest.approx(0.8125)
    assert labels(axis)[1] == "evaluation: IQM and 95% interval, 0.812 at the end"
    (bar,) = axis.collections[1].get_segments()
    assert bar[:, 1].tolist() == pytest.approx(interval(returns))


def test_ten_lines_have_different_styles(tmp_path, figures):
    runs = [
        make_run(tmp_path / f"{agent}{seed}", {0: 0.0, 9: 9.0}, agent=agent, env="A-v1", seed=seed)
        for agent in "abcdefghij"
        for seed in (1, 2)
    ]
    plot_learning_curve(runs, tmp_path / "many.png")
    (axis,) = figures[0].axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axis.get_lines()}) == len(axis.get_lines()) == 10


def test_run_that_is_given_twice_is_refused(tmp_path):
    run = make_run(tmp_path / "run", {1: 1.0}, agent="ppo", env="X")
    with pytest.raises(UsageError, match="run/../run is given twice. Give each run once"):
        plot_learning_curve([run, f"{run}/../run"], tmp_path / "out.png")


def test_plot_over_seconds_draws_the_evaluations_of_each_run_as_a_line(tmp_path, figures):
    runs = []
    for seed, times in ((1, (3.0, 9.0)), (2, (4.0, 11.0))):
        runs.append(make_run(tmp_path / str(seed), {}, agent="grpo", env="Reverse", seed=seed))
        logger = JSONLLogger(runs[-1] / "metrics.jsonl")
        for step, seconds in zip((1, 2), times):
            logger.write(step, {"return_mean": step / 2, "wall_seconds": seconds})
        logger.close()
    plot_learning_curve(runs, tmp_path / "out.png", over="seconds")
    (axis,) = figures[0].axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("wall time (s)", "evaluation")
    assert [line.get_xdata().tolist() for line in axis.get_lines()] == [[3.0, 9.0], [4.0, 11.0]]
    assert [line.get_ydata().tolist() for line in axis.get_lines()] == [[0.5, 1.0]] * 2
    assert labels(axis) == ["GRPO, 2 seeds"]


def test_target_is_a_line_in_the_legend(tmp_path, figures):
    plot_learning_curve(make_run(tmp_path / "run", {1: 1.0, 2: 2.0}, agent="ppo", env="X"), target=475.0)
    (axis,) = figures[0].axes
    assert labels(axis) == ["training", "target: 475"]
    assert list(axis.get_lines()[-1].get_ydata()) == [475.0, 475.0]


def test_plot_without_finished_episodes_shows_a_message(tmp_path, figures):
    plot_learning_curve(make_run(tmp_path / "run", {}, agent="ppo", env="CartPole-v1"))
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["no episode has ended yet"]


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (500, "500"), (50_000, "50k"), (1_500_000, "1.5M")])
def test_large_steps_have_short_tick_labels(tmp_path, figures, value, text):
    plot_learning_curve(make_run(tmp_path / "run", {1: 1.0, 2: 2.0}, agent="ppo", env="X"))
    (axis,) = figures[0].axes
    assert axis.xaxis.get_major_formatter()(value) == text


def test_unknown_format_is_refused_with_the_known_formats(tmp_path):
    run = make_run(tmp_path / "run", {1: 1.0})
    with pytest.raises(UsageError, match=r"curve\.doc has an unknown format. The suffix must be one of .*png.*svg"):
        plot_learning_curve(run, tmp_path / "curve.doc")


def test_plot_of_no_run_directories_is_refused():
    with pytest.raises(UsageError, match="at least one run directory"):
        plot_learning_curve([])


def test_plot_that_cannot_be_written_raises_an_error(tmp_path):
    run = make_run(tmp_path / "run", {1: 1.0})
    (tmp_path / "file").write_text("")
    with pytest.raises(RlframeError, match=r"Could not write .*: (Not a directory|File exists)\. Choose another path"):
        plot_learning_curve(run, tmp_path / "file" / "curve.png")


@pytest.mark.parametrize("envs", [("A",), ("A", "B")])
def test_large_legend_is_below_the_curves(tmp_path, figures, envs):
    runs = [
        make_run(tmp_path / f"{env}{i}", {0: 0.0, 9: 9.0}, agent="ppo", env=env, learning_rate=i / 3, discount=0.9 + i)
        for env in envs
        for i in range(12)
    ]
    plot_learning_curve(runs, tmp_path / "out.png")
    (figure,) = figures
    assert labels(figure.axes[0])[1].replace("\n", " ") == "PPO (discount 1.9, learning_rate 0.333333)"
    for axis in figure.axes[: len(envs)]:
        box, legend = axis.get_window_extent(), axis.get_legend().get_window_extent()
        assert box.height / figure.dpi > 2.5 and box.width / figure.dpi > 4.0  # inches
        assert legend.y0 >= 0.0 and legend.y1 < axis.xaxis.label.get_window_extent().y0
        assert legend.x1 <= figure.bbox.x1


def test_options_plot_has_full_ranges_and_crosses_for_failed_trials(tmp_path, figures):
    panels = [
        plots.OptionPanel("rate", [1e-3, 1e-4, 2e-3], bounds=(1e-5, 1e-2), log=True),
        plots.OptionPanel("epochs", [2, 3, 4], bounds=(1.0, 4.0)),
        plots.OptionPanel("hidden", ["64", "8 8", "64"], words=("8 8", "64")),
    ]
    plots.plot_options(panels, [5.0, 7.0, None], tmp_path / "sweep.png", "PPO on X: 2 trials")
    (figure,) = figures
    assert figure.get_suptitle() == "PPO on X: 2 trials"
    rate, epochs, hidden = figure.axes
    for axis, low, high in ((rate, 1e-5, 1e-2), (epochs, 1.0, 4.0)):
        assert axis.get_xlim()[0] <= low and axis.get_xlim()[1] >= high
    assert rate.get_xscale() == "log" and all(tick == round(tick) for tick in epochs.get_xticks())
    drawn = [[dots.get_offsets().tolist() for dots in axis.collections] for axis in (rate, epochs, hidden)]
    assert drawn[0][0] == [[1e-3, 5.0], [1e-4, 7.0]] and drawn[1][0] == [[2.0, 5.0], [3.0, 7.0]]
    assert drawn[2][0] == [[1.0, 5.0], [0.0, 7.0]]
    assert [failed[0] for _, (failed,) in drawn] == [2e-3, 4.0, 1.0]
    ordinary, best = epochs.collections[0].get_facecolors()
    assert ordinary.tolist() != best.tolist() == hidden.collections[0].get_facecolors()[1].tolist()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"run_dirs": 5}, "takes paths of run directories and of the plot, got 5"),
        ({"run_dirs": "a", "out": 5}, "takes paths of run directories and of the plot, got 5"),
        ({"run_dirs": "a", "target": "475"}, "target must be a number, got '475'"),
        ({"run_dirs": "a", "over": "minutes"}, "over must be 'steps' or 'seconds', got 'minutes'"),
    ],
)
def test_wrong_argument_types_are_refused(arguments, why):
    with pytest.raises(UsageError, match=why):
        plot_learning_curve(**arguments)
