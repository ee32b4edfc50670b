"""Standard streams, which may be closed (`2>&-`) or have lost their reader (`| head`), and the root logger."""

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
    """Make the standard streams take any text: open the null device for those that are closed, and escape.

    Without the null device, the next file or socket would get their number, and other code would print into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, stream := open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8


def silence_broken_pipe(stream: Any) -> bool:
    """Return whether a stream is a pipe that nobody reads any more. Then discard what is still to be written."""
    if stream is None:  # Python was started with `>&-`
        return False
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # no file, or closed
        return False
    poll = select.poll()
    poll.register(number, 0)
    lost = any(events & select.POLLERR for _, events in poll.poll(0))
    if lost:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
    return lost


def flush() -> None:
    """Write what is left, or discard it if the reader is gone, so that the interpreter can exit in good order."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                with contextlib.suppress(ValueError):  # closed
                    stream.flush()
            except BrokenPipeError:
                silence_broken_pipe(stream)


@contextlib.contextmanager
def root_handler(handler: logging.Handler | None) -> Iterator[None]:
    """Give the root logger a handler for the time of a `with`, if it has none. Otherwise absl gives it one for good."""
    root = logging.getLogger()
    if root.handlers or handler is None:
        yield
        return
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
