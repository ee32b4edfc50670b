"""Tests of the tables of `rlframe bench`."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import runner, speed
from benchmarks.context import Context, run_interleaved
from benchmarks.report import NotMeasured, Row, Table, format_number, median
from benchmarks.runner import BENCHMARKS, main


def speeds(ours: float | None, peer: float | None, **options) -> Table:
    return Table("t", "steps/s", Row("rlframe", ours), (Row("peer", peer, target=1.5),), **options)


def test_ratio_is_above_one_if_rlframe_is_faster():
    table = speeds(300.0, 150.0)
    assert table.ratio(table.others[0]) == 2.0
    table = speeds(10.0, 40.0, higher_is_better=False)
    assert table.ratio(table.others[0]) == 4.0


def test_missed_target_is_listed():
    assert speeds(300.0, 150.0).missed_targets() == []
    assert speeds(210.0, 150.0).missed_targets() == ["t: 1.40 times peer, target 1.5"]


def test_absolute_target_is_reached_or_missed():
    reached = Table("tax", "µs", Row("ours", 29.0, target=30.0), higher_is_better=False)
    missed = Table("tax", "µs", Row("ours", 31.0, target=30.0), higher_is_better=False)
    assert reached.missed_targets() == []
    assert missed.missed_targets() == ["tax: 31.0 µs, target 30.0"]


def test_row_without_a_measurement_shows_the_reason_and_is_not_a_missed_target():
    table = Table("t", "steps/s", Row("rlframe", 3.0), (Row("peer", None, 1.5, "not measured: no peer"),))
    assert table.missed_targets() == []
    assert "not measured: no peer" in str(table)


def test_table_shows_each_row_once_with_its_ratio():
    lines = str(speeds(3000.0, 1500.0)).splitlines()
    assert lines[1].split() == ["rlframe", "3,000"]
    assert lines[2].split() == ["peer", "1,500", "x", "2.00", "target:", "x", "1.5:", "yes"]


def test_table_shows_processor_time_if_it_was_measured():
    table = Table("t", "steps/s", Row("rlframe", 3000.0, processor=12.34), (Row("peer", 1500.0),))
    assert str(table).splitlines()[1].split() == ["rlframe", "3,000", "processor", "12.3", "µs"]
    assert "processor" not in str(table).splitlines()[2]


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.126, "0.13"), (12.34, "12.3"), (12345.6, "12,346")])
def test_figures_have_three_or_four_significant_digits(value, text):
    assert format_number(value) == text


def test_median_ignores_missing_values():
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None


def test_benchmark_script_that_failed_is_not_run_again_and_the_others_continue():
    calls = []

    def fails() -> dict:
        calls.append("fails")
        raise NotMeasured("the library is not installed")

    def works() -> dict:
        calls.append("works")
        return {"steps_per_second": 1.0}

    results, failures = run_interleaved({"a": fails, "b": works}, 2, lambda _: None)
    assert calls == ["fails", "works", "works"]
    assert failures == {"a": "not measured: the library is not installed"}
    assert len(results["b"]) == 2


def test_missing_peers_are_not_measured():
    with pytest.raises(NotMeasured, match="--peers-python was not given"):
        Context().peer("sb3_ppo", "cartpole")
    with pytest.raises(NotMeasured, match="--cleanrl was not given"):
        Context().cleanrl_script("ppo", (), ())


def test_peers_and_bare_loops_are_left_out_if_only_rlframe_is_measured():
    context = Context(peers_python=Path(sys.executable), cleanrl=Path("."), only_ours=True)
    for measure in (context.bare, context.peer, lambda name: context.cleanrl_script(name, (), ())):
        with pytest.raises(NotMeasured, match="left out"):
            measure("bare_ppo")


def test_unknown_benchmark_is_rejected(capsys):
    assert main(["cartpol"]) == 2
    assert "there is no benchmark 'cartpol'" in capsys.readouterr().err


def test_list_option_prints_every_benchmark(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)


def test_page_of_speeds_has_the_stored_figures():
    assert speed.page(speed.PAGE.read_text(), json.loads(speed.RECORDS.read_text())) == speed.PAGE.read_text()


def test_figures_of_a_benchmark_replace_the_older_ones(monkeypatch, capsys, tmp_path):
    table = Table("A game", "steps/s", Row("rlframe", 1500.0), (Row("bare loop", 1000.0, 2.0), Row("a peer", None)))
    found = SimpleNamespace(run=lambda context, log: [table])
    monkeypatch.setattr(runner.importlib, "import_module", lambda name: found)
    assert runner.main(["dqn_cartpole", "--json"]) == 1  # a target is missed
    (tmp_path / "output.txt").write_text(capsys.readouterr().out)
    (tmp_path / "speed.json").write_text('{"lm": {"date": "1 May", "machine": "", "tables": []}}')
    (tmp_path / "speed.md").write_text("Text\n<!-- tables: dqn_cartpole -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(speed, "RECORDS", tmp_path / "speed.json")
    monkeypatch.setattr(speed, "PAGE", tmp_path / "speed.md")
    assert speed.main([str(tmp_path / "output.txt")]) == 0
    lines = (tmp_path / "speed.md").read_text().splitlines()
    assert lines[4:6] == [
        "| A game (steps/s) | 1,500 | bare loop: 1,000 | 1.50 | 2, **missed** |",
        "|  |  | a peer: not measured |  |  |",
    ]
    assert lines[0] == "Text" and lines[-1] == "<!-- end -->" and "old" not in lines
    assert sorted(json.loads((tmp_path / "speed.json").read_text())) == ["dqn_cartpole", "lm"]
