"""Benchmarks of rlframe and its peers, measured in the same run. Not part of the installed package."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] = ()) -> int:
    """Run `rlframe bench [NAME...]`; see `benchmarks.runner.main`."""
    from benchmarks.runner import main as run

    return run(arguments)
