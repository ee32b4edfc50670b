"""Processes that use a param store. Each number in the arrays of version N is N, so tests detect mixed versions."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0  # maximum seconds of each wait in a test


def params(version: int, size: int = 300_000) -> dict[str, Any]:
    """Return parameters with small leaves, which are packed together, and a large leaf.

    The copy of the large leaf takes long, so that the test can write during the copy.
    """
    fill = np.float32(version)
    return {
        "bias": np.full(7, version, np.int32),
        "layers": (np.full((3, 5), fill), np.full((), fill)),
        "table": np.full(size, version, np.int64),
    }


def numbers_in(tree: dict[str, Any]) -> set[int]:
    """Return the set of all numbers in the arrays of `tree`."""
    leaves = [tree["bias"], *tree["layers"], tree["table"]]
    return {int(x) for leaf in leaves for x in np.unique(leaf)}


class Process:
    """A new Python process. It runs a function of this module with pickled arguments, and prints JSON lines."""

    def __init__(self, function: Any, *args: Any) -> None:
        command = [sys.executable, "-m", "tests.params.processes"]
        self.popen = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.popen.stdin is not None
        self.popen.stdin.write(pickle.dumps((function.__name__, args)))
        self.popen.stdin.close()

    def read_line(self) -> Any:
        """Return the next line that the process prints."""
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self.popen.kill()
        self.popen.wait(DEADLINE)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


def print_line(thing: Any) -> None:
    print(json.dumps(thing), flush=True)


def write(store: Any, first: int, last: int) -> None:
    """Put the versions into the store as fast as possible."""
    print_line("begins")
    for version in range(first, last + 1):
        store.put("main", version, params(version), {"version": version})
    print_line(store.versions("main"))


if __name__ == "__main__":
    _name, _args = pickle.load(sys.stdin.buffer)
    globals()[_name](*_args)
