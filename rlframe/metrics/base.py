"""The `Logger` protocol, and loggers that pass rows to a function or to other loggers."""

from __future__ import annotations

import contextlib
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
