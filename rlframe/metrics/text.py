"""Texts of numbers."""

from __future__ import annotations


def format_number(value: float | None) -> str:
    """Return a text of three significant digits, of one decimal from 100 on, or "-": 0.893, 28.5, 1,234.5."""
    if value is None:
        return "-"
    return f"{value:#.3g}" if 0.0 < abs(value) < 99.95 else f"{value:,.1f}"


def plus_minus(std: float | None, count: int) -> str:
    """Return text such as " ± 1.50", or "" if `count` is 1, because one value has no standard deviation."""
    return f" ± {format_number(std)}" if std is not None and count > 1 else ""
