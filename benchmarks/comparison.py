"""Compare two checkouts: is the new code slower by more than the old code differs from itself?

Each turn measures the old code, the new code, and the old code again, so that slow periods of the machine affect both.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.report import format_number

CONFIDENCE = 0.9  # probability that the interval contains the true median


class Turn(NamedTuple):
    """One figure, measured three times in a row."""

    old: float
    new: float
    again: float  # the old code again


class Spread(NamedTuple):
    """A median with its confidence interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"x {self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(values: Iterable[float]) -> Spread:
    """Return the median and its narrowest confidence interval of at least 90% (sign test).

    Up to seven values, the interval is from the lowest to the highest value (94% confidence for five values, 75% for
    three). With eight values, the outermost pair is left out, and with eleven the two outermost pairs.
    """
    ordered = sorted(values)
    count, cut = len(ordered), 0
    while count > 2 * (cut + 1) and 1 - 2 * _tail(count, cut + 1) >= CONFIDENCE:
        cut += 1
    return Spread(statistics.median(ordered), ordered[cut], ordered[-1 - cut])


def _tail(count: int, at_most: int) -> float:
    """Return the probability of at most `at_most` heads in `count` coin tosses."""
    return sum(math.comb(count, heads) for heads in range(at_most + 1)) / 2**count


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure over all turns. Ratios are above 1 if the new code, or the old code's second run, is better."""

    turns: tuple[Turn, ...]
    higher_is_better: bool

    @property
    def old(self) -> float:
        """The median of all measurements of the old code."""
        return statistics.median(value for turn in self.turns for value in (turn.old, turn.again))

    @property
    def new(self) -> float:
        """The median of all measurements of the new code."""
        return statistics.median(turn.new for turn in self.turns)

    @property
    def ratio(self) -> Spread:
        """Ratio of the new code to the geometric mean of the old code before and after it. Linear drift cancels out."""
        return spread(self._better(turn.new, math.sqrt(turn.old * turn.again)) for turn in self.turns)

    @property
    def itself(self) -> Spread:
        """Ratio of the old code's second run to its first run."""
        return spread(self._better(turn.again, turn.old) for turn in self.turns)

    @property
    def is_worse(self) -> bool:
        """True if the new code is worse by more than the old code differs from itself in either direction."""
        itself = self.itself
        return self.ratio.middle < min(itself.low, 1 / itself.high)

    def _better(self, one: float, other: float) -> float:
        return one / other if self.higher_is_better else other / one


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of a benchmark for two checkouts."""

    title: str
    row: str
    unit: str
    value: Figure
    processor: Figure | None  # microseconds per step; None if it was not measured for both

    @property
    def is_slower(self) -> bool:
        """True if the new code is worse in the row's figure. Processor time is not considered."""
        return self.value.is_worse

    @property
    def waits(self) -> bool:
        """True if it is slower without more processor time: because of a sleep, a lock, or a busy machine."""
        return self.value.is_worse and self.processor is not None and not self.processor.is_worse

    @property
    def needs_more_processor_time(self) -> bool:
        """True if it needs more processor time but is not slower."""
        return not self.value.is_worse and self.processor is not None and self.processor.is_worse

    def verdict(self) -> str:
        """Return the result in words."""
        if self.is_slower:
            return "yes, without more processor time (waiting)" if self.waits else "yes"
        return "no, but more processor time" if self.needs_more_processor_time else "no"

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.row}"]
        figures = {self.unit: self.value, "processor µs a step": self.processor}
        width = max(map(len, figures))
        for name, figure in figures.items():
            if figure is None:
                lines.append(f"  {name:<{width}}  not measured by both")
                continue
            lines.append(
                f"  {name:<{width}}  old {format_number(figure.old):>9}  new {format_number(figure.new):>9}"
                f"  {figure.ratio}  old to itself {figure.itself}"
            )
        return "\n".join([*lines, f"  slower by more than the old code differs from itself: {self.verdict()}"])

    def record(self) -> dict[str, Any]:
        """Return all values for `--json`."""
        return {
            "title": self.title,
            "row": self.row,
            "unit": self.unit,
            "value": _record(self.value),
            "processor_us": _record(self.processor),
            "slower": self.is_slower,
        }


def _record(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {
        "old": figure.old,
        "new": figure.new,
        "ratio": figure.ratio._asdict(),
        "itself": figure.itself._asdict(),
        "turns": [turn._asdict() for turn in figure.turns],
        "worse": figure.is_worse,
    }


# Rows of one run of `benchmarks.turn`, by (title, row).
Rows = dict[tuple[str, str], dict[str, Any]]


def compare(turns: list[tuple[Rows, Rows, Rows]]) -> tuple[list[Comparison], list[str]]:
    """Compare the rows of all turns.

    Args:
        turns: rows of the old code, the new code, and the old code again for each turn.

    Returns:
        (comparisons of rows that both have, one line for each row that could not be compared).
    """
    found, missing = [], []
    for key in dict.fromkeys(key for turn in turns for rows in turn for key in rows):
        value, processor = _figure(turns, key, "value"), _figure(turns, key, "processor")
        if value is not None:
            row = next(rows[key] for turn in turns for rows in turn if key in rows)
            found.append(Comparison(*key, row["unit"], value, processor))
        else:
            missing.append(f"{key[0]}: {key[1]}: {_why(turns, key)}")
    return found, missing


def _figure(turns: list[tuple[Rows, Rows, Rows]], key: tuple[str, str], name: str) -> Figure | None:
    """Collect a figure from the turns with all three values. Values must be above 0, because ratios need this."""
    complete, higher_is_better = [], False
    for turn in turns:
        values = [rows[key][name] for rows in turn if key in rows]
        if len(values) == 3 and all(value is not None and value > 0 for value in values):
            complete.append(Turn(*values))
            higher_is_better = name == "value" and turn[1][key]["higher_is_better"]
    return Figure(tuple(complete), higher_is_better) if complete else None


def _why(turns: list[tuple[Rows, Rows, Rows]], key: tuple[str, str]) -> str:
    has_old = any(key in rows and rows[key]["value"] is not None for old, _, again in turns for rows in (old, again))
    has_new = any(key in new and new[key]["value"] is not None for _, new, _ in turns)
    if has_old and has_new:
        return "both checkouts never have figures above 0 in the same turn"
    if has_old or has_new:
        side, rows = ("new", [turn[1] for turn in turns]) if has_old else ("old", [turn[0] for turn in turns])
        return f"only the {'old' if has_old else 'new'} checkout measured it{_note(side, rows, key)}"
    return f"neither checkout measured it{_note('new', [turn[1] for turn in turns], key)}"


def _note(side: str, turns: list[Rows], key: tuple[str, str]) -> str:
    notes = [rows[key]["note"] for rows in turns if key in rows and rows[key]["note"]]
    return f" (the {side}: {notes[0]})" if notes else ""
