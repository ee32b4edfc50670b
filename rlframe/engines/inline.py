"""The engine of one node, which runs where it is called from: no thread, no other process."""

from __future__ import annotations

import os

from rlframe.engines.base import Watch, node_status
from rlframe.engines.threads import ThreadsEngine


class InlineEngine(ThreadsEngine):
    """Runs its node in the thread that calls `run`. What the node raises is raised as it is."""

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine`; the node's own `run()` says which signal ended it."""
        ((group, node),) = self._nodes
        try:
            if watch is not None:
                watch(False, [node_status(group, 0, os.getpid())])
            return node.run()
        finally:
            self._close()
