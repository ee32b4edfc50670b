"""Checks to run on your own environments, agents and replay stores."""

from __future__ import annotations

from rlframe.testing.replay import check_replay

__all__ = ["check_replay"]
