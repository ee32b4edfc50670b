"""The `rlframe` command."""

from rlframe.cli.main import main

__all__ = ["main"]
