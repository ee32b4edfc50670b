"""Logs of a run: the format of log lines in all processes, and the log files `logs/NODE.log` in the run directory.

An example of a log line:

2026-11-22 13:14:05,123 WARNING [actor/0] The learner at ... does not answer get_params()
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import logging
import pathlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TextIO

from rlframe.interprocess.processes import environment_variable
from rlframe.streams import root_handler

# The encoding of log files. "backslashreplace" is necessary because a line can contain a path that is not UTF-8.
_ENCODING = {"encoding": "utf-8", "errors": "backslashreplace"}
# The environment variable for the log level of TensorFlow and XLA, which read it on import. 3 means only errors.
_NATIVE_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


class NullStream(io.TextIOBase):
    """A stream that discards its text."""

    def write(self, text: str) -> int:
        """Discard the text."""
        return len(text)


@contextlib.contextmanager
def silent(quiet: bool = True) -> Iterator[None]:
    """Show no warnings in this process during a `with`. The caller's `logging` handlers still receive the warnings.

    Python's `warnings` go to the logger `py.warnings`.

    Args:
        quiet: False turns this context manager off.
    """
    if not quiet:
        yield
        return
    # True if the caller already sends warnings to `logging`.
    is_captured = getattr(warnings.showwarning, "__module__", "") == "logging"
    logging.captureWarnings(True)
    try:
        # If the variable is not set, the import of JAX sets it to 1.
        with environment_variable(_NATIVE_LEVEL, "3"), root_handler(logging.NullHandler()):
            yield
    finally:
        logging.captureWarnings(is_captured)


def set_up(node: str) -> None:
    """Log to stderr, with time, level and the name of the node."""
    logging.basicConfig(stream=sys.stderr, format=_format(node), force=True)


def log_file(logs: pathlib.Path, node: str) -> pathlib.Path:
    """Return the path of `actor-0.log` for the node `actor/0`."""
    return logs / f"{node.replace('/', '-')}.log"


class NodeLogs:
    """Shows the output of a program's nodes, and appends it to log files. Any thread may call the methods.

    Args:
        directory: directory of the log files; None means no log files.
        output: stream that shows the lines; None means stderr.
    """

    def __init__(self, directory: pathlib.Path | None = None, output: TextIO | None = None) -> None:
        self._directory, self._output = directory, output if output is not None else sys.stderr
        self._files: dict[str, TextIO] = {}
        # `_showing` is a separate lock, because a write to the output may block.
        self._lock, self._showing = threading.Lock(), threading.Lock()

    def write(self, node: str, line: str) -> None:
        """Append a line of a node to its log file, and show the line with the node's name as a prefix."""
        self._keep(node, line)
        self._show(node, line.replace(f" [{node}] ", " ", 1))

    def warn(self, node: str, text: str) -> None:
        """Append a warning about a node to its log file, and show it."""
        now = datetime.datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
        self._keep(node, f"{now} WARNING [{node}] {text}")
        self._show(node, text)

    def close(self) -> None:
        """Close the log files. Later lines are shown, but not written to files."""
        with self._lock:
            self._directory = None
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._files.clear()

    def _show(self, node: str, text: str) -> None:
        # Ignore errors: the stream may be closed, or the process that reads it may have died.
        with self._showing, contextlib.suppress(OSError, ValueError):
            self._output.write(f"[{node}] {text}\n")
            self._output.flush()

    def _keep(self, node: str, line: str) -> None:
        with self._lock, contextlib.suppress(OSError):  # do not fail if the disk is full
            if self._directory is None:
                return
            if node not in self._files:
                self._directory.mkdir(exist_ok=True)
                self._files[node] = log_file(self._directory, node).open("a", 1, **_ENCODING)
            self._files[node].write(f"{line}\n")


@contextlib.contextmanager
def logging_to_file(logs: pathlib.Path, node: str, *, of_this_thread: bool = False) -> Iterator[None]:
    """Also append the warnings of this package to a log file during a `with`.

    Args:
        logs: directory of the log file.
        node: name of the node.
        of_this_thread: only the warnings of the current thread.
    """
    logger = logging.getLogger("rlframe")
    has_own = logger.hasHandlers()
    logs.mkdir(exist_ok=True)
    file = _LogFile(log_file(logs, node), delay=True, **_ENCODING)
    file.setFormatter(logging.Formatter(_format(node)))
    if of_this_thread:
        file.addFilter(functools.partial(_is_of_thread, threading.get_ident()))
    logger.addHandler(file)
    try:
        # Keep showing warnings. Python uses its handler of last resort only for loggers without handlers.
        with root_handler(None if has_own else logging.lastResort):
            yield
    finally:
        logger.removeHandler(file)
        with contextlib.suppress(OSError):
            file.close()


def _is_of_thread(ident: int, record: logging.LogRecord) -> bool:
    return record.thread == ident


class _LogFile(logging.FileHandler):
    """A log file that discards lines while the disk is full."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _format(node: str) -> str:
    return f"%(asctime)s %(levelname)s [{node.replace('%', '%%')}] %(message)s"
