"""`python -m benchmarks.results [NAME...]` trains missing runs, then writes docs/project/results.md."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.results import language, page, records, runs
from benchmarks.results.language import LanguageTask
from benchmarks.results.runs import Run
from benchmarks.results.task import Task
from benchmarks.results.tasks import TASKS
from rlframe.cli.multi_run import parse_seeds
from rlframe.errors import UsageError


def main() -> None:
    """Train the runs without a record. Write the record and the page after each run."""
    tasks: dict[str, Task | LanguageTask] = {task.name: task for task in (*TASKS, *language.TASKS)}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results",
        description="Train the runs of docs/project/results.md that have no record yet, and write the page. An "
        "interrupted run is resumed.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tasks: {', '.join(tasks)} (default: all)")
    parser.add_argument("--seeds", help="only these seeds of each task: 1,2 or 101-105")
    parser.add_argument("--at-once", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--threads", type=int, help="JAX threads in each single-process run (default: all cores)")
    parser.add_argument("--long", action="store_true", help="without NAME: also train the long tasks")
    parser.add_argument("--page", action="store_true", help="train nothing; only write the page and draw all pictures")
    args = parser.parse_args()
    for option, number in (("--at-once", args.at_once), ("--threads", args.threads)):
        if number is not None and number < 1:
            parser.error(f"{option} must be at least 1, got {number}")
    for name in args.names:
        if name not in tasks:
            parser.error(f"there is no task {name!r}; there are {', '.join(tasks)}")
    chosen = [tasks[name] for name in args.names] or [
        task for task in tasks.values() if args.long or not getattr(task, "long", False)
    ]
    try:
        seeds = parse_seeds(args.seeds) if args.seeds is not None else None
    except UsageError as error:
        parser.error(str(error))
    for task in chosen:
        if seeds is not None and not set(seeds) & set(task.seeds):
            parser.error(f"{task.name} has the seeds {', '.join(map(str, task.seeds))}, none of {args.seeds}")
    if args.page:
        page.write()
    elif failed := _train(chosen, seeds, args.at_once, args.threads):
        raise SystemExit("\n".join(failed))


def _train(chosen: list[Task | LanguageTask], seeds: list[int] | None, at_once: int, threads: int | None) -> list[str]:
    """Train all runs without a record. Return a message for each failed run."""
    missing: dict[Run, Task | LanguageTask] = {}
    for task in chosen:
        for seed in [seed for seed in task.seeds if seeds is None or seed in seeds]:
            if records.path(task.name, seed).is_file():
                print(f"{task.title}, seed {seed}: has a record already", file=sys.stderr)
            else:
                missing[_run(task, seed, threads)] = task

    def ended(run: Run, result: dict[str, Any]) -> None:
        task = missing[run]
        conditions = [f"{at_once} runs at once"] * (at_once > 1) + [f"{threads} of JAX's threads each"] * bool(threads)
        run_info = records.run_info(run, task.command(run.seed), ", ".join(conditions))
        if isinstance(task, Task):
            run_info = records.game_record(run, result, run_info)
        else:
            run_info = language.language_record(task, run, run_info)
        records.write(task.name, run.seed, run_info)
        page.write(task)

    return runs.run_all(list(missing), at_once, ended)


def _run(task: Task | LanguageTask, seed: int, threads: int | None) -> Run:
    """Return the run of a seed."""
    if isinstance(task, LanguageTask):
        return Run(task.name, seed, task.arguments)
    interval = str(task.steps // 10)  # also the interval of checkpoints, so that an interrupted run can be resumed
    arguments = [*task.arguments, "--checkpoint-every", interval]
    if "--topology" not in task.options:
        arguments += ["--replay-checkpoint-every", interval]
    names = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if threads else ()
    return Run(task.name, seed, arguments, task.seconds, dict.fromkeys(names, str(threads)))


if __name__ == "__main__":
    main()
