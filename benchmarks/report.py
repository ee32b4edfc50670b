"""Tables: our figure, the others' figures from the same run, the ratio, and what was asked for."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Iterable
from importlib import metadata
from typing import Any


class NotMeasured(Exception):
    """A figure that could not be taken here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of a table."""

    name: str
    value: float | None  # None: not measured, and `note` says why
    wanted: float | None = None  # the least that our figure is to be, as a multiple of this one
    note: str = ""
    processor: float | None = None  # microseconds of processor time for one step, where the row is of rlframe


@dataclasses.dataclass(frozen=True)
class Table:
    """Our figure against others. Ratios are above 1 where ours is the better one."""

    title: str
    unit: str
    ours: Row  # its `wanted` is absolute, in the table's unit
    others: tuple[Row, ...] = ()
    higher_is_better: bool = True
    ratios: bool = True  # False: the others are parts of ours, not rivals
    note: str = ""

    def ratio(self, other: Row) -> float | None:
        """How many times better our figure is than `other`'s."""
        if not self.ratios or not self.ours.value or not other.value:
            return None
        ratio = self.ours.value / other.value
        return ratio if self.higher_is_better else 1 / ratio

    def misses(self) -> list[str]:
        """What was asked for and is not reached."""
        ours, missed = self.ours, []
        if ours.wanted is not None and ours.value is not None:
            reached = ours.value >= ours.wanted if self.higher_is_better else ours.value <= ours.wanted
            if not reached:
                missed.append(f"{self.title}: {number(ours.value)} {self.unit}, wanted {number(ours.wanted)}")
        for row in self.others:
            ratio = self.ratio(row)
            if row.wanted is not None and ratio is not None and ratio < row.wanted:
                missed.append(f"{self.title}: {ratio:.2f} times {row.name}, wanted {row.wanted:g}")
        return missed

    def __str__(self) -> str:
        rows = (self.ours, *self.others)
        width = max(len(row.name) for row in rows)
        lines = [f"{self.title}  ({self.unit}{'' if self.higher_is_better else '; less is better'})"]
        for row in rows:
            line = f"  {row.name:<{width}}  {number(row.value):>10}"
            if row is self.ours:
                line += self._absolute(row)
            elif row.value is not None:
                line += self._relative(row)
            if row.processor is not None:
                line += f"  processor {number(row.processor)} µs"
            lines.append(f"{line}  {row.note}".rstrip())
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    def _absolute(self, row: Row) -> str:
        if row.wanted is None or row.value is None:
            return " " * 8
        bound = "at least" if self.higher_is_better else "at most"
        reached = row.value >= row.wanted if self.higher_is_better else row.value <= row.wanted
        return f"{'':8}  wanted: {bound} {number(row.wanted)}: {_verdict(reached)}"

    def _relative(self, row: Row) -> str:
        ratio = self.ratio(row)
        if ratio is None:
            return " " * 8
        text = f"  x {ratio:<5.2f}"
        if row.wanted is not None:
            text += f"  wanted: x {row.wanted:g}: {_verdict(ratio >= row.wanted)}"
        return text


def number(value: float | None) -> str:
    """A figure with three or four digits that count."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what was measured."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def processor(results: Iterable[dict[str, Any]]) -> float | None:
    """The median of the processor time of a step, in microseconds, where the turns' results say it."""
    return middle(result.get("processor_us") for result in results)


def machine() -> str:
    """The machine and the versions that the figures are of."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    packages = ("rlframe", "jax", "dm-haiku", "envpool", "gymnasium", "numpy")
    versions = " ".join(f"{name} {_version(name)}" for name in packages)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, {model}, load {load:.1f}; Python {platform.python_version()}\n{versions}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _verdict(reached: bool) -> str:
    return "yes" if reached else "NO"
