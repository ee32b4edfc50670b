"""Run commands whose output goes to a pipe without a reader."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


def run_with_closed_pipe(command: Sequence[str], errors_too: bool = False) -> tuple[int, str]:
    """Run a command. Its stdout is a pipe with a closed read end. Return the exit code and the text on stderr."""
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
