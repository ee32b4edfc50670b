"""Tests of the accelerator table: its form, and small sizes of all cases on the CPU."""

from __future__ import annotations

import pytest

from benchmarks import accelerator


def test_cells_without_a_figure_say_so():
    figures = {accelerator.CASES[0].title: [1_000_000.0, None]}
    lines = accelerator.table({"counts": [1, 2], "figures": figures, "machine": "H200", "date": "2026-01-01"}).split(
        "\n"
    )
    assert lines[0] == "| measured | unit | 1 device | 2 devices |"
    assert lines[2].endswith("| environment steps/s | 1,000,000 | not measured |")
    assert lines[3].endswith("| not measured | not measured |")
    assert lines[-2] == "Measured on H200, 2026-01-01."


def test_page_contains_the_stored_table():
    text = accelerator.PAGE.read_text()
    assert accelerator.page(text, accelerator.stored()) == text
    assert "not measured" in accelerator.page(text, None) and accelerator.page(text, None).count("Never run.") == 1


@pytest.mark.system
def test_all_cases_run_with_small_sizes_on_the_cpu(capsys):
    before = accelerator.PAGE.read_text()
    assert accelerator.main(["--quick", "--devices", "2"]) == 0
    shown = capsys.readouterr().out
    assert "not measured" not in shown and shown.count("\n| ") == len(accelerator.CASES)
    assert accelerator.PAGE.read_text() == before and accelerator.stored() is None
