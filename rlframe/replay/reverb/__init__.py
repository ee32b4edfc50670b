"""Replay behind a Reverb server."""

from __future__ import annotations

from rlframe.replay.reverb.buffer import ReverbReplayBuffer

__all__ = ["ReverbReplayBuffer"]
