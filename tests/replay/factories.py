"""The buffers that the conformance suite runs over. Add a factory, and it is held to the same promises."""

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
    """The buffer in this process."""
    del num_writers  # any number
    return ReplayBuffer(agent, seed=seed)


def shared_memory(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """The buffer between processes, used from one; other processes: `test_shared_memory.py`."""
    return SharedMemReplayBuffer(agent, seed=seed, num_writers=num_writers)


def reverb(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """A Reverb server of its own, in another process."""
    del num_writers, seed  # the server draws, without a seed, for any number of writers
    tables = ReverbReplayBuffer.tables(agent, when_full="drop")  # one thread writes and reads
    return _Served(agent, servers().start(tables))


def service(agent: Any, num_writers: int = 1, seed: int = 0) -> BaseReplayBuffer:
    """A replay service; other processes: `test_service.py`."""
    del num_writers  # any number
    return ServiceReplayBuffer(agent, [ReplayService(agent, seed=seed, waits=False)])  # one thread writes and reads


@functools.cache
def servers() -> Servers:
    """The process that all tests' servers run in."""
    needs("reverb")
    made = Servers()
    atexit.register(made.close)
    return made


class _Served(ReverbReplayBuffer):
    def close(self) -> None:
        super().close()
        servers().stop(self._connection.address)


FACTORIES = [local, shared_memory, service, reverb]
