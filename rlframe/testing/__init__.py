"""Tests for your own environments, agents and replay stores.

    check_replay(lambda agent, num_writers: MyStore(agent), kinds=["uniform"])

`replay.py` adds the same scripted steps (`streams.py: StepStream`) to your store and to a `ReferenceReplay`, which is
plain Python, and compares the items of both.
"""

from __future__ import annotations

from rlframe.testing.replay import check_replay

__all__ = ["check_replay"]
