"""A replay in separate nodes. Clients call it through the engine's transport, from any number of machines.

    service = engine.add("replay", ReplayService, agent, directory)    # server.py: has a `ReplayBuffer`
    replay = ServiceReplayBuffer(agent, [service])                     # client.py, in actors and in the learner
    replay.add(env_ids, step)                       # in an actor
      StepSender.put                                # copies the step into a `SendBuffer`, and returns
      StepSender's thread -> ReplayService.add      # sends collected steps as a `StepStack`, each observation only once
    batch = replay.sample()                         # in the learner
      ReplayService.sample                          # draws a batch; a service is chosen in proportion to its weight

Steps and draws are numbered, because a service can receive a call twice. A restarted service restores its newest
checkpoint.
"""

from __future__ import annotations

from rlframe.replay.service.client import ServiceReplayBuffer
from rlframe.replay.service.server import ReplayService

__all__ = ["ReplayService", "ServiceReplayBuffer"]
