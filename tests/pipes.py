"""Commands whose output pipe has no reader."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


def run_with_closed_pipe(command: Sequence[str], errors_too: bool = False) -> tuple[int, str]:
    """Run a command with a pipe as stdout whose read end is closed. Return the exit code and the text on stderr."""
    read, write = os.pipe()
    os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            command,
            stdout=write,
            stderr=write if errors_too else subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=buffered,
            text=True,
            timeout=120,
        )
    finally:
        os.close(write)
    return done.returncode, done.stderr or ""
