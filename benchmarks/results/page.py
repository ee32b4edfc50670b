"""docs/results.md and its pictures, from the runs that are there."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.results import language, runs
from benchmarks.results.language import LanguageTask
from benchmarks.results.runs import ROOT, Outcome
from benchmarks.results.tasks import TASKS, Task
from rlframe.metrics import plot_learning_curve
from rlframe.metrics.curves import group_runs, load_run

PAGE = ROOT / "docs/results.md"
IMAGES = ROOT / "docs/images"

_INTRO = """\
# Learning results

Each run is one command, `rlframe train --agent AGENT --env ENV --seed SEED`, with the preset of its agent and
environment and nothing set by seed. Where a preset departs from its source because of what was found here (lambda of
PPO on CartPole, the annealed rates of DQN on CartPole and PPO on Pendulum, most of DQN on MountainCar), these seeds
were among those that it was chosen on. Where a seed misses its target, the table says so. `make results` repeats all
runs and writes this page; `python -m benchmarks.results NAME` does one task. [engines.md](engines.md)
has CartPole under every engine and topology.

- **return**: of the final policy, greedy, over 20 episodes with seeds that training never used: mean ± deviation
  over the episodes.
- **first at target**: environment steps of the first evaluation at or above the target. Evaluations are of 20
  episodes each, at fixed intervals during training.
- **wall time**: of the whole process, with imports, compilation and all those evaluations. **steps/s**: of training
  alone.
- **curves**: returns of the training episodes, with the agent's exploration, smoothed; the band is one standard
  deviation over seeds. Points are the evaluations: mean over seeds, bars from the lowest to the highest seed.
- **published** figures were measured by others, in their own ways and often over more steps. They show what level to
  expect; they are no ranking.

The sections on language models, at the end, say themselves what they show.
"""


def write() -> None:
    """Writes the page over the tasks of which at least one run is finished."""
    outcomes = {task.name: _outcomes(task) for task in TASKS}
    shown = [task for task in TASKS if outcomes[task.name]]
    spoken = [(task, found) for task in language.TASKS if (found := _language_outcomes(task))]
    if not shown and not spoken:
        raise SystemExit(f"No run in {runs.RUNS} is finished.")
    parts = [_INTRO]
    if shown:
        parts.append(_conditions([one for task in shown for one in outcomes[task.name]]))
        parts.append(_summary([(task, outcomes[task.name]) for task in shown]))
    parts += [_section(task, outcomes[task.name]) for task in shown]
    parts += [_language_section(task, found) for task, found in spoken]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(parts))


def _outcomes(task: Task) -> list[Outcome]:
    return [runs.load(task, seed) for seed in task.seeds if runs.is_finished(task, seed)]


def _language_outcomes(task: LanguageTask) -> list[language.Outcome]:
    return [language.load(task, seed) for seed in task.seeds if runs.is_finished(task, seed)]


def _conditions(outcomes: Sequence[Any]) -> str:
    """The machine, the versions and the days."""
    machines = " and ".join(sorted({one.machine for one in outcomes}))
    dates = sorted({one.date for one in outcomes})
    versions: dict[str, set[str]] = {}
    for one in outcomes:
        for name, version in one.versions.items():
            versions.setdefault(name, set()).add(version)
    used = ", ".join(f"{name} {' and '.join(sorted(numbers))}" for name, numbers in versions.items())
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    text = f"Machine: {machines}, no accelerator. {used}. {days}."
    loads = sorted(one.load for one in outcomes)
    if loads[-1] > 3.0:
        text += f"\nOther work ran beside the runs (load average {loads[0]:.1f} to {loads[-1]:.1f}): "
        text += "times are upper bounds, and steps/s lower ones."
    return text + "\n"


def _summary(shown: list[tuple[Task, list[Outcome]]]) -> str:
    rows = []
    for task, outcomes in shown:
        passed = sum(one.passed(task) for one in outcomes)
        reached = [one.reached for one in outcomes if one.reached is not None]
        returns = ", ".join(_number(one.return_mean) for one in outcomes)
        rows.append(
            (
                f"[{task.title}](#{task.title.lower().replace(' ', '-')})",
                f"{task.target:g}",
                _limit(task),
                returns,
                f"{passed} of {len(outcomes)}",
                f"{statistics.median(reached):,.0f}" if reached else "never",
                _time(statistics.median(one.seconds for one in outcomes)),
            )
        )
    names = (
        "task",
        "target",
        "within",
        "returns",
        "seeds that reach it",
        "first at target, median",
        "wall time, median",
    )
    return _table(names, rows)


def _section(task: Task, outcomes: list[Outcome]) -> str:
    directories = [ROOT / runs.run_dir(task, one.seed) for one in outcomes]
    if len(group_runs([load_run(directory) for directory in directories])) > 1:
        raise SystemExit(f"The runs of {task.name} differ by more than their seed: remove the older ones.")
    picture = plot_learning_curve(directories, IMAGES / f"results-{task.name}.png", target=task.target)
    ours = [
        (
            str(one.seed),
            f"{one.env_steps:,}",
            _time(one.seconds),
            f"{one.steps_per_second:,.0f}",
            f"{_number(one.return_mean)} ± {_number(one.return_std)}",
            f"{one.reached:,}" if one.reached is not None else "never",
            "yes" if one.passed(task) else "**no**",
        )
        for one in outcomes
    ]
    names = ("seed", "steps", "wall time", "steps/s", "return", "first at target", f"at least {task.target:g}")
    theirs = [
        (
            p.what,
            f"{p.steps:,}" if p.steps else "not stated",
            f"{p.mean:,.1f} ± {p.std:,.1f}",
            p.note,
            f"[{p.source[0]}]({p.source[1]})",
        )
        for p in task.published
    ]
    command = f"rlframe train --agent {task.agent} --env {task.env} --seed {outcomes[0].seed}"
    return "\n".join(
        [
            f"## {task.title}\n",
            f"Asked: at least {task.target:g} within {_limit(task)}. `{command}`\n\n{task.about}".rstrip() + "\n",
            f"![{task.title}: returns over environment steps]({_beside(picture)})\n",
            _table(names, ours),
            _table(("published", "steps", "return", "of what", "source"), theirs),
        ]
    )


def _language_section(task: LanguageTask, outcomes: list[language.Outcome]) -> str:
    directories = [ROOT / runs.run_dir(task, one.seed) for one in outcomes]
    directories += [ROOT / language.imitation_dir(task, one.seed) for one in outcomes if one.imitated]
    picture = plot_learning_curve(directories, IMAGES / f"results-{task.name}.png", target=task.target, over="seconds")
    passed = sum(one.passed(task) for one in outcomes)
    asked = f"Asked: {task.measure} of at least {task.target:g} within {_time(task.seconds)}; {passed} of "
    asked += f"{len(outcomes)} seeds reach it, from {language.median_reached(outcomes)} on (median)."
    return "\n".join(
        [
            f"## {task.title}\n",
            f"{asked} `{outcomes[0].command}`\n\n{task.about}".rstrip() + "\n",
            _conditions(outcomes),
            f"![{task.title}: {task.measure} over wall time]({_beside(picture)})\n",
            _table(*language.columns(task, outcomes)),
        ]
    )


def _limit(task: Task) -> str:
    return f"{task.within:,} steps" if task.seconds is None else _time(task.seconds)


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; columns that hold numbers are set to the right."""
    right = [all(row[i][:1].isdigit() or row[i][:1] in "-*nN" for row in rows) for i in range(len(names))]
    rule = ["---:" if each else "---" for each in right]
    return "\n".join("| " + " | ".join(row) + " |" for row in (names, rule, *rows)) + "\n"


def _number(value: float) -> str:
    return f"{value:,.1f}"


def _time(seconds: float) -> str:
    """`43 s`, `2 min 5 s`, `1 h 0 min`."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s" if seconds >= 60 else f"{seconds:.0f} s"


def _beside(picture: pathlib.Path) -> str:
    return picture.relative_to(PAGE.parent).as_posix()
