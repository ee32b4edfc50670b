"""`rlframe bench`: the benchmarks of the checkout that rlframe is installed from."""

from __future__ import annotations

import importlib
import pathlib
import sys

import rlframe
from rlframe.errors import UsageError


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    root = pathlib.Path(rlframe.__file__).parent.parent
    if not (root / "benchmarks" / "runner.py").is_file():
        raise UsageError("`rlframe bench` needs a checkout of rlframe: the benchmarks are no part of the package.")
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.runner").main(arguments) or 0
