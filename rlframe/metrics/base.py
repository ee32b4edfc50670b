"""The protocol of a logger, and the loggers that pass rows on."""

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

Values = Mapping[str, Any]  # name -> number, string or array, on the host or on a device


class Logger(Protocol):
    """Takes rows of numbers. Any object with these two methods is a logger."""

    def write(self, step: int, values: Values) -> None:
        """Take one row.

        Args:
            step: environment steps so far; rises from row to row.
            values: name -> number, string or array. Names may come and go from row to row.

        Raises:
            RlframeError: the row could not be kept (the disk is full, say). Earlier rows are.
        """

    def close(self) -> None:
        """Write pending rows, and release files and processes. Calling it twice is harmless."""


class CallbackLogger:
    """Calls `function(step, values)` with each row. Its exceptions reach the caller of `write`."""

    def __init__(self, function: Callable[[int, dict[str, Any]], Any]) -> None:
        self._function = function

    def write(self, step: int, values: Values) -> None:
        self._function(step, on_host(values))

    def close(self) -> None:
        pass


class MultiLogger:
    """Passes each row to several loggers, fetched from the device once.

    If one logger fails, the others still get the row: the first error is raised afterwards.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = list(loggers)

    def write(self, step: int, values: Values) -> None:
        row = on_host(values)
        _for_each(self._loggers, lambda logger: logger.write(step, row))

    def close(self) -> None:
        _for_each(self._loggers, lambda logger: logger.close())


class LenientLogger(MultiLogger):
    """Continues if a row cannot be kept (the disk is full, say): warns once for each reason, and when that is over.

    Args:
        loggers: they get each row.
        errors: exceptions of theirs that do not reach the caller.
    """

    def __init__(self, loggers: Iterable[Logger], errors: type[Exception] = RlframeError) -> None:
        super().__init__(loggers)
        self._errors = errors
        self._reported: set[str] = set()
        self._lost = 0  # rows, since they were all kept

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
    """Return `values` with every number as a Python number and every array as a numpy array; others as they are."""
    for value in values.values():
        # All transfers start before the first is waited for.
        if hasattr(value, "copy_to_host_async"):
            value.copy_to_host_async()
    return {name: _on_host(value) for name, value in values.items()}


def scalars(values: Values) -> dict[str, float]:
    """Return the numbers of a row that is on the host, without its strings and arrays."""
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float))}


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` on `path` into one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        raise RlframeError(
            f"Could not write {os.fspath(path)}: {error.strerror or error}. What was written before is kept: "
            "make room (or make the folder writable), then continue the run with --resume."
        ) from error


def append(fd: int, data: bytes, path: str | os.PathLike[str]) -> None:
    """Append all of `data` to the file open as `fd`, or nothing. Raise RlframeError if that fails.

    One system call: a reader or a kill never sees half of it.
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
