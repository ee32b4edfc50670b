"""Plots of learning curves, and of the returns of a sweep against its options."""

from __future__ import annotations

import dataclasses
import numbers
import os
import pathlib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.files import printable, replacing
from rlframe.metrics.curves import Over, RunCurve, SeedGroup, group_runs, load_run, statistic
from rlframe.metrics.terminal import format_number

# The palette of Okabe and Ito: color-blind readers can distinguish these colors.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")  # line style of the first 7 lines, of the next 7 lines, and so on
_INK, _FAINT = "#333333", "#999999"
_MAX_COLUMNS = 3
_INSIDE, _SHORT = 5, 40  # limits for a legend inside the axes: number of lines, characters per line
# For a legend below the axes: characters per line if there is (one panel, several panels), and line height in inches.
_WIDTHS, _LINE = (110, 60), 0.17


def plot_learning_curve(
    run_dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    target: float | None = None,
    over: Over = "steps",
) -> pathlib.Path:
    """Plot returns against environment steps, with one panel per environment.

    Runs that differ only in their seed become one line. With four or more runs, the line is the interquartile mean and
    the band is its 95% confidence interval (`rlframe.metrics.curves`). With two or three runs, the line is the mean and
    the band goes from the lowest to the highest return. Evaluations are points with the same average and interval.

    With `over="seconds"`, the plot shows only evaluations, and each run has its own line, because the seeds are
    evaluated at different times.

    Args:
        run_dirs: One run directory or several.
        out: File of the plot. Its suffix selects the format (.png, .svg, .pdf). None means `learning_curve.png`, in the
            run directory if there is only one run, otherwise in the current directory.
        target: Return at which to draw a dashed line.
        over: `steps`, or `seconds` of wall time since the start of each run.

    Returns:
        The path of the plot.

    Raises:
        UsageError: An argument has a wrong type, a directory has no metrics or is given twice, or the format is
            unknown.
        RlframeError: The plot could not be written.
    """
    is_one = isinstance(run_dirs, (str, bytes)) or not isinstance(run_dirs, Iterable)
    directories: list[Any] = [run_dirs] if is_one else list(run_dirs)  # type: ignore[arg-type]
    for path in [*directories, *([] if out is None else [out])]:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"plot_learning_curve takes paths of run directories and of the plot, got {path!r}.")
    if target is not None and not isinstance(target, numbers.Real):
        raise UsageError(f"target must be a number, got {target!r}.")
    if over not in ("steps", "seconds"):
        raise UsageError(f"over must be 'steps' or 'seconds', got {over!r}.")
    if not directories:
        raise UsageError("plot_learning_curve needs at least one run directory.")
    paths = [pathlib.Path(directory).resolve() for directory in directories]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise UsageError(f"{directories[i]} is given twice. Give each run once, since a run is one seed.")
    if out is None:
        out = pathlib.Path(directories[0] if len(directories) == 1 else "") / "learning_curve.png"
    draw_curves([load_run(directory, over) for directory in directories], pathlib.Path(out), target, over)
    return pathlib.Path(out)


def draw_curves(runs: Sequence[RunCurve], out: pathlib.Path, target: float | None = None, over: Over = "steps") -> None:
    """Draw the plot of `plot_learning_curve` from loaded curves."""
    panels: dict[str, list[SeedGroup]] = {}
    for group in group_runs(runs):
        group = dataclasses.replace(group, label=_escaped(group.label), env=_escaped(group.env))
        panels.setdefault(group.env, []).append(group)
    width = _WIDTHS[len(panels) > 1]
    below = [_LINE * _lines_below(groups, width) for groups in panels.values()]
    figure, axes = _canvas(len(panels), max(below))
    for axis, (env, groups) in zip(axes, panels.items(), strict=True):
        _draw_panel(axis, env, groups, target, over)
        if _lines_below(groups, width):
            _put_legend_below(axis, width)
    _save(figure, out)


@dataclasses.dataclass(frozen=True)
class OptionPanel:
    """The values of a varied option in n trials."""

    name: str
    values: Sequence[Any]  # [n] the option's value in each trial: a number, or an element of `words`
    words: Sequence[str] = ()  # for an option without a range: all its values, in the order of the x axis
    bounds: tuple[float, float] | None = None  # (lowest, highest) possible value
    log: bool = False  # whether the x axis is logarithmic


def plot_options(panels: Sequence[OptionPanel], returns: Sequence[float | None], out: pathlib.Path, title: str) -> None:
    """Plot returns against each varied option, with one panel per option. The best trial has another color.

    Args:
        panels: One panel for each option.
        returns: [n], the return of each trial. None means that the trial failed: it is drawn as a cross at the bottom.
            At least one trial must have succeeded.
        out: File of the plot. Its suffix selects the format (.png, .svg, .pdf).
        title: Title of the plot.
    """
    figure, axes = _canvas(len(panels))
    figure.suptitle(_escaped(title), x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    ended = [(value, i) for i, value in enumerate(returns) if value is not None]
    highest, best = max(ended, key=lambda one: one[0])
    colors = [_COLORS[1] if i == best else _COLORS[0] for _, i in ended]
    for axis, panel in zip(axes, panels, strict=True):
        at = [panel.words.index(str(value)) if panel.words else value for value in panel.values]
        if panel.words:
            axis.set_xticks(range(len(panel.words)), [_escaped(word) for word in panel.words])
            axis.set_xlim(-0.5, len(panel.words) - 0.5)
        elif panel.log:
            axis.set_xscale("log")
        elif all(isinstance(value, int) for value in at):
            axis.xaxis.get_major_locator().set_params(integer=True)
        axis.scatter([at[i] for _, i in ended], [value for value, _ in ended], c=colors, s=36, edgecolors="white")
        failed = [x for x, value in zip(at, returns) if value is None]
        foot = axis.get_xaxis_transform()
        axis.scatter(failed, [0.03] * len(failed), marker="x", color=_INK, transform=foot)
        if panel.bounds is not None:
            axis.update_datalim([(end, highest) for end in panel.bounds])
        _frame(axis, panel.name, "return")
    _save(figure, out)


def _canvas(panels: int, below: float = 0.0) -> tuple[Any, list[Any]]:
    """Return a new figure and its axes. Leave `below` inches free below each of the axes.

    Do not use pyplot, because it has global state.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(panels, _MAX_COLUMNS)
    rows = -(-panels // columns)
    size = (8.0, 4.5 + below) if panels == 1 else (5.0 * columns, (3.6 + below) * rows)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(np.atleast_1d(figure.subplots(rows, columns)).flat)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes[:panels]


def _draw_panel(axis: Any, env: str, groups: list[SeedGroup], target: float | None, over: Over) -> None:
    from matplotlib.ticker import EngFormatter

    axis.set_title(_title(env, groups), loc="left", fontsize=12, fontweight="bold", color=_INK)
    by_steps = over == "steps"
    _frame(axis, "environment steps" if by_steps else "wall time (s)", "episode return" if by_steps else "evaluation")
    if by_steps:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # tick labels such as 500, 50k and 1.5M
    draw = _draw_group if by_steps else _draw_evaluations
    styles = [{"color": color, "linestyle": dash} for dash in _DASHES for color in _COLORS]
    drawn = [draw(axis, group, styles[i % len(styles)], len(groups) == 1) for i, group in enumerate(groups)]
    if not any(drawn):
        text = "no episode has ended yet" if by_steps else "no evaluation yet"
        axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", color=_FAINT)
        return
    if target is not None:
        axis.axhline(target, color=_FAINT, linewidth=1.2, linestyle="--", zorder=1, label=f"target: {target:g}")
    axis.set_xlim(left=0)
    axis.margins(x=0.02)
    title = "\n".join(_statistics(groups)) if by_steps and len(groups) > 1 else None
    axis.legend(frameon=False, fontsize=9, labelcolor=_INK, loc="best", title=title, title_fontsize=8, alignment="left")


def _put_legend_below(axis: Any, width: int) -> None:
    from matplotlib.transforms import ScaledTranslation

    handles, labels = axis.get_legend_handles_labels()
    if not handles:  # no curves
        return
    below_ticks = axis.transAxes + ScaledTranslation(0.0, -0.5, axis.figure.dpi_scale_trans)  # inches
    axis.legend(
        handles, [textwrap.fill(label, width) for label in labels], frameon=False, fontsize=8, labelcolor=_INK,
        loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=below_ticks, borderaxespad=0.0,
        title=axis.get_legend().get_title().get_text(), title_fontsize=8, alignment="left",
    )  # fmt: skip


def _lines_below(groups: Sequence[SeedGroup], width: int) -> int:
    """Return the number of legend lines below the panel; 0 if the legend fits inside the axes."""
    labels = [_labels(group, False)[0] for group in groups]
    if len(groups) == 1 or (len(groups) <= _INSIDE and max(map(len, labels)) <= _SHORT):
        return 0
    return sum(len(textwrap.wrap(label, width)) for label in labels) + len(_statistics(groups))


def _statistics(groups: Sequence[SeedGroup]) -> list[str]:
    """Return a line for each kind of average in a plot: its name and, if there are two kinds, the numbers of seeds."""
    counts: dict[str, list[int]] = {}
    for group in groups:
        if len(group.runs) > 1:
            counts.setdefault(statistic(len(group.runs)), []).append(len(group.runs))
    if len(counts) < 2:
        return list(counts)
    return [f"{', '.join(map(str, sorted({*each})))} seeds: {name}" for name, each in counts.items()]


def _frame(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x, color=_INK)
    axis.set_ylabel(y, color=_INK)
    axis.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#BBBBBB")
    axis.tick_params(colors=_INK, length=0)


def _draw_group(axis: Any, group: SeedGroup, style: dict[str, str], alone: bool) -> bool:
    """Draw a group's line, its band and its evaluations. Return True if the group has data."""
    line_label, points_label = _labels(group, alone)
    color = style["color"]
    steps, mean, low_mean, high_mean = group.curve()
    if len(steps):
        if len(group.runs) == 1:
            run = group.runs[0]
            axis.plot(run.steps, run.returns, color=color, alpha=0.22, linewidth=0.8)
        else:
            axis.fill_between(steps, low_mean, high_mean, color=color, alpha=0.18, linewidth=0)
        axis.plot(steps, mean, **style, linewidth=2.0, label=line_label)
    at, returns, low, high = group.evaluations()
    if len(at):
        axis.errorbar(
            at, returns, [returns - low, high - returns], fmt="o", color=color, markersize=6, markeredgecolor="white",
            elinewidth=1.2, capsize=2, zorder=5, clip_on=False, label=points_label,
        )  # fmt: skip
    return bool(len(steps) or len(at))


def _draw_evaluations(axis: Any, group: SeedGroup, style: dict[str, str], alone: bool) -> bool:
    """Draw a line through the evaluations of each run. Return True if any run has evaluations."""
    evaluated = [run for run in group.runs if len(run.evaluated_steps)]
    for number, run in enumerate(evaluated):
        label = f"{group.label}, {len(evaluated)} seeds" if len(evaluated) > 1 else group.label
        axis.plot(
            run.evaluated_steps, run.evaluated_returns, **style, marker="o", markersize=4, linewidth=1.4,
            markeredgecolor="white", alpha=0.85, clip_on=False, label=label if number == 0 else None,
        )  # fmt: skip
    return bool(evaluated)


def _labels(group: SeedGroup, alone: bool) -> tuple[str, str | None]:
    """Return the legend's labels for a group's line and for its evaluations."""
    count = len(group.runs)
    _, returns, _, _ = group.evaluations()
    if alone:
        line = f"training, {count} seeds: {statistic(count)}" if count > 1 else "training"
        points = f"evaluation: {statistic(count)}, " if count > 1 else "evaluation: "
        return line, f"{points}{format_number(returns[-1])} at the end" if len(returns) else None
    # If there are several groups, give each group one short entry, so that the legend does not cover the curves.
    line = f"{group.label}, {count} seeds" if count > 1 else group.label
    return f"{line}: evaluated {format_number(returns[-1])}" if len(returns) else line, None


def _title(env: str, groups: list[SeedGroup]) -> str:
    if len(groups) > 1:
        return env
    return f"{groups[0].label} on {env}" if env else groups[0].label


def _escaped(text: str) -> str:
    """Escape a text for matplotlib. File names can contain dollar signs and bytes that are not UTF-8."""
    return printable(text).replace("$", r"\$")


def _save(figure: Any, out: pathlib.Path) -> None:
    known = sorted(figure.canvas.get_supported_filetypes())
    if out.suffix.lstrip(".").lower() not in known:
        raise UsageError(f"{out} has an unknown format. The suffix must be one of {', '.join(known)}.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as beside:
            figure.savefig(beside, format=out.suffix.lstrip("."))
    except OSError as error:
        raise RlframeError(
            f"Could not write {out}: {error.strerror or error}. Choose another path, or make this folder writable and "
            "free disk space."
        ) from error
