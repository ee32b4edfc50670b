"""A replay as nodes of its own, called by whatever transport the engine has: any Python, any number of machines.

    service = engine.add("replay", ReplayService, agent, directory)    # server.py: holds a `ReplayBuffer`
    replay = ServiceReplayBuffer(agent, [service])                     # client.py, in actors and in the learner
    replay.add(env_ids, step)                   # in an actor
      StepSender.put                                # copies the step into a `SendBuffer`, and returns
      StepSender's thread -> ReplayService.add      # sends what was gathered as a `StepStack`: each observation once
    batch = replay.sample()                     # in the learner
      ReplayService.sample                      # draws; with several services, from each by its share of the weight

A call may arrive twice: steps and draws have numbers. A service that died restores its newest checkpoint.
"""

from __future__ import annotations

from rlframe.replay.service.client import ServiceReplayBuffer
from rlframe.replay.service.server import ReplayService

__all__ = ["ReplayService", "ServiceReplayBuffer"]
