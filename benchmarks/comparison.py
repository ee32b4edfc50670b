"""Is the new program slower than the old one by more than the old one differs from itself?

Each turn measures the old, the new, and the old again, so that the machine's slow minutes are in both answers.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.report import number

CONFIDENCE = 0.9  # of the interval in which a median lies


class Turn(NamedTuple):
    """One figure, measured three times in a row."""

    old: float
    new: float
    again: float  # the old once more


class Spread(NamedTuple):
    """A median, and between which values it lies."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"x {self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(values: Iterable[float]) -> Spread:
    """The median, and the narrowest pair of values that holds the true one with 90% (the sign test's interval).

    Up to seven values these are the least and the greatest (94% of five, 75% of three); of eight the outermost pair is
    left out, of eleven two.
    """
    ordered = sorted(values)
    count, cut = len(ordered), 0
    while count > 2 * (cut + 1) and 1 - 2 * _tail(count, cut + 1) >= CONFIDENCE:
        cut += 1
    return Spread(statistics.median(ordered), ordered[cut], ordered[-1 - cut])


def _tail(count: int, at_most: int) -> float:
    """The probability of at most so many heads in `count` throws of a coin."""
    return sum(math.comb(count, heads) for heads in range(at_most + 1)) / 2**count


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure over the turns. Ratios are above 1 where the new, or the old the second time, is the better one."""

    turns: tuple[Turn, ...]
    higher_is_better: bool

    @property
    def old(self) -> float:
        """The median of all that was measured of the old."""
        return statistics.median(value for turn in self.turns for value in (turn.old, turn.again))

    @property
    def new(self) -> float:
        """The median of what was measured of the new."""
        return statistics.median(turn.new for turn in self.turns)

    @property
    def ratio(self) -> Spread:
        """The new to the old before and after it (their geometric mean): what drifts evenly cancels."""
        return spread(self._better(turn.new, math.sqrt(turn.old * turn.again)) for turn in self.turns)

    @property
    def itself(self) -> Spread:
        """The old to itself."""
        return spread(self._better(turn.again, turn.old) for turn in self.turns)

    @property
    def is_worse(self) -> bool:
        """Whether the new is worse by more than the old differs from itself, be that up or down."""
        itself = self.itself
        return self.ratio.middle < min(itself.low, 1 / itself.high)

    def _better(self, one: float, other: float) -> float:
        return one / other if self.higher_is_better else other / one


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of a benchmark, for two checkouts."""

    title: str
    row: str
    unit: str
    value: Figure
    processor: Figure | None  # microseconds a step; None where one of them did not take it

    @property
    def is_slower(self) -> bool:
        """Whether the new is worse in its figure, whatever it does meanwhile."""
        return self.value.is_worse

    @property
    def waits(self) -> bool:
        """Whether it is slower for no more processor time: by a sleep or a lock, or because other work disturbed it."""
        return self.value.is_worse and self.processor is not None and not self.processor.is_worse

    @property
    def only_works_more(self) -> bool:
        """Whether it takes more processor time, and is not slower for it."""
        return not self.value.is_worse and self.processor is not None and self.processor.is_worse

    def verdict(self) -> str:
        """The answer, in words."""
        if self.is_slower:
            return "yes, for no more processor time: it waits" if self.waits else "yes"
        return "no, but it takes more processor time" if self.only_works_more else "no"

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.row}"]
        figures = {self.unit: self.value, "processor µs a step": self.processor}
        width = max(map(len, figures))
        for name, figure in figures.items():
            if figure is None:
                lines.append(f"  {name:<{width}}  not measured by both")
                continue
            lines.append(
                f"  {name:<{width}}  old {number(figure.old):>9}  new {number(figure.new):>9}  {figure.ratio}"
                f"  the old to itself {figure.itself}"
            )
        return "\n".join([*lines, f"  slower by more than the old differs from itself: {self.verdict()}"])

    def record(self) -> dict[str, Any]:
        """All of it, for `--json`."""
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


# Rows of a run of `benchmarks.turn`, by (title, row).
Rows = dict[tuple[str, str], dict[str, Any]]


def compare(turns: list[tuple[Rows, Rows, Rows]]) -> tuple[list[Comparison], list[str]]:
    """(the rows that both have, a line for each that one or none has), of turns of the old, the new, and the old."""
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
    """What the turns say in which all three have a value; ratios need them above 0."""
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
        return "in no turn a figure above 0 of both"
    if has_old or has_new:
        side, rows = ("new", [turn[1] for turn in turns]) if has_old else ("old", [turn[0] for turn in turns])
        return f"only the {'old' if has_old else 'new'} has it{_note(side, rows, key)}"
    return f"neither has it{_note('new', [turn[1] for turn in turns], key)}"


def _note(side: str, turns: list[Rows], key: tuple[str, str]) -> str:
    notes = [rows[key]["note"] for rows in turns if key in rows and rows[key]["note"]]
    return f" (the {side}: {notes[0]})" if notes else ""
