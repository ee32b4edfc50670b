"""The tables of docs/project/speed.md, from the figures in benchmarks/speed.json.

`rlframe bench NAME... --json` ends with one JSON object. This command stores it and writes the page:

    rlframe bench fused --json | tee fused.txt
    python -m benchmarks.speed fused.txt        # without a file: write the page from the stored figures

The tables of a benchmark replace its older ones. On the page, `<!-- tables: NAME -->` and `<!-- end -->` enclose the
tables of one benchmark.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import Row, Table, format_number

ROOT = pathlib.Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks/speed.json"
PAGE = ROOT / "docs/project/speed.md"

_TABLES = re.compile(r"(<!-- tables: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = "| measured | rlframe | compared with | ratio | target |\n|---|---|---|---|---|\n"


def main(files: Sequence[str] = ()) -> int:
    """Store the figures of `files`, outputs of `rlframe bench --json`, and write the page. Return the exit code."""
    records = json.loads(RECORDS.read_text())
    for file in files:
        records.update(read_output(pathlib.Path(file).read_text()))
    RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(PAGE.read_text(), records))
    return 0


def read_output(text: str) -> dict[str, Any]:
    """Return benchmark -> {"date", "machine", "tables"} from the output of `rlframe bench --json`."""
    found = json.loads(text.strip().splitlines()[-1])
    rest = {"date": found["date"], "machine": found["machine"]}
    return {name: {**rest, "tables": tables} for name, tables in found["benchmarks"].items()}


def page(text: str, records: Mapping[str, Any]) -> str:
    """Return the page's text with the tables of `records`."""

    def replace(match: re.Match[str]) -> str:
        record = records[match[2]]
        tables = [table_from(values) for values in record["tables"]]
        return f"{match[1]}{_HEAD}{''.join(map(_rows, tables))}\nMeasured: {record['date']}.\n{match[3]}"

    return _TABLES.sub(replace, text)


def table_from(values: Mapping[str, Any]) -> Table:
    """Return the `Table` that `dataclasses.asdict` converted to `values`."""
    ours, others = Row(**values["ours"]), tuple(Row(**row) for row in values["others"])
    return Table(**{**values, "ours": ours, "others": others})


def _rows(table: Table) -> str:
    """Return one row of Markdown for each figure that ours is compared with."""
    ours = table.ours
    title = f"{table.title} ({table.unit})"
    value = format_number(ours.value)
    if ours.target is not None and ours.value is not None:
        reached = ours.value >= ours.target if table.higher_is_better else ours.value <= ours.target
        bound = "at least" if table.higher_is_better else "at most"
        target = f"{bound} {format_number(ours.target)}" + ("" if reached else ", **missed**")
        lines = [(title, value, "", "", target)]
    else:
        lines = [] if table.others else [(title, value, "", "", "")]
    for row in table.others:
        ratio = table.ratio(row)
        of = "" if ratio is None else f"{ratio:.2f}"
        missed = ratio is not None and row.target is not None and ratio < row.target
        target = "" if row.target is None else f"{row.target:g}" + (", **missed**" if missed else "")
        head = ("", "") if lines else (title, value)
        number = "not measured" if row.value is None else format_number(row.value)
        lines.append((*head, f"{row.name}: {number}", of, target))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
