"""Standard output and standard error, whose reader may go away: `rlframe envs | head`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any


def has_lost_reader(stream: Any) -> bool:
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
                has_lost_reader(stream)
