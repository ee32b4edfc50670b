"""Tests of the progress display in terminals, notebooks and pipes."""

from __future__ import annotations

import io

import pytest

from rlframe.metrics import TerminalLogger, terminal


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def term(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(terminal, "time", clock)
    return clock


def test_plain_lines_show_progress_and_remaining_time(clock):
    out = io.StringIO()
    logger = TerminalLogger(10_000, title="PPO on CartPole-v1", file=out)
    logger.write(1_000, {"episode_return": 20.0})
    clock.now += 6
    logger.write(4_000, {"episode_return": 31.25, "loss": 0.01234, "staleness": 1.0, "other": 7})
    assert out.getvalue().splitlines()[-1] == (
        "PPO on CartPole-v1: steps 4,000 / 10,000  steps/s 500  return 31.2  loss 0.0123  staleness 1.0"
        "  time 0:06, 0:12 left"
    )


def test_lines_are_printed_if_the_terminal_cannot_redraw(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Tty()
    TerminalLogger(10_000, file=out).write(1_000, {"episode_return": 20.0})
    assert out.getvalue() == "steps 1,000 / 10,000  return 20.0  time 0:00\n"


def test_evaluations_are_printed_at_once_instead_of_after_the_interval(clock):
    out = io.StringIO()
    logger = TerminalLogger(100, file=out, seconds_between_lines=5.0)
    for step in range(1, 21):
        logger.write(step, {"episode_return": 1.0})
        clock.now += 1
    logger.write(21, {"return_mean": 500.0})
    logger.close()
    steps = [line.split()[1] for line in out.getvalue().splitlines()]
    assert steps == ["1", "6", "11", "16", "21"]
    assert "evaluated 500.0" in out.getvalue().splitlines()[-1]


def test_close_prints_the_last_row_once(clock):
    out = io.StringIO()
    logger = TerminalLogger(100, file=out)
    logger.write(1, {})
    logger.write(100, {"episode_return": 9.0})
    logger.close()
    logger.close()
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1", "100"]


def test_activity_before_the_first_update_is_printed_at_once(clock):
    out = io.StringIO()
    logger = TerminalLogger(100, file=out)
    for activity in ("compiling", "compiling", "filling the replay"):
        logger.show(activity)
        clock.now += 1
    logger.write(8, {"learner_steps": 0})
    clock.now += 5
    logger.write(16, {})
    logger.write(17, {"learner_steps": 1})
    logger.show("compiling")  # has no effect after the first update
    logger.close()
    assert out.getvalue().splitlines() == [
        "now compiling  steps 0 / 100  time 0:00",
        "now filling the replay  steps 0 / 100  time 0:02",
        "now filling the replay  steps 16 / 100  steps/s 2  time 0:08, 0:52 left",
        "steps 17 / 100  steps/s 2  time 0:08, 0:46 left",
    ]


def test_run_without_rows_prints_nothing():
    out = io.StringIO()
    TerminalLogger(100, file=out).close()
    assert out.getvalue() == ""


def test_terminal_shows_a_progress_bar(clock):
    out = Tty()
    logger = TerminalLogger(200, title="DQN on Acrobot-v1", file=out)
    logger.write(100, {"episode_return": -80.0})
    logger.close()
    assert "DQN on Acrobot-v1" in out.getvalue()
    assert " 50%" in out.getvalue()
    assert "-80.0" in out.getvalue()


def test_remaining_time_is_not_estimated_from_the_first_steps(clock):
    out = io.StringIO()
    logger = TerminalLogger(100_000, file=out, seconds_between_lines=0.0)
    for step in (8, 249, 1_000):
        clock.now += 7
        logger.write(step, {})
    assert ["left" in line for line in out.getvalue().splitlines()] == [False, False, True]


def test_speed_is_computed_over_the_last_seconds(clock):
    out = io.StringIO()
    logger = TerminalLogger(1_000_000, file=out, seconds_between_lines=0.0)
    step = 0
    for speed in [10] * 60 + [1000] * 60:
        clock.now += 1
        step += speed
        logger.write(step, {})
    assert "steps/s 1,000 " in out.getvalue().splitlines()[-1]


def test_terminal_logger_does_not_redirect_a_piped_stdout(capsys, clock):
    logger = TerminalLogger(10, file=Tty())
    print('{"return_mean": 1}')
    logger.close()
    assert capsys.readouterr().out == '{"return_mean": 1}\n'


def test_progress_is_printed_on_stderr(capsys):
    logger = TerminalLogger(10)
    logger.write(5, {})
    logger.close()
    captured = capsys.readouterr()
    assert captured.out == "" and "steps 5 / 10" in captured.err
