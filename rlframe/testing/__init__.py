"""Checks for your own environments, agents and replay stores.

    check_replay(lambda agent, num_writers: MyStore(agent), kinds=["uniform"])

`check_replay` adds the same simulated steps (`StepStream` in streams.py) to your store and to a `ReferenceReplay`,
which is plain Python. Then it compares the items of the two replays.
"""

from __future__ import annotations

from rlframe.testing.replay import check_replay

__all__ = ["check_replay"]
