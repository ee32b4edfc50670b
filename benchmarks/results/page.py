"""docs/results.md and its pictures, generated from the records only."""

from __future__ import annotations

import pathlib
import re
import statistics
from collections.abc import Sequence

from benchmarks.results import language, records
from benchmarks.results.fused import COMPARISONS, Comparison
from benchmarks.results.language import LanguageRecord, LanguageTask
from benchmarks.results.records import Record, RunInfo
from benchmarks.results.runs import ROOT
from benchmarks.results.task import Published, Task
from benchmarks.results.tasks import TASKS
from rlframe.metrics.plots import draw_curves

PAGE = ROOT / "docs/results.md"
IMAGES = ROOT / "docs/images"

_LAST = 5  # number of last evaluations whose mean is compared with the goal
_INTRO = """\
# Learning results

Each run is one command. It uses the preset of its agent and environment, and no option depends on the seed. Each
section shows the command, and the seeds on which the preset was chosen. `make results` trains missing runs and writes
this page. `make results-long` also trains the long runs. `python -m benchmarks.results NAME` trains one task. Each run
leaves a small file in `benchmarks/results/records`, and this page is generated from these files.
[engines.md](engines.md) shows CartPole with every engine and topology.

- **goal**: target for the mean of a seed's last 5 evaluations, averaged over seeds. With *each*, every seed must reach
  the goal. With *final*, the final policy of every seed must reach it. **mean** and **seeds** show the same quantity.
- **evaluations** are greedy, with 20 episodes whose seeds are never used in training. They run at fixed intervals
  during training and at its end. **final** is the last evaluation, mean ± deviation over the episodes. **first at
  goal** is the number of environment steps at the first evaluation that reaches the goal.
- **wall time** is that of the whole process, including imports, compilation and all these evaluations. **steps/s** is
  for training only.
- **curves** show smoothed returns of training episodes, with the agent's exploration. With four or more seeds: the
  interquartile mean and its 95% confidence band. With two or three seeds: the mean and a band from the lowest to the
  highest. Points show the evaluations: the mean over seeds, with bars from the lowest to the highest.
- **published** figures were measured by others, with their own methods and often with more steps, as described in each
  section. CleanRL's are returns of training episodes. The zoo's are from one run. They show the level to expect, and
  are not a ranking.

The sections on language models at the end describe their own measures.
"""


def write(*only: Task | LanguageTask) -> None:
    """Write the page. Draw the pictures of the given tasks, or of all tasks, whose records have curves."""
    for task in only or (*TASKS, *language.TASKS):
        if isinstance(task, LanguageTask):
            found = _language_records(task)
            curves, over = language.curves(task, found), "seconds"
        else:
            found = _records(task)
            curves, over = [one.curve(task.agent.upper(), task.env) for one in found], "steps"
        if any(len(curve.evaluated_steps) for curve in curves):
            draw_curves(curves, _picture(task), task.goal, over)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text())


def text() -> str:
    """Return the page.

    Raises:
        SystemExit: seeds of a task were trained with different settings.
    """
    games = [(task, _records(task)) for task in TASKS]
    language_tasks = [(task, _language_records(task)) for task in language.TASKS]
    parts = [_INTRO, _summary(games, language_tasks)]
    parts += [_section(task, found) for task, found in games if found]
    parts += [_comparison(each) for each in COMPARISONS if all(map(_records, each.tasks))]
    parts += [_language_section(task, found) for task, found in language_tasks if found]
    return "\n".join(parts)


def score(task: Task, record: Record) -> float:
    """Return the score of a seed: the mean of its last 5 evaluations, or the return of its final policy."""
    return record.return_mean if task.measure == "final" else record.last(_LAST)


def reaches(task: Task, found: Sequence[Record]) -> bool:
    """Return True if the seeds reach the goal."""
    scores = [score(task, one) for one in found]
    return (statistics.mean(scores) if task.measure == "mean" else min(scores)) >= task.goal


def _records(task: Task) -> list[Record]:
    found = [one for seed in task.seeds if (one := records.read(Record, task.name, seed)) is not None]
    for one in found[1:]:
        # A field that only one of the two records has was added later.
        differing = [name for name in one.config if one.config[name] != found[0].config.get(name, one.config[name])]
        if differing:
            raise SystemExit(
                f"The seeds {found[0].seed} and {one.seed} of {task.name} differ by {', '.join(differing)}. Remove the "
                "older record and train it again."
            )
    return found


def _language_records(task: LanguageTask) -> list[LanguageRecord]:
    return [one for seed in task.seeds if (one := records.read(LanguageRecord, task.name, seed)) is not None]


def _summary(
    games: Sequence[tuple[Task, list[Record]]], language_tasks: Sequence[tuple[LanguageTask, list[LanguageRecord]]]
) -> str:
    rows = []
    for task, found in games:
        goal = f"{task.goal:,g}{'' if task.measure == 'mean' else f', {task.measure}'}"
        scores, limit = [score(task, one) for one in found], _limit(task)
        cells = (limit, _wall_time(found), _format_published(task.published), _verdict(task, found))
        rows.append((_link(task), goal, *_means(scores, ",.1f"), *cells))
    for model, runs in language_tasks:
        passed = "yes" if all(one.passed(model) for one in runs) else "**no**"
        cells = (f"{_time(model.seconds)} at most", _wall_time(runs), "", passed if runs else "")
        rows.append((_link(model), f"{model.goal:g}, each", *_means([one.value for one in runs], ".3f"), *cells))
    names = ("task", "goal", "mean", "seeds", "after", "wall time, median", "published", "reached")
    return _table(names, rows)


def _means(values: Sequence[float], digits: str) -> tuple[str, str]:
    """Return the mean over seeds, and the value of each seed."""
    if not values:
        return "**not run yet**", ""
    return format(statistics.mean(values), digits), "; ".join(format(value, digits) for value in values)


def _limit(task: Task) -> str:
    return f"{task.steps:,} steps" if task.seconds is None else _time(task.seconds)


def _link(task: Task | LanguageTask) -> str:
    found = records.path(task.name, 0).parent.is_dir()
    anchor = re.sub(r"[^\w -]", "", task.title.lower()).replace(" ", "-")  # as on GitHub
    return f"[{task.title}](#{anchor})" if found else task.title


def _verdict(task: Task, found: Sequence[Record]) -> str:
    if not found:
        return ""
    if len(found) < len(task.seeds):
        return f"{len(found)} of {len(task.seeds)} seeds so far"
    return "yes" if reaches(task, found) else "**no**"


def _format_published(published: Sequence[Published]) -> str:
    return "; ".join(
        f"{each.source[0]} {_number(each.mean)}" + (f" at {each.steps:,}" if each.steps else "")
        for each in published[:1]
    )


def _wall_time(found: Sequence[RunInfo]) -> str:
    return _time(statistics.median(one.seconds for one in found)) if found else ""


def _section(task: Task, found: list[Record]) -> str:
    ours = [
        (
            str(one.seed),
            f"{one.env_steps:,}",
            _time(one.seconds) + (f", {one.sessions} sessions" if one.sessions > 1 else ""),
            f"{one.steps_per_second:,.0f}",
            _number(one.last(_LAST)) if one.evaluations else "-",
            f"{_number(one.return_mean)} ± {_number(one.return_std)}",
            f"{reached:,}" if (reached := one.reached(task.goal)) is not None else "never" if one.evaluations else "-",
        )
        for one in found
    ]
    names = ("seed", "steps", "wall time", "steps/s", f"last {_LAST} evaluations", "final", "first at goal")
    theirs = [
        (
            p.what,
            f"{p.steps:,}" if p.steps else "not stated",
            f"{p.mean:,.1f}" if p.std is None else f"{p.mean:,.1f} ± {p.std:,.1f}",
            p.note,
            f"[{p.source[0]}]({p.source[1]})",
        )
        for p in task.published
    ]
    of = {
        "mean": "the mean over seeds of the last 5 evaluations",
        "each": "the last 5 evaluations of each seed",
        "final": "each seed's final policy",
    }[task.measure]
    return "\n".join(
        [
            f"## {task.title}\n",
            f"Goal: at least {task.goal:,g} ({of}) after {_limit(task)}. `{task.command(found[0].seed)}`\n",
            f"{task.tuned} {task.about}".rstrip() + "\n",
            _conditions(found),
            f"![{task.title}: returns over environment steps]({_relative_path(_picture(task))})\n",
            _table(names, ours),
            _table(("published", "steps", "return", "of what", "source"), theirs) if theirs else "",
        ]
    )


def _comparison(comparison: Comparison) -> str:
    """Return the section of a comparison: for each task, the interval of the mean training return at half the steps."""
    rows, intervals = [], []
    for task in comparison.tasks:
        returns = [value for one in _records(task) if (value := one.training_return(0.45, 0.55)) is not None]
        low, high = records.mean_interval(returns)
        intervals.append((low, high))
        rows.append((task.title, str(len(returns)), _number(statistics.mean(returns)), f"{low:,.1f} to {high:,.1f}"))
    overlap = max(low for low, _ in intervals) <= min(high for _, high in intervals)
    verdict = "overlap" if overlap else "**do not overlap**"
    return "\n".join(
        [
            f"## {comparison.title}\n",
            "Mean return of the training episodes that ended between 45% and 55% of the steps, averaged over seeds, "
            f"with 95% bootstrap intervals of this mean. The intervals {verdict}.\n",
            _table(("task", "seeds", "mean", "95% interval"), rows),
        ]
    )


def _language_section(task: LanguageTask, found: list[LanguageRecord]) -> str:
    passed = sum(one.passed(task) for one in found)
    goal = f"Goal: {task.measure} of at least {task.goal:g} within {_time(task.seconds)}. {passed} of "
    goal += f"{len(found)} seeds reach it, after {language.median_reached(found)} (median)."
    return "\n".join(
        [
            f"## {task.title}\n",
            f"{goal} `{task.command(found[0].seed)}`\n\n{task.about}".rstrip() + "\n",
            _conditions(found),
            f"![{task.title}: {task.measure} over wall time]({_relative_path(_picture(task))})\n",
            _table(*language.columns(task, found)),
        ]
    )


def _conditions(found: Sequence[RunInfo]) -> str:
    """Return a sentence with the machine, the versions, the commits and the dates."""
    machines = " and ".join(sorted({f"{one.machine}, {one.accelerator}" for one in found}))
    dates = sorted({one.date for one in found})
    versions: dict[str, set[str]] = {}
    for one in found:
        for name, version in one.versions.items():
            versions.setdefault(name, set()).add(version)
    used = ", ".join(f"{name} {' and '.join(sorted(numbers))}" for name, numbers in versions.items())
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commits = ", ".join(sorted({each for one in found for each in one.commit.split(", ") if each}))
    text = f"Machine: {machines}. {used}. {days}" + (f", commit {commits}" if commits else "") + "."
    beside = "; ".join(sorted({one.beside for one in found if one.beside}))
    text += f" {beside[0].upper()}{beside[1:]}." if beside else ""
    loads = sorted(one.load for one in found)
    if any(one.load > one.cores + 1 for one in found):
        text += f"\nThe load average at the end of the runs was {loads[0]:.1f} to {loads[-1]:.1f}. With a load above "
        text += "the number of cores, times are upper bounds and steps/s are lower bounds."
    notes = "\n".join(dict.fromkeys(one.note for one in found if one.note))
    return f"{text}\n{notes}".rstrip() + "\n"


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table. Columns with numbers are aligned right."""
    right = [all(row[i][:1].isdigit() or row[i][:1] in "-*nN" for row in rows) for i in range(len(names))]
    rule = ["---:" if each else "---" for each in right]
    return "\n".join("| " + " | ".join(row) + " |" for row in (names, rule, *rows)) + "\n"


def _number(value: float) -> str:
    return f"{value:,.1f}"


def _time(seconds: float) -> str:
    """Format a duration as `43 s`, `2 min 5 s` or `1 h 0 min`."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s" if seconds >= 60 else f"{seconds:.0f} s"


def _picture(task: Task | LanguageTask) -> pathlib.Path:
    return IMAGES / f"results-{task.name}.png"


def _relative_path(picture: pathlib.Path) -> str:
    return picture.relative_to(PAGE.parent).as_posix()
