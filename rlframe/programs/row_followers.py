"""The rows of a run, handed on to loggers in the caller's process: progress, trackers, callbacks."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import threading
from collections.abc import Iterable, Iterator

from rlframe.metrics import Logger, MultiLogger
from rlframe.metrics.base import Values
from rlframe.programs.callbacks import Callbacks
from rlframe.programs.run_dir import rows_after

_log = logging.getLogger(__name__)

_LOOK_EVERY = 0.5  # seconds between two looks at the rows that the monitor has written


class TolerantLogger:
    """A logger whose failure does not end a run: it is warned of.

    Args:
        logger: the logger.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def write(self, step: int, values: Values) -> None:
        """See `Logger`."""
        try:
            self._logger.write(step, values)
        except Exception as error:
            if str(error) not in self._said:
                self._said.add(str(error))
                _log.warning("A logger failed: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Nothing: whoever made the logger closes it."""


@contextlib.contextmanager
def closing(loggers: Iterable[Logger]) -> Iterator[list[Logger]]:
    """Close the loggers at the end of the context."""
    opened = list(loggers)
    try:
        yield opened
    finally:
        MultiLogger(opened).close()


@contextlib.contextmanager
def following(path: pathlib.Path, loggers: list[Logger], callbacks: Callbacks) -> Iterator[None]:
    """Pass each row that a monitor in another process writes to a file to the loggers, until the context ends.

    Args:
        path: the file, `metrics.jsonl`.
        loggers: they get each row, in a thread of this process.
        callbacks: one of them, or none of the loggers; its request to end the run is repeated until the run ends.
    """
    logger, over = MultiLogger(loggers), threading.Event()
    at = path.stat().st_size if path.exists() else 0

    def read() -> None:
        nonlocal at
        try:
            at = min(at, path.stat().st_size)  # a restarted monitor may take its last row back
            for row, position in rows_after(path, at):
                at = position
                logger.write(row.pop("step"), row)
        except FileNotFoundError:
            pass

    def follow() -> None:
        while not over.wait(_LOOK_EVERY):
            read()
            callbacks.tell()

    thread = threading.Thread(target=follow, name="rlframe rows", daemon=True)
    if loggers:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if loggers:
            thread.join()
            read()
