"""The engine of one process: every node is a thread. For debugging, and for tests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from rlframe.errors import ProgramError
from rlframe.programs.stopping import StopSignal

_JOIN_WITHIN = 30.0  # seconds that the nodes have to end


class ThreadsEngine:
    """Constructs the objects at once, and runs each in a thread of this process."""

    def __init__(self) -> None:
        self._nodes: list[tuple[str, Any]] = []
        self._resources: list[Any] = []
        self._ended: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `rlframe.programs.topologies.Engine`."""
        try:
            node = constructor(*args, **kwargs)
        except BaseException:
            self._close()
            raise
        self._nodes.append((group, node))
        return node

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """See `rlframe.programs.topologies.Engine`. Nothing is kept in `path`: the server ends with this process."""
        import reverb

        server = self.own(_Server(reverb.Server(tables(), port=None)))
        return reverb.Client(f"localhost:{server.port}")

    def own(self, resource: Any) -> Any:
        """See `rlframe.programs.topologies.Engine`."""
        self._resources.append(resource)
        return resource

    def run(self) -> int | None:
        """Runs until the monitor's thread has ended, or one has failed.

        Returns:
            The number of the signal that ended it, or None.

        Raises:
            ProgramError: a node raised.
        """
        failure: ProgramError | None = None
        threads = [threading.Thread(target=self._run, args=node, name=f"rlframe {node[0]}") for node in self._nodes]
        with StopSignal() as stop:
            for thread in threads:
                thread.start()
            try:
                while stop.number is None:
                    try:
                        group, error = self._ended.get(timeout=0.1)
                    except queue.Empty:
                        continue
                    if error is not None:
                        failure = ProgramError(f"The node {group} failed: {type(error).__name__}: {error}")
                        failure.__cause__ = error
                    if error is not None or group == "monitor":
                        break
            finally:
                for _, node in self._nodes:
                    node.stop()
                for thread in threads:
                    thread.join(_JOIN_WITHIN)
                self._close()
        if failure is not None:
            raise failure
        return stop.number

    def _run(self, group: str, node: Any) -> None:
        error: BaseException | None = None
        try:
            node.run()
        except BaseException as raised:
            error = raised
        self._ended.put((group, error))

    def _close(self) -> None:
        for _, node in self._nodes:
            if hasattr(node, "close"):
                node.close()
        for resource in self._resources:
            resource.close()


class _Server:
    """A Reverb server as a resource."""

    def __init__(self, server: Any) -> None:
        self._server, self.port = server, server.port

    def close(self) -> None:
        self._server.stop()
