"""The engine of a topology of one node, `single_process`: it runs the node in the thread that calls `run`."""

from __future__ import annotations

import os

from rlframe.engines.base import NodeStatus, Watch
from rlframe.engines.threads import ThreadsEngine


class InlineEngine(ThreadsEngine):
    """Constructs its node at once, and runs it without another thread. An exception of the node is raised unchanged."""

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine`; the node's own `run()` says which signal ended it."""
        ((group, node),) = self._nodes
        try:
            if watch is not None:
                watch(False, [NodeStatus(group, pid=os.getpid())])
            return node.run()
        finally:
            self._close()
