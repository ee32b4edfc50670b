"""Tests of `rlframe bench NAME --against CHECKOUT`: its statistics, and comparisons of two small checkouts."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from benchmarks import against
from benchmarks.comparison import Comparison, Figure, Turn, compare, spread
from benchmarks.runner import main
from rlframe.errors import UsageError

ROOT = pathlib.Path(__file__).parents[2]

# --- statistics


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 1, 1), (3, 1, 3), (7, 1, 7), (8, 2, 7), (10, 2, 9), (11, 3, 9)],
)
def test_confidence_interval_of_the_median_follows_the_sign_test(count, low, high):
    # P(at most 1 head in 8 tosses) = 9/256, so the interval from the 2nd to the 7th of 8 values contains the median
    # with a probability of 1 - 18/256 = 93%. For the 2nd to the 6th of 7 values, the probability is only 87.5%.
    assert spread(map(float, range(count, 0, -1))) == ((count + 1) / 2, low, high)


def test_new_code_is_compared_with_runs_of_the_old_code_before_and_after():
    figure = Figure((Turn(old=100.0, new=90.0, again=81.0), Turn(100.0, 80.0, 100.0), Turn(50.0, 60.0, 50.0)), True)
    # A steady drift has no effect: the first ratio is 90 / 90, because the geometric mean of 100 and 81 is 90.
    assert figure.ratio == pytest.approx((1.0, 0.8, 1.2))
    assert figure.itself == pytest.approx((1.0, 0.81, 1.0))
    assert (figure.old, figure.new) == (90.5, 80.0)


def test_ratio_is_inverted_if_lower_is_better():
    figure = Figure((Turn(old=10.0, new=20.0, again=10.0),), higher_is_better=False)
    assert figure.ratio.middle == 0.5
    assert figure.is_worse


@pytest.mark.parametrize(
    ("new", "is_worse"),
    [(85.0, False), (81.0, False), (79.0, True), (140.0, False)],
)
def test_new_code_is_worse_only_if_the_difference_exceeds_the_variation_of_the_old_code(new, is_worse):
    # In the last turn, the second run of the old code was 1.25 times as fast as the first run. So the new code is
    # reported as slower only if it is slower by more than this factor: below 80, compared with 100.
    turns = (Turn(100.0, new, 100.0), Turn(100.0, new, 100.0), Turn(100.0, new * math.sqrt(1.25), 125.0))
    assert Figure(turns, higher_is_better=True).is_worse == is_worse


@pytest.mark.parametrize(
    ("rate", "processor", "verdict"),
    [
        (50.0, 20.0, "yes"),
        (50.0, 10.0, "yes, without more processor time (waiting)"),
        (100.0, 20.0, "no, but more processor time"),
        (100.0, 10.0, "no"),
        (50.0, None, "yes"),
    ],
)
def test_verdict_depends_on_the_rate_and_on_the_processor_time(rate, processor, verdict):
    spent = None if processor is None else Figure((Turn(10.0, processor, 10.0),), False)
    comparison = Comparison("t", "rlframe", "steps/s", Figure((Turn(100.0, rate, 100.0),), True), spent)
    assert comparison.verdict() == verdict
    assert comparison.is_slower == verdict.startswith("yes")


def rows(**values: float | None) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        ("t", name): {"unit": "steps/s", "higher_is_better": True, "value": value, "processor": 5.0, "note": ""}
        for name, value in values.items()
    }


def test_turn_with_a_missing_figure_is_ignored():
    turns = [(rows(a=100.0), rows(a=100.0), rows(a=100.0)), ({}, rows(a=1.0), rows(a=100.0))]
    [comparison], missing = compare(turns)
    assert comparison.value.turns == (Turn(100.0, 100.0, 100.0),)
    assert missing == []


def test_rows_that_cannot_be_compared_are_listed_with_the_reason():
    old, new = rows(gone=1.0, none=None, tax=-1.0), rows(come=1.0, none=None, tax=2.0)
    assert compare([(old, new, old)]) == (
        [],
        [
            "t: gone: only the old checkout measured it",
            "t: none: neither checkout measured it",
            "t: tax: both checkouts never have figures above 0 in the same turn",
            "t: come: only the new checkout measured it",
        ],
    )


# --- checkouts

TINY = """
import time
from benchmarks.processor import Stopwatch
from benchmarks.report import Row, Table
from rlframe.work import {function} as step

def run(context, say):
    watch, before = Stopwatch(), time.process_time()
    for _ in range(20):
        step()
    spent = time.process_time() - before  # processor time, so that the load of the machine has no effect
    rows = (Row({row!r}, 20 / spent, processor=watch.processor_us(20)), Row("a peer", 1.0))
    return [Table("tiny", "steps/s", Row("rlframe", 20 / spent, processor=watch.processor_us(20)), rows)]
"""
WORK = """
import time

def {function}():
    end = time.process_time() + {seconds}
    while time.process_time() < end:
        pass
"""


# A benchmark that starts a process that never ends. `mark` identifies this process.
ENDLESS = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)", {mark!r}])
"""
COMPARE = """
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
sys.path.insert(0, {root!r})
from benchmarks import against
against.ROOT = pathlib.Path({checkout!r})
against.run(["tiny"], {checkout!r}, 1, True, False, lambda what: None)
"""


def tiny(folder: pathlib.Path, seconds: float, function: str = "step", row: str = "again") -> pathlib.Path:
    """Create a checkout whose only benchmark calls a function that takes `seconds`."""
    (folder / "rlframe").mkdir(parents=True)
    (folder / "rlframe" / "__init__.py").touch()
    (folder / "rlframe" / "work.py").write_text(WORK.format(function=function, seconds=seconds))
    (folder / "benchmarks").mkdir()
    for name in ("__init__", "context", "processor", "report", "turn"):
        (folder / "benchmarks" / f"{name}.py").symlink_to(ROOT / "benchmarks" / f"{name}.py")
    (folder / "benchmarks" / "tiny.py").write_text(TINY.format(function=function, row=row))
    return folder


# A benchmark that reports figures from the checkout. It leaves a running process with the same stdout and stderr.
REPORTS = """
import subprocess, sys
from benchmarks.report import Row, Table
from rlframe.work import RATE, PROCESSOR

def run(context, say):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", {mark!r}])
    return [Table("tiny", "steps/s", Row("rlframe", RATE, processor=PROCESSOR), ())]
"""


def processes_with_mark(mark: str) -> list[int]:
    """Return the ids of processes whose last argument is `mark`."""
    running = psutil.process_iter(["cmdline"])
    return [process.pid for process in running if (process.info["cmdline"] or [""])[-1] == mark]


def measure(name: str, new: pathlib.Path, old: pathlib.Path, turns: int, monkeypatch, capsys) -> tuple[int, dict, str]:
    """Run a benchmark against an old checkout. Return (exit code, results as JSON, other output)."""
    monkeypatch.setattr(against, "ROOT", new)
    code = against.run([name], str(old), turns, quick=True, as_json=True, log=lambda what: None)
    *printed, last = capsys.readouterr().out.splitlines()
    return code, json.loads(last), "\n".join(printed)


def test_checkout_with_four_times_the_work_is_reported_as_slower(tmp_path, monkeypatch, capsys):
    new, old = tiny(tmp_path / "new", 0.004), tiny(tmp_path / "old", 0.001)
    code, result, printed = measure("tiny", new, old, 3, monkeypatch, capsys)
    assert code == 1
    assert [row["row"] for row in result["rows"]] == ["rlframe", "again"]  # the row "a peer" is not compared
    for row in result["rows"]:
        assert row["slower"]
        assert row["value"]["ratio"]["middle"] == pytest.approx(0.25, rel=0.3)
        assert row["processor_us"]["old"] == pytest.approx(1000, rel=0.3)
        assert row["processor_us"]["ratio"]["middle"] == pytest.approx(0.25, rel=0.3)
        assert len(row["value"]["turns"]) == 3
    assert printed.count("slower by more than the old code differs from itself: yes") == 2
    assert "Slower:\n  tiny: rlframe\n  tiny: again" in printed


@pytest.mark.system
def test_checkout_with_a_quarter_of_the_work_is_not_reported_as_slower(tmp_path, monkeypatch, capsys):
    code, result, printed = measure(
        "tiny", tiny(tmp_path / "new", 0.001), tiny(tmp_path / "old", 0.004), 1, monkeypatch, capsys
    )
    assert code == 0
    assert result["rows"][0]["value"]["ratio"]["middle"] == pytest.approx(4.0, rel=0.3)
    assert "None of 2 rows is slower." in printed


def test_incompatible_old_checkout_is_measured_by_its_own_benchmark(tmp_path, monkeypatch, capsys):
    new = tiny(tmp_path / "new", 0.001, function="take_step", row="new row")
    old = tiny(tmp_path / "old", 0.001, row="old row")
    _, result, _ = measure("tiny", new, old, 1, monkeypatch, capsys)
    assert [row["row"] for row in result["rows"]] == ["rlframe"]
    assert result["not_compared"] == [
        "tiny: tiny: old row: only the old checkout measured it",
        "tiny: tiny: new row: only the new checkout measured it",
    ]


def test_nothing_is_compared_if_the_benchmark_fails_for_both_checkouts(tmp_path, monkeypatch, capsys):
    old = tiny(tmp_path / "old", 0.001)
    new = shutil.copytree(old, tmp_path / "new", symlinks=True)
    code, result, printed = measure("missing", new, old, 1, monkeypatch, capsys)
    assert (code, result["rows"]) == (1, [])
    assert "No row could be compared." in printed


def test_interrupt_ends_all_processes_of_the_benchmark(tmp_path):
    checkout = tiny(tmp_path / "checkout", 0.001)
    (checkout / "benchmarks" / "tiny.py").write_text(ENDLESS.format(mark=str(tmp_path)))
    command = [sys.executable, "-c", COMPARE.format(root=str(ROOT), checkout=str(checkout))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not processes_with_mark(str(tmp_path)):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    while processes_with_mark(str(tmp_path)):  # wait until the kernel has ended the processes
        time.sleep(0.05)


@pytest.mark.system
def test_benchmark_that_hangs_is_killed_with_its_processes(tmp_path, monkeypatch, capsys):
    checkout, result = tiny(tmp_path / "checkout", 0.001), []
    (checkout / "benchmarks" / "tiny.py").write_text(ENDLESS.format(mark=str(tmp_path)))
    monkeypatch.setattr(against, "ROOT", checkout)
    monkeypatch.setattr(against, "TURN_SECONDS", 3.0)
    assert against.run(["tiny"], str(checkout), 1, quick=True, as_json=False, log=result.append) == 1
    assert "No row could be compared." in capsys.readouterr().out
    assert "tiny, turn 1 of 1, the new: it did not end within 3 s and was killed" in result
    while processes_with_mark(str(tmp_path)):  # wait until the kernel has ended the processes
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("new", "code", "result"),
    [
        ("RATE, PROCESSOR = 50.0, 20.0", 1, "\nSlower:\n  tiny: rlframe"),
        pytest.param(
            "RATE, PROCESSOR = 50.0, 10.0",
            1,
            "\nSlower without more processor time (waiting):\n  tiny: rlframe",
            marks=pytest.mark.system,
        ),
        pytest.param(
            "RATE, PROCESSOR = 100.0, 20.0",
            0,
            "is slower.\nNot slower, but more processor time:\n  tiny: rlframe",
            marks=pytest.mark.system,
        ),
    ],
)
def test_summary_lists_slower_rows_and_leftover_processes_are_ended(new, code, result, tmp_path, monkeypatch, capsys):
    sides = []
    for name, work in (("new", new), ("old", "RATE, PROCESSOR = 100.0, 10.0")):
        sides.append(tiny(tmp_path / name, 0.001))
        (sides[-1] / "rlframe" / "work.py").write_text(work)
        (sides[-1] / "benchmarks" / "tiny.py").write_text(REPORTS.format(mark=str(tmp_path)))
    found, _, printed = measure("tiny", *sides, 1, monkeypatch, capsys)
    assert found == code
    assert printed.endswith(result)
    while processes_with_mark(str(tmp_path)):  # wait until the kernel has ended the processes
        time.sleep(0.05)


def test_checkout_of_a_revision_is_deleted_afterwards():
    with against.checkout("HEAD") as folder:
        assert (folder / "rlframe" / "__init__.py").is_file()
        assert (folder / "benchmarks" / "runner.py").is_file()
    assert not folder.exists()


def test_unknown_checkout_or_revision_is_rejected(tmp_path, capsys):
    with pytest.raises(UsageError, match=r"the folder is not a checkout of rlframe. It has no rlframe/__init__\.py"):
        against.checkout(str(tmp_path)).__enter__()
    assert main(["replay", "--against", "no-such-revision"]) == 2
    assert "--against no-such-revision: there is no folder and no revision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--turns", "3"], "--turns and --old-python require --against"),
        (["--against", ".", "--turns", "0"], "--turns must be at least 1, got 0"),
        (["--against", ".", "--cleanrl", "."], "does not measure peers"),
    ],
)
def test_conflicting_options_are_rejected(options, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", *options])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


# --- a real benchmark


@pytest.mark.system
def test_this_checkout_can_be_compared_with_itself(monkeypatch, capsys):
    _, result, _ = measure("replay", ROOT, ROOT, 1, monkeypatch, capsys)
    assert result["not_compared"] == []
    assert len(result["rows"]) == 10
    for row in result["rows"]:
        for figure in (row["value"], row["processor_us"]):
            assert figure["old"] > 0 and figure["new"] > 0
            assert figure["ratio"]["low"] <= figure["ratio"]["middle"] <= figure["ratio"]["high"]


@pytest.mark.system
def test_copy_that_samples_fifty_times_per_call_is_slower_in_the_rows_for_sampling(tmp_path, monkeypatch, capsys):
    for folder in ("rlframe", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "rlframe" / "replay" / "__init__.py", "a") as module:
        module.write(
            "_one = ReplayBuffer.sample\nReplayBuffer.sample = lambda self: [_one(self) for _ in range(50)][0]\n"
        )
    code, result, _ = measure("replay", tmp_path, ROOT, 3, monkeypatch, capsys)
    slower = {row["title"] for row in result["rows"] if row["slower"]}
    assert code == 1
    assert {"cartpole sample 256, 1-step", "pong sample 256, 1-step"} <= slower
