"""Functions that create the buffers for the conformance tests. To test another buffer, add its function here."""

from __future__ import annotations

import atexit
import functools
from typing import Any

from rlframe.replay import BaseReplayBuffer, ReplayBuffer, SharedMemReplayBuffer
from rlframe.replay.reverb import ReverbReplayBuffer
from rlframe.replay.service import ReplayService, ServiceReplayBuffer
from tests.extras import needs
from tests.replay.reverb_servers import Servers


def local(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """Return a buffer in the memory of this process."""
    del num_writers  # this buffer supports any number of writers
    return ReplayBuffer(agent, seed=seed)


def shared_memory(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """Return a shared-memory buffer. Here one process uses it; `test_shared_memory.py` uses several processes."""
    return SharedMemReplayBuffer(agent, seed=seed, num_writers=num_writers)


def reverb(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """Return a buffer with its own Reverb server in another process."""
    del num_writers, seed  # the server supports any number of writers, and has no seed
    tables = ReverbReplayBuffer.tables(agent, when_full="drop")  # writers must not wait: one thread writes and reads
    return _Served(agent, servers().start(tables))


def service(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """Return the client of a new replay service. Here one thread uses it; `test_service.py` uses several threads."""
    del num_writers  # this buffer supports any number of writers
    # Writers must not wait, because one thread writes and reads.
    return ServiceReplayBuffer(agent, [ReplayService(agent, seed=seed, waits=False)])


@functools.cache
def servers() -> Servers:
    """Return the process that runs the Reverb servers of all tests."""
    needs("reverb")
    made = Servers()
    atexit.register(made.close)
    return made


class _Served(ReverbReplayBuffer):
    def close(self) -> None:
        super().close()
        servers().stop(self._connection.address)


FACTORIES = [local, shared_memory, service, reverb]
