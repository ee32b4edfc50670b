"""`python -m benchmarks.results [NAME...]`: trains what is missing, then writes docs/results.md."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.results import language, page, records, runs
from benchmarks.results.language import LanguageTask
from benchmarks.results.runs import Run
from benchmarks.results.tasks import TASKS, Task
from rlframe.cli.multi_run import parse_seeds
from rlframe.errors import UsageError


def main() -> None:
    """Train the runs that have no record yet, and write a record and the page as each of them ends."""
    tasks: dict[str, Task | LanguageTask] = {task.name: task for task in (*TASKS, *language.TASKS)}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results",
        description="Train the runs of docs/results.md that have no record yet, and write the page. A run that was "
        "cut off goes on.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tasks: {', '.join(tasks)}. None: all of them")
    parser.add_argument("--seeds", help="of those of a task only these: 1,2 or 101-105")
    parser.add_argument("--at-once", type=int, default=1, help="how many runs go on beside each other")
    parser.add_argument("--threads", type=int, help="of JAX in each run of a single process; None: all cores")
    parser.add_argument("--long", action="store_true", help="with no NAME: the long ones as well")
    parser.add_argument("--page", action="store_true", help="train nothing, only write the page, with all pictures")
    asked = parser.parse_args()
    for option, number in (("--at-once", asked.at_once), ("--threads", asked.threads)):
        if number is not None and number < 1:
            parser.error(f"{option} must be at least 1, got {number}")
    for name in asked.names:
        if name not in tasks:
            parser.error(f"there is no task {name!r}; there are {', '.join(tasks)}")
    chosen = [tasks[name] for name in asked.names] or [
        task for task in tasks.values() if asked.long or not getattr(task, "long", False)
    ]
    try:
        seeds = parse_seeds(asked.seeds) if asked.seeds is not None else None
    except UsageError as error:
        parser.error(str(error))
    for task in chosen:
        if seeds is not None and not set(seeds) & set(task.seeds):
            parser.error(f"{task.name} has the seeds {', '.join(map(str, task.seeds))}, none of {asked.seeds}")
    if asked.page:
        page.write()
    elif failed := _train(chosen, seeds, asked.at_once, asked.threads):
        raise SystemExit("\n".join(failed))


def _train(chosen: list[Task | LanguageTask], seeds: list[int] | None, at_once: int, threads: int | None) -> list[str]:
    """Train what has no record; the sentences of what went wrong."""
    missing: dict[Run, Task | LanguageTask] = {}
    for task in chosen:
        for seed in [seed for seed in task.seeds if seeds is None or seed in seeds]:
            if records.path(task.name, seed).is_file():
                print(f"{task.title}, seed {seed}: there already", file=sys.stderr)
            else:
                missing[_run(task, seed, threads)] = task

    def ended(run: Run, result: dict[str, Any]) -> None:
        task = missing[run]
        beside = [f"{at_once} runs at once"] * (at_once > 1) + [f"{threads} of JAX's threads each"] * bool(threads)
        made = records.made(run, task.command(run.seed), ", ".join(beside))
        if isinstance(task, Task):
            made = records.of_games(run, result, made)
        else:
            made = language.of_language(task, run, made)
        records.write(task.name, run.seed, made)
        page.write(task)

    return runs.run_all(list(missing), at_once, ended)


def _run(task: Task | LanguageTask, seed: int, threads: int | None) -> Run:
    """The run of a seed."""
    if isinstance(task, LanguageTask):
        return Run(task.name, seed, task.arguments)
    often = str(task.steps // 10)  # it saves all that it needs to go on
    arguments = [*task.arguments, "--checkpoint-every", often]
    if "--topology" not in task.options:
        arguments += ["--replay-checkpoint-every", often]
    names = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if threads else ()
    return Run(task.name, seed, arguments, task.seconds, dict.fromkeys(names, str(threads)))


if __name__ == "__main__":
    main()
