"""`InlineEngine` runs the single node of the topology `single_process` in the thread that calls `run`."""

from __future__ import annotations

import os

from rlframe.engines.base import NodeStatus, Watch
from rlframe.engines.threads import ThreadsEngine


class InlineEngine(ThreadsEngine):
    """Constructs its single node in `add`, and runs it in the caller's thread. `run` raises the node's exceptions."""

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine`. Return the result of the node's `run()`: None, or the number of the signal that ended it."""
        ((group, node),) = self._nodes
        try:
            if watch is not None:
                watch(False, [NodeStatus(group, pid=os.getpid())])
            return node.run()
        finally:
            self._close()
