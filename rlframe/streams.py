"""Prepare standard streams that are closed (`2>&-`) or have lost their reader (`| head`). Add a root log handler."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from typing import Any


def prepare() -> None:
    """Make the standard streams accept any text.

    Replace closed streams with the null device. Otherwise the next file or socket would get the stream's descriptor
    number, and prints would go into it. Escape characters that the stream's encoding does not support. Discard text to
    stderr that nobody can read.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, stream := open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A file name can contain bytes that are not valid UTF-8.
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = _Stderr(sys.stderr)


def silence_broken_pipe(stream: Any) -> bool:
    """Return True if a stream is a pipe whose reader has exited. In this case, discard all later output to it."""
    if stream is None:  # Python was started with `>&-`
        return False
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # The stream is closed, or it is not a file.
        return False
    poll = select.poll()
    poll.register(number, 0)
    lost = any(events & select.POLLERR for _, events in poll.poll(0))
    if lost:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
    return lost


class _Stderr(io.TextIOWrapper):
    """A stderr that discards text which nobody can read, so that a run continues and saves.

    The reader may have exited (`| head`, or Ctrl-C also ended `tee`), or the terminal may be closed.
    """

    def __init__(self, replaced: io.TextIOWrapper) -> None:
        super().__init__(replaced.buffer, replaced.encoding, replaced.errors, line_buffering=True)
        self._replaced = replaced  # without a reference, it would close the buffer

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            silence_broken_pipe(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            silence_broken_pipe(self)


def print_result(text: str) -> None:
    """Print the last line to stdout. Do nothing if its reader has exited, because the exit code still matters."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence_broken_pipe(sys.stdout)


def flush() -> None:
    """Flush stdout and stderr before the interpreter exits. Discard the output if the reader has exited."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                with contextlib.suppress(ValueError):  # the stream is closed
                    stream.flush()
            except BrokenPipeError:
                silence_broken_pipe(stream)


@contextlib.contextmanager
def root_handler(handler: logging.Handler | None) -> Iterator[None]:
    """Add a handler to the root logger during the `with` block, if it has none.

    If the root logger had no handler, absl would add one and never remove it.
    """
    root = logging.getLogger()
    if root.handlers or handler is None:
        yield
        return
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
