"""Show the progress of a run on stderr: redrawn in place in a terminal or notebook, printed as lines elsewhere."""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from rlframe.metrics.rows import Values, on_host, scalars


def format_number(value: float | None) -> str:
    """Return a text of three significant digits, of one decimal from 100 on, or "-": 0.893, 28.5, 1,234.5."""
    if value is None:
        return "-"
    return f"{value:#.3g}" if 0.0 < abs(value) < 99.95 else f"{value:,.1f}"


def plus_minus(std: float | None, count: int) -> str:
    """Return text such as " ± 1.50", or "" if `count` is 1, because one value has no standard deviation."""
    return f" ± {format_number(std)}" if std is not None and count > 1 else ""


# Values to show: (label, name in a row, format). The value comes from the newest row that contains the name.
_SHOWN = (
    ("return", "episode_return", format_number),
    ("evaluated", "return_mean", format_number),
    ("length", "length", "{:.1f}".format),
    ("loss", "loss", "{:.3g}".format),
    ("staleness", "staleness", "{:.1f}".format),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format),
)
_SECONDS_BETWEEN_DRAWINGS = 0.4  # drawing takes about 2 ms
_SPEED_WINDOW_SECONDS = 15.0


def console(file: TextIO) -> Any:
    """Return a console of the package rich. If `file` is not a terminal, lines have 120 columns."""
    from rich.console import Console

    return Console(file=file, highlight=False, width=None if file.isatty() else 120)


def can_redraw(file: TextIO) -> bool:
    """Return True if `file` is a terminal that can redraw lines. The variable TERM=dumb says that it cannot."""
    return file.isatty() and os.environ.get("TERM") != "dumb"


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], *, title: str | None = None, right: bool = False
) -> Any:
    """Return a borderless table of the package rich. Markup in cells is shown as plain text.

    Args:
        columns: Names of the columns.
        rows: Cells of each row.
        title: Title above the table.
        right: Whether to align cells to the right.
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
    """A progress display, drawn in `write`: steps, steps/s, return, loss, staleness and remaining time.

    Before the first update, `show` adds what the run does.

    Args:
        total_steps: Number of steps of the run. If None, the display has no progress bar and no remaining time.
        title: Title of the run, for example `"PPO on CartPole-v1"`.
        file: Output file. None means stderr.
        seconds_between_lines: Seconds between two lines, used only if `file` is neither a terminal nor a notebook.
            Evaluations are printed at once.
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
        self._activity: str | None = ""  # None after the first update
        self._shown: dict[str, float] = {}
        self._speed = _Speed()
        self._started = time.monotonic()
        self._next_drawing = self._started
        self._drawn_step = 0
        self._live = _Live(self._file) if can_redraw(self._file) else None
        self._is_in_notebook = type(self._file).__module__.startswith("ipykernel.")
        is_redrawn = self._live is not None or self._is_in_notebook
        self._pause = _SECONDS_BETWEEN_DRAWINGS if is_redrawn else seconds_between_lines
        self._width = 0  # in a notebook: number of characters of the current line
        if self._live is not None:
            self._draw()

    def write(self, step: int, values: Values) -> None:
        self._step = step
        now = time.monotonic()
        self._speed.add(now, step)
        if values.get("learner_steps"):
            self._activity = None
        wanted = {name: values[name] for _, name, _ in _SHOWN if name in values}
        evaluated = "return_mean" in wanted
        if wanted:
            self._shown.update(scalars(on_host(wanted)))
        if evaluated or now >= self._next_drawing:
            self._next_drawing = now + self._pause
            self._draw()

    def show(self, activity: str) -> None:
        """See `ProgressDisplay`."""
        if self._activity is not None and activity != self._activity:
            self._activity, self._next_drawing = activity, time.monotonic() + self._pause
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
            self._live.draw(self._title, self._step, self._total_steps, self._entries(), self._times())
        else:
            entries = "  ".join(f"{label} {value}" for label, value in self._entries())
            title = f"{self._title}: " if self._title else ""
            line = f"{title}{entries}  time {self._times()}"
            if self._is_in_notebook:  # in a notebook, a carriage return overwrites the line
                line, self._width = f"\r{line.ljust(self._width)}", len(line)
            print(line, end="" if self._is_in_notebook else "\n", file=self._file, flush=True)

    def _entries(self) -> list[tuple[str, str]]:
        """Return (label, text of the value) for each available value, in the order in which they are shown."""
        total, speed = self._total_steps, self._speed.steps_per_second()
        entries = [("now", self._activity)] if self._activity else []
        entries.append(("steps", f"{self._step:,}" + (f" / {total:,}" if total else "")))
        if speed is not None:
            entries.append(("steps/s", f"{speed:,.0f}"))
        for label, name, form in _SHOWN:
            if name in self._shown:
                entries.append((label, form(self._shown[name])))
        return entries

    def _times(self) -> str:
        """Return the time since the start and, if it can be estimated, the remaining time."""
        past, speed = _clock(time.monotonic() - self._started), self._speed.steps_per_second()
        # Do not estimate from the first updates: they are slow because of compilation.
        if self._total_steps is None or speed is None or self._step < 0.01 * self._total_steps:
            return past
        return f"{past}, {_clock(max(0, self._total_steps - self._step) / speed)} left"


class _Speed:
    """Steps per second over the last `_SPEED_WINDOW_SECONDS`.

    Time before the first row does not count, because it contains the compilation.
    """

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
    """Two lines that the package rich redraws at the bottom of a terminal, while other output scrolls above them."""

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        # Let the output of user code scroll above the two lines, unless stdout is a file or a pipe.
        own = sys.stdout.isatty()
        self._live: Any = Live(console=Console(file=file), auto_refresh=False, redirect_stdout=own)
        self._live.start()

    def draw(self, title: str, step: int, total: int | None, entries: list[tuple[str, str]], times: str) -> None:
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
        for label, value in entries:
            line.append(f"{label} ", style="dim").append(value, style="cyan").append("   ")
        self._live.update(Group(head, line), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _clock(seconds: float) -> str:
    """Format a duration, for example `0:07`, `12:40` or `3:05:00`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
