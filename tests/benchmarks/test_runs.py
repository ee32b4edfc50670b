"""Every benchmark of `rlframe bench` runs with the quickest settings and measures all figures that need no peer."""

from __future__ import annotations

import importlib
import math

import pytest

from benchmarks.context import Context
from benchmarks.report import Row
from benchmarks.runner import BENCHMARKS, NEEDS
from rlframe import extras

FAST = {"calls"}  # This benchmark takes a second. Other benchmarks take longer, compile more or start processes.
# If a peer is not installed, the notes of its rows contain one of these options.
PEERS = ("--peers-python", "--cleanrl", "--purejaxrl")
TOO_SHORT = "0 of 1 seeds solved it"  # note of a quick run, which ends before the task is solved
# Rows whose figure is the difference of two figures. In a short run, noise may make the difference negative.
DIFFERENCES = {"the framework's tax", "the Actor itself"}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.system) for name in BENCHMARKS]
)
def test_benchmark_measures_all_figures_that_need_no_peer(name):
    if not all(map(extras.is_installed, NEEDS.get(name, ()))):
        pytest.skip(f"needs {NEEDS[name]}")
    messages: list[str] = []
    tables = importlib.import_module(f"benchmarks.{name}").run(Context(repeats=1, quick=True), messages.append)
    assert tables and messages
    rows = [(table.title, row) for table in tables for row in (table.ours, *table.others)]
    assert [(title, row) for title, row in rows if not _is_measured(row)] == []
    assert [table.title for table in tables if table.ours.value is None and table.ours.note != TOO_SHORT] == []


def _is_measured(row: Row) -> bool:
    """Return True if a row has its figures, or if they are missing because of a missing peer or the quick settings."""
    if row.value is None:
        return row.note in ("not measured", TOO_SHORT) or any(option in row.note for option in PEERS)
    if row.name.strip() in DIFFERENCES:
        return math.isfinite(row.value)
    return row.value > 0 and (row.processor is None or row.processor > 0)
