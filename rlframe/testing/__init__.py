"""Tests for your own environments, agents and replay stores.

    check_replay(lambda agent, num_writers: MyStore(agent), kinds=["uniform"])

`replay.py` adds scripted steps (`streams.py: StepStream`) to your store and to `ReferenceReplay`, a replay in plain
Python, and compares their items.
"""

from __future__ import annotations

from rlframe.testing.replay import check_replay

__all__ = ["check_replay"]
