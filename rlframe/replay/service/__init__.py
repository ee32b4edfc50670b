"""A replay in separate nodes. Clients call it through the engine's transport, from any number of machines.

    service = engine.add("replay", ReplayService, agent, directory)    # server.py: holds a `ReplayBuffer`
    replay = ServiceReplayBuffer(agent, [service])                     # client.py, in actors and in the learner
    replay.add(env_ids, step)                       # in an actor
      StepSender.put                                # copies the step into a `SendBuffer`, and returns
      StepSender's thread -> ReplayService.add      # sends the collected steps as a `StepStack`: each observation once
    batch = replay.sample()                         # in the learner
      ReplayService.sample                          # draws a batch from one service, chosen in proportion to its weight

Steps and draws are numbered, because a call may arrive twice. A restarted service restores its newest checkpoint.
"""

from __future__ import annotations

from rlframe.replay.service.client import ServiceReplayBuffer
from rlframe.replay.service.server import ReplayService

__all__ = ["ReplayService", "ServiceReplayBuffer"]
