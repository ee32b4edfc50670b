"""One turn of a benchmark, for rlframe only: `python -m benchmarks.turn NAME [--quick]`. Prints one JSON object.

`benchmarks.against` also runs this module with the benchmark programs of other checkouts, so it must not rely on
anything that they may lack.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from typing import Any

import rlframe
from benchmarks.context import Context


def main() -> None:
    """Measure and print the rows of rlframe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    known = {field.name for field in dataclasses.fields(Context)}
    given = {"repeats": 1, "quick": args.quick, "only_ours": True}
    context = Context(**{name: value for name, value in given.items() if name in known})
    tables = importlib.import_module(f"benchmarks.{args.name}").run(context, _log)
    rows = [row for table in tables for row in _own(table)]
    print(json.dumps({"rlframe": rlframe.__file__, "rows": rows}))


def _own(table: Any) -> list[dict[str, Any]]:
    """Return our row of the table, and other rows of rlframe, which are those with processor time."""
    others = [row for row in table.others if getattr(row, "processor", None) is not None]
    return [
        {
            "title": table.title,
            "row": row.name,
            "unit": table.unit,
            "higher_is_better": table.higher_is_better,
            "value": row.value,
            "processor": getattr(row, "processor", None),
            "note": row.note,
        }
        for row in (table.ours, *others)
    ]


def _log(text: str) -> None:
    print(f"    {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
