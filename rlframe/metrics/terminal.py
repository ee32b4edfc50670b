"""Live progress for a person, on stderr: redrawn in place in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from rlframe.metrics.base import Values, on_host, scalars


def _return(value: float) -> str:
    """Format returns of games in tenths, and scores of answers, which are below 1, in thousandths."""
    return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.3f}"


# Shown values, each of the newest row that has it: label, name, format.
_SHOWN = (
    ("return", "episode_return", _return),
    ("evaluated", "return_mean", _return),
    ("length", "length", "{:.1f}".format),
    ("loss", "loss", "{:.3g}".format),
    ("staleness", "staleness", "{:.1f}".format),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format),
)
_SECONDS_BETWEEN_DRAWINGS = 0.4  # one takes about 2 ms
_SPEED_WINDOW_SECONDS = 15.0


def console(file: TextIO) -> Any:
    """A rich console that does not cut lines where nobody looks at them."""
    from rich.console import Console

    return Console(file=file, highlight=False, width=None if file.isatty() else 120)


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], *, title: str | None = None, right: bool = False
) -> Any:
    """Make a rich table without lines. Cells are texts: markup in them is shown as it is.

    Args:
        columns: their names.
        rows: the cells of each row.
        title: a line above it.
        right: align the cells to the right.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


class TerminalLogger:
    """Shows steps, steps/s, return, loss, staleness and the time left. Drawn within `write`: it has no thread.

    Args:
        total_steps: where the run ends; None shows neither bar nor time left.
        title: what is being trained, `"PPO on CartPole-v1"`.
        file: where to; stderr.
        seconds_between_lines: how often a line is printed where `file` is neither a terminal nor a notebook's.
            Evaluations always are.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        title: str = "",
        file: TextIO | None = None,
        seconds_between_lines: float = 5.0,
    ) -> None:
        self._total_steps = total_steps
        self._title = title
        self._file = file if file is not None else sys.stderr
        self._step = 0
        self._shown: dict[str, float] = {}
        self._speed = _Speed()
        self._started = time.monotonic()
        self._next_drawing = self._started
        self._drawn_step = 0
        self._live = _Live(self._file) if self._file.isatty() else None
        self._is_in_notebook = type(self._file).__module__.startswith("ipykernel.")
        is_redrawn = self._live is not None or self._is_in_notebook
        self._pause = _SECONDS_BETWEEN_DRAWINGS if is_redrawn else seconds_between_lines
        self._width = 0  # of what a notebook shows
        if self._live is not None:
            self._draw()

    def write(self, step: int, values: Values) -> None:
        self._step = step
        now = time.monotonic()
        self._speed.add(now, step)
        wanted = {name: values[name] for _, name, _ in _SHOWN if name in values}
        evaluated = "return_mean" in wanted
        if wanted:
            self._shown.update(scalars(on_host(wanted)))
        if evaluated or now >= self._next_drawing:
            self._next_drawing = now + self._pause
            self._draw()

    def close(self) -> None:
        if self._drawn_step != self._step:
            self._draw()
        if self._live is not None:
            self._live.close()
            self._live = None
        if self._width:
            print(file=self._file, flush=True)
            self._width = 0

    def _draw(self) -> None:
        self._drawn_step = self._step
        if self._live is not None:
            self._live.draw(self._title, self._step, self._total_steps, self._facts(), self._times())
        else:
            facts = "  ".join(f"{label} {value}" for label, value in self._facts())
            title = f"{self._title}: " if self._title else ""
            line = f"{title}{facts}  time {self._times()}"
            if self._is_in_notebook:  # which takes what follows a carriage return to the beginning of the line
                line, self._width = f"\r{line.ljust(self._width)}", len(line)
            print(line, end="" if self._is_in_notebook else "\n", file=self._file, flush=True)

    def _facts(self) -> list[tuple[str, str]]:
        """(label, value) of everything there is to show, in order."""
        total, speed = self._total_steps, self._speed.steps_per_second()
        facts = [("steps", f"{self._step:,}" + (f" / {total:,}" if total else ""))]
        if speed is not None:
            facts.append(("steps/s", f"{speed:,.0f}"))
        for label, name, form in _SHOWN:
            if name in self._shown:
                facts.append((label, form(self._shown[name])))
        return facts

    def _times(self) -> str:
        """The time since the start and, where it can be told, the time left."""
        past, speed = _clock(time.monotonic() - self._started), self._speed.steps_per_second()
        # The first updates compile: their time says nothing about the rest.
        if self._total_steps is None or speed is None or self._step < 0.01 * self._total_steps:
            return past
        return f"{past}, {_clock(max(0, self._total_steps - self._step) / speed)} left"


class _Speed:
    """Steps per second over the last seconds, from when the first row came (so compilation is not in it)."""

    def __init__(self) -> None:
        self._points: collections.deque[tuple[float, int]] = collections.deque()

    def add(self, now: float, step: int) -> None:
        self._points.append((now, step))
        while len(self._points) > 2 and now - self._points[1][0] >= _SPEED_WINDOW_SECONDS:
            self._points.popleft()

    def steps_per_second(self) -> float | None:
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if last > first and end > start else None


class _Live:
    """Two lines at the bottom of a terminal, redrawn in place by rich; other output scrolls above them."""

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        # The output of a user's code scrolls above the lines, unless stdout is a file or a pipe.
        own = sys.stdout.isatty()
        self._live: Any = Live(console=Console(file=file), auto_refresh=False, redirect_stdout=own)
        self._live.start()

    def draw(self, title: str, step: int, total: int | None, facts: list[tuple[str, str]], times: str) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        share = min(1.0, step / total) if total else 0.0
        bar = ProgressBar(total=1.0, completed=share) if total else ""
        head.add_row(Text(title, style="bold"), bar, f"{share:4.0%}  {times}" if total else times)
        line = Text(overflow="ellipsis", no_wrap=True)
        for label, value in facts:
            line.append(f"{label} ", style="dim").append(value, style="cyan").append("   ")
        self._live.update(Group(head, line), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _clock(seconds: float) -> str:
    """`0:07`, `12:40` or `3:05:00`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
