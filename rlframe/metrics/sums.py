"""Numbers that many sources log by name: what each has summed up, all of them together, and means of a while."""

from __future__ import annotations

from collections.abc import Iterable

Sums = dict[str, list[float]]  # name -> [sum, count], since the source was made


def add_up(sources: Iterable[Sums]) -> Sums:
    """The sums of all sources together."""
    total: Sums = {}
    for sums in sources:
        for name, (value, count) in sums.items():
            before = total.get(name, [0.0, 0.0])
            total[name] = [before[0] + value, before[1] + count]
    return total


def env_means(sums: Sums, before: Sums) -> dict[str, float]:
    """`env/NAME`: the mean of what environments logged since the sums were `before`; no name by which nothing was."""
    new = {name: [now - then for now, then in zip(sums[name], before.get(name, [0.0, 0.0]))] for name in sums}
    return {f"env/{name}": value / count for name, (value, count) in new.items() if count > 0}
