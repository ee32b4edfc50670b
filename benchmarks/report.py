"""Tables of our figure, the figures of others from the same run, ratios, and targets."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Iterable
from importlib import metadata
from typing import Any


class NotMeasured(Exception):
    """Raised if a figure could not be measured. The message contains the reason."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of a table."""

    name: str
    value: float | None  # None if not measured; `note` contains the reason
    target: float | None = None  # target of our figure, as a multiple of this one
    note: str = ""
    processor: float | None = None  # microseconds of processor time per step, for rows of rlframe and of PureJaxRL


@dataclasses.dataclass(frozen=True)
class Table:
    """Our figure compared with others. Ratios are above 1 if ours is better."""

    title: str
    unit: str
    ours: Row  # its `target` is absolute, in the table's unit
    others: tuple[Row, ...] = ()
    higher_is_better: bool = True
    ratios: bool = True  # False if the other rows are parts of ours, not competitors
    note: str = ""

    def ratio(self, other: Row) -> float | None:
        """Return how many times better our figure is than that of `other`."""
        if not self.ratios or not self.ours.value or not other.value:
            return None
        ratio = self.ours.value / other.value
        return ratio if self.higher_is_better else 1 / ratio

    def missed_targets(self) -> list[str]:
        """Return a line for each missed target."""
        ours, lines = self.ours, []
        if ours.target is not None and ours.value is not None:
            reached = ours.value >= ours.target if self.higher_is_better else ours.value <= ours.target
            if not reached:
                lines.append(
                    f"{self.title}: {format_number(ours.value)} {self.unit}, target {format_number(ours.target)}"
                )
        for row in self.others:
            ratio = self.ratio(row)
            if row.target is not None and ratio is not None and ratio < row.target:
                lines.append(f"{self.title}: {ratio:.2f} times {row.name}, target {row.target:g}")
        return lines

    def __str__(self) -> str:
        rows = (self.ours, *self.others)
        width = max(len(row.name) for row in rows)
        lines = [f"{self.title}  ({self.unit}{'' if self.higher_is_better else '; less is better'})"]
        for row in rows:
            line = f"  {row.name:<{width}}  {format_number(row.value):>10}"
            if row is self.ours:
                line += self._absolute(row)
            elif row.value is not None:
                line += self._relative(row)
            if row.processor is not None:
                line += f"  processor {format_number(row.processor)} µs"
            lines.append(f"{line}  {row.note}".rstrip())
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    def _absolute(self, row: Row) -> str:
        if row.target is None or row.value is None:
            return " " * 8
        bound = "at least" if self.higher_is_better else "at most"
        reached = row.value >= row.target if self.higher_is_better else row.value <= row.target
        return f"{'':8}  target: {bound} {format_number(row.target)}: {_verdict(reached)}"

    def _relative(self, row: Row) -> str:
        ratio = self.ratio(row)
        if ratio is None:
            return " " * 8
        text = f"  x {ratio:<5.2f}"
        if row.target is not None:
            text += f"  target: x {row.target:g}: {_verdict(ratio >= row.target)}"
        return text


def format_number(value: float | None) -> str:
    """Format a figure with three or four significant digits."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def processor(results: Iterable[dict[str, Any]]) -> float | None:
    """Return the median processor time per step in microseconds, from the results that have it."""
    return median(result.get("processor_us") for result in results)


def machine() -> str:
    """Return a description of the machine and the versions."""
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
