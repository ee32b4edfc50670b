"""The tables of `rlframe bench`."""

import sys
from pathlib import Path

import pytest

from benchmarks.context import Context, in_turns
from benchmarks.report import NotMeasured, Row, Table, middle, number
from benchmarks.runner import BENCHMARKS, main


def speeds(ours: float | None, peer: float | None, **options) -> Table:
    return Table("t", "steps/s", Row("rlframe", ours), (Row("peer", peer, wanted=1.5),), **options)


def test_a_ratio_is_above_one_where_ours_is_better():
    table = speeds(300.0, 150.0)
    assert table.ratio(table.others[0]) == 2.0
    table = speeds(10.0, 40.0, higher_is_better=False)
    assert table.ratio(table.others[0]) == 4.0


def test_a_missed_limit_is_named():
    assert speeds(300.0, 150.0).misses() == []
    assert speeds(210.0, 150.0).misses() == ["t: 1.40 times peer, wanted 1.5"]


def test_an_absolute_limit_is_kept_or_missed():
    kept = Table("tax", "µs", Row("ours", 29.0, wanted=30.0), higher_is_better=False)
    missed = Table("tax", "µs", Row("ours", 31.0, wanted=30.0), higher_is_better=False)
    assert kept.misses() == []
    assert missed.misses() == ["tax: 31.0 µs, wanted 30.0"]


def test_what_was_not_measured_says_why_and_misses_nothing():
    table = Table("t", "steps/s", Row("rlframe", 3.0), (Row("peer", None, 1.5, "not measured: no peer"),))
    assert table.misses() == []
    assert "not measured: no peer" in str(table)


def test_the_table_shows_each_row_once_with_its_ratio():
    lines = str(speeds(3000.0, 1500.0)).splitlines()
    assert lines[1].split() == ["rlframe", "3,000"]
    assert lines[2].split() == ["peer", "1,500", "x", "2.00", "wanted:", "x", "1.5:", "yes"]


def test_the_processor_time_of_a_step_is_shown_where_it_was_taken():
    table = Table("t", "steps/s", Row("rlframe", 3000.0, processor=12.34), (Row("peer", 1500.0),))
    assert str(table).splitlines()[1].split() == ["rlframe", "3,000", "processor", "12.3", "µs"]
    assert "processor" not in str(table).splitlines()[2]


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.126, "0.13"), (12.34, "12.3"), (12345.6, "12,346")])
def test_figures_keep_the_digits_that_count(value, text):
    assert number(value) == text


def test_the_middle_leaves_out_what_is_missing():
    assert middle([3.0, None, 1.0, 2.0]) == 2.0
    assert middle([None]) is None


def test_a_contender_that_fails_is_asked_once_and_the_others_go_on():
    asked = []

    def fails() -> dict:
        asked.append("fails")
        raise NotMeasured("it is not here")

    def works() -> dict:
        asked.append("works")
        return {"steps_per_second": 1.0}

    results, failures = in_turns({"a": fails, "b": works}, 2, lambda _: None)
    assert asked == ["fails", "works", "works"]
    assert failures == {"a": "not measured: it is not here"}
    assert len(results["b"]) == 2


def test_peers_that_are_not_there_are_not_measured():
    with pytest.raises(NotMeasured, match="--peers-python was not given"):
        Context().peer("sb3_ppo", "cartpole")
    with pytest.raises(NotMeasured, match="--cleanrl was not given"):
        Context().cleanrl_script("ppo", (), ())


def test_peers_and_bare_twins_are_left_out_where_only_ours_is_measured():
    context = Context(peers_python=Path(sys.executable), cleanrl=Path("."), only_ours=True)
    for measure in (context.bare, context.peer, lambda name: context.cleanrl_script(name, (), ())):
        with pytest.raises(NotMeasured, match="left out"):
            measure("bare_ppo")


def test_an_unknown_name_is_refused(capsys):
    assert main(["cartpol"]) == 2
    assert "there is no benchmark 'cartpol'" in capsys.readouterr().err


def test_the_list_names_every_benchmark(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)
