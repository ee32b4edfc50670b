"""One turn of a benchmark, of rlframe alone: `python -m benchmarks.turn NAME [--quick]`. Prints one JSON object.

`benchmarks.against` runs it beside the programs of other checkouts, so it takes nothing for granted that they may lack.
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
    """Measures, and prints the rows that are of rlframe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    known = {field.name for field in dataclasses.fields(Context)}
    given = {"repeats": 1, "quick": args.quick, "only_ours": True}
    context = Context(**{name: value for name, value in given.items() if name in known})
    tables = importlib.import_module(f"benchmarks.{args.name}").run(context, _say)
    rows = [row for table in tables for row in _own(table)]
    print(json.dumps({"rlframe": rlframe.__file__, "rows": rows}))


def _own(table: Any) -> list[dict[str, Any]]:
    """Our row of the table, and those of the others that are of rlframe too: their processor time was taken."""
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


def _say(what: str) -> None:
    print(f"    {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
