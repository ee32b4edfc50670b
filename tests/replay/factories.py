"""The buffers that the conformance tests run on. Add a factory here to test another buffer."""

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
    """Return a buffer in this process."""
    del num_writers  # it supports any number
    return ReplayBuffer(agent, seed=seed)


def shared_memory(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """Return a shared-memory buffer that one process uses. `test_shared_memory.py` uses several processes."""
    return SharedMemReplayBuffer(agent, seed=seed, num_writers=num_writers)


def reverb(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """Return a buffer on its own Reverb server, in another process."""
    del num_writers, seed  # the server draws without a seed, for any number of writers
    tables = ReverbReplayBuffer.tables(agent, when_full="drop")  # "drop", because one thread writes and reads
    return _Served(agent, servers().start(tables))


def service(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """Return a replay service's buffer. `test_service.py` uses several threads."""
    del num_writers  # it supports any number
    # No waits, because one thread writes and reads.
    return ServiceReplayBuffer(agent, [ReplayService(agent, seed=seed, waits=False)])


@functools.cache
def servers() -> Servers:
    """Return the process for the servers of all tests."""
    needs("reverb")
    made = Servers()
    atexit.register(made.close)
    return made


class _Served(ReverbReplayBuffer):
    def close(self) -> None:
        super().close()
        servers().stop(self._connection.address)


FACTORIES = [local, shared_memory, service, reverb]
