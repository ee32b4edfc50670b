"""`python -m benchmarks.results [NAME...]`: trains what is missing, then writes docs/results.md."""

from __future__ import annotations

import argparse
import sys

from benchmarks.results import language, page, runs
from benchmarks.results.tasks import TASKS


def main() -> None:
    """Trains the runs that are not there yet, one after another, and writes the page after each task."""
    names = [task.name for task in (*TASKS, *language.TASKS)]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results",
        description="Train the runs of docs/results.md that are not in runs/results yet, and write the page.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tasks: {', '.join(names)}. None: all of them")
    parser.add_argument("--page", action="store_true", help="train nothing, only write the page")
    asked = parser.parse_args()
    for name in asked.names:
        if name not in names:
            parser.error(f"there is no task {name!r}; there are {', '.join(names)}")
    for task in TASKS:
        if asked.page or (asked.names and task.name not in asked.names):
            continue
        for seed in task.seeds:
            if runs.is_finished(task, seed):
                print(f"{task.title}, seed {seed}: there already", file=sys.stderr)
            else:
                runs.train(task, seed)
        page.write()
    for each in language.TASKS:
        if asked.page or (asked.names and each.name not in asked.names):
            continue
        for seed in each.seeds:
            language.train(each, seed)
        page.write()
    page.write()


if __name__ == "__main__":
    main()
