"""Checks that you can run on parts of your own."""

from __future__ import annotations

from rlframe.testing.replay import check_replay

__all__ = ["check_replay"]
