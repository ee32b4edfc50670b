"""A `Transport` calls objects in other processes. There is one file for each transport.

A call from an actor to a learner, over Unix sockets (`sockets.py`):

    learner_server = SocketTransport().serve({"get_params": learner.get_params}, path)   # in the learner's process
    learner = Remote([path], "the learner", transport=SocketTransport())    # in the actor's process: rlframe/handles.py
    learner.get_params(3)
      SocketClient.call                     # send the call and wait; Remote retries if there is no answer
      pack                                  # base.py: a pickle, followed by large arrays without a copy
      SocketServer                          # unpack the message, call the method, and send the answer

`base.py` has the protocols. `courier.py` uses Courier, the default. `ray.py` calls nodes on a Ray cluster.
"""

from __future__ import annotations

from rlframe.transport import courier
from rlframe.transport.base import CALL_TIMEOUT, Client, Future, MappedFuture, Server, Transport

__all__ = ["CALL_TIMEOUT", "DEFAULT", "Client", "Future", "MappedFuture", "Server", "Transport"]

# The transport for nodes of Launchpad programs and for addresses that users pass as text.
DEFAULT: Transport = courier.CourierTransport()
