"""`Transport`: how calls reach objects in other processes. There is one file for each transport.

A call of a learner from an actor, with Unix sockets (`sockets.py`):

    learner_server = SocketTransport().serve({"get_params": learner.get_params}, path)   # in the learner's process
    learner = Remote([path], "the learner", transport=SocketTransport())    # in the actor's process: rlframe/handles.py
    learner.get_params(3)
      SocketClient.call                     # sends the call, and waits; Remote calls again if nobody answered
      messages.pack                         # messages.py: a pickle, and large arrays as they are in memory
      SocketServer                          # unpacks the message, calls the method, and sends the answer

`base.py` has the protocols. `courier.py` is Courier, the default; `ray.py` calls nodes of a Ray cluster.
"""

from __future__ import annotations

from rlframe.transport import courier
from rlframe.transport.base import CALL_TIMEOUT, Client, Future, MappedFuture, Server, Transport

__all__ = ["CALL_TIMEOUT", "DEFAULT", "Client", "Future", "MappedFuture", "Server", "Transport"]

# For nodes of Launchpad programs, and for addresses that users give.
DEFAULT: Transport = courier.CourierTransport()
