"""Rows of metrics: the `Logger` protocol, and functions that make the rows of a run.

A logger receives rows. Two loggers of this file pass them to a function or to other loggers. A row contains the actors'
counters and the results of evaluations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from rlframe.errors import RlframeError

_log = logging.getLogger(__name__)

Values = Mapping[str, Any]  # name -> number, string or array; arrays may be on a device


class Logger(Protocol):
    """A destination for rows of metrics. Any object with these two methods is a logger."""

    def write(self, step: int, values: Values) -> None:
        """Write one row.

        Args:
            step: Number of environment steps so far. It increases from row to row.
            values: Name -> number, string or array. The names can differ from row to row.

        Raises:
            RlframeError: The row could not be written, for example because the disk is full. Earlier rows are kept.
        """

    def close(self) -> None:
        """Write pending rows, and release files and processes. May be called again."""


class ProgressDisplay(Logger, Protocol):
    """A logger that shows the progress of a run."""

    def show(self, activity: str) -> None:
        """Show what the run does before its first update, such as "compiling". After the first update, do nothing."""


class CallbackLogger:
    """A logger that calls `function(step, values)` for each row. `write` raises the function's exceptions."""

    def __init__(self, function: Callable[[int, dict[str, Any]], Any]) -> None:
        self._function = function

    def write(self, step: int, values: Values) -> None:
        self._function(step, on_host(values))

    def close(self) -> None:
        pass


class MultiLogger:
    """A logger that fetches each row from the device once, and passes it to several loggers.

    All loggers get the row, even if one of them raises an error. Then the first error is raised.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = list(loggers)

    def write(self, step: int, values: Values) -> None:
        row = on_host(values)
        _for_each(self._loggers, lambda logger: logger.write(step, row))

    def close(self) -> None:
        _for_each(self._loggers, lambda logger: logger.close())


class LenientLogger(MultiLogger):
    """A logger that continues if a row cannot be written, for example because the disk is full.

    Each different error is logged as a warning once. The number of lost rows is logged when a row can be written again,
    or when the logger is closed.

    Args:
        loggers: Loggers that get each row.
        errors: Class of the exceptions that are logged and not raised.
    """

    def __init__(self, loggers: Iterable[Logger], errors: type[Exception] = RlframeError) -> None:
        super().__init__(loggers)
        self._errors = errors
        self._reported: set[str] = set()
        self._lost = 0  # number of lost rows since the last report

    def write(self, step: int, values: Values) -> None:
        try:
            super().write(step, values)
        except self._errors as error:
            self._lost += 1
            why = str(error) if isinstance(error, RlframeError) else f"{type(error).__name__}: {error}"
            if why not in self._reported:
                self._reported.add(why)
                _log.warning("A row of the logs is lost: %s", why)
        else:
            self._report_lost_rows("The logs are written again")

    def close(self) -> None:
        self._report_lost_rows("The logs end")
        super().close()

    def _report_lost_rows(self, what: str) -> None:
        if self._lost:
            _log.warning("%s: %d row%s lost.", what, self._lost, " was" if self._lost == 1 else "s were")
        self._lost = 0
        self._reported.clear()


def on_host(values: Values) -> dict[str, Any]:
    """Return `values` with device arrays converted to Python numbers and numpy arrays. Other values do not change."""
    for value in values.values():
        # Start all transfers now, so that they run at the same time.
        if hasattr(value, "copy_to_host_async"):
            value.copy_to_host_async()
    return {name: _on_host(value) for name, value in values.items()}


def scalars(values: Values) -> dict[str, float]:
    """Return the numbers of a row, without strings and arrays. The row must already be on the host."""
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float))}


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """If the `with` block raises `OSError`, raise `RlframeError` with advice on how to continue."""
    try:
        yield
    except OSError as error:
        raise RlframeError(
            f"Could not write {os.fspath(path)}: {error.strerror or error}. Earlier rows are kept. "
            "Free disk space (or make the folder writable), then continue the run with --resume."
        ) from error


def append(fd: int, data: bytes, path: str | os.PathLike[str]) -> None:
    """Append `data` to the open file `fd`. If the disk takes only a part, remove this part and raise `RlframeError`.

    Use a single system call, so that readers see all of the data or none, even if this process is killed.
    """
    with writing(path):
        written = os.write(fd, data)
        if written != len(data):
            os.ftruncate(fd, os.fstat(fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _on_host(value: Any) -> Any:
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array


def _for_each(loggers: list[Logger], call: Callable[[Logger], None]) -> None:
    first_error: Exception | None = None
    for logger in loggers:
        try:
            call(logger)
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


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
