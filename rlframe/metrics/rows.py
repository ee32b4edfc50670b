"""Create the rows of a run's logs from the actors' counters and from the results of evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

COUNTERS = ("env_steps", "episodes", "return_sum", "length_sum")  # in `Actor.stats`

Sums = dict[str, list[float]]  # name -> [sum of the values, number of values] since the actor's start

_CURVE_POINTS = 500  # maximum number of points in a curve


def add_sums(sources: Iterable[Sums]) -> Sums:
    """Return for each name the total over all sources."""
    total: Sums = {}
    for sums in sources:
        for name, (value, count) in sums.items():
            before = total.get(name, [0.0, 0.0])
            total[name] = [before[0] + value, before[1] + count]
    return total


@dataclasses.dataclass
class ActorCounts:
    """The counters of all actors. They never decrease, even if a result of `Actor.stats` arrives twice or late.

    Each restart of an actor gets a new incarnation number. The counters of earlier incarnations are kept.

    Attributes:
        counters: "rank.incarnation" -> values of the `COUNTERS`.
        logged: "rank.incarnation" -> sums of the values that the environments logged.
        env_steps: Total number of environment steps.
    """

    counters: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    logged: dict[str, Sums] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env_steps = int(sum(counters[0] for counters in self.counters.values()))

    def add(self, stats: Mapping[str, Any]) -> None:
        """Add a result of `Actor.stats`. Ignore it if a result with more steps has already arrived."""
        actor = f"{int(stats['rank'])}.{int(stats['incarnation'])}"
        new = [stats[name] for name in COUNTERS]
        steps_before = self.counters.get(actor, [0])[0]
        if new[0] >= steps_before:
            self.counters[actor], self.logged[actor] = new, stats.get("logged", {})
            self.env_steps += int(new[0] - steps_before)

    def total(self) -> dict[str, float]:
        """Return the sum of each counter."""
        sums = [sum(values) for values in zip(*self.counters.values())] or [0] * len(COUNTERS)
        return dict(zip(COUNTERS, sums))

    def total_logged(self) -> Sums:
        """Return the sums of the values that all environments logged."""
        return add_sums(self.logged.values())


class Rows:
    """Creates training rows. Each row contains the changes of the counters since the previous row.

    Args:
        step: Step of the previous row, in the unit of the logs.
        total, logged: `ActorCounts.total()` and `total_logged()` at this step.
        now: Current time in seconds, from any monotonic clock.

    Attributes:
        step: Step of the previous row.
        began: Start time of the next row.
    """

    def __init__(self, step: int, total: dict[str, float], logged: Sums, now: float) -> None:
        self.step, self._total, self._logged, self.began = step, total, logged, now

    def next(self, step: int, counts: ActorCounts, now: float) -> dict[str, Any]:
        """Return the row that ends at this step, or {} if there were no steps since the previous row.

        If episodes ended, the row has the means `episode_return` and `episode_length`, and the number `episodes`. For
        each value NAME that environments logged, it has the mean `env/NAME`.
        """
        if step == self.step:
            return {}
        total, logged = counts.total(), counts.total_logged()
        new = {name: total[name] - self._total[name] for name in COUNTERS}
        row: dict[str, Any] = {}
        if new["episodes"]:
            row["episode_return"] = new["return_sum"] / new["episodes"]
            row["episode_length"] = new["length_sum"] / new["episodes"]
            row["episodes"] = int(new["episodes"])
        for name, (value, count) in logged.items():
            value_before, count_before = self._logged.get(name, (0.0, 0.0))
            if count > count_before:
                row[f"env/{name}"] = (value - value_before) / (count - count_before)
        row["steps_per_second"] = (step - self.step) / max(now - self.began, 1e-9)
        self.step, self._total, self._logged, self.began = step, total, logged, now
        return row

    def to_json(self) -> list[Any]:
        """Return [step, total, logged]: with these arguments, a new `Rows` continues after the last row."""
        return [self.step, self._total, self._logged]


def evaluation_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `Evaluator.evaluate` with the names that are used in logs.

    `episodes` becomes `eval_episodes`, because in a log, `episodes` is the number of training episodes.
    """
    names = ("return_mean", "return_std", "length_mean")
    return {**{name: values[name] for name in names}, "eval_episodes": values["episodes"]}


def add_point(curve: list[list[float]], *point: float) -> None:
    """Append a point to a curve. If the curve is then too long, remove every second point, but keep both ends."""
    curve.append(list(point))
    if len(curve) > _CURVE_POINTS:
        del curve[1::2]
