"""A replay as nodes of its own, called by whatever transport the engine has: any Python, any number of machines."""

from __future__ import annotations

from rlframe.replay.service.client import ServiceReplayBuffer
from rlframe.replay.service.server import ReplayService

__all__ = ["ReplayService", "ServiceReplayBuffer"]
