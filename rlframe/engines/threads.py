"""Engines that run in this process.

`ThreadsEngine` runs each node in a thread. This is useful for debugging and tests. `InlineEngine` runs the single node
of the topology `single_process` in the thread that calls `run`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from rlframe import extras
from rlframe.engines.base import EngineOptions, NodeStatus, ResourceEngine, Watch
from rlframe.engines.group_rules import ending_group, traits_of
from rlframe.engines.stopping import StopSignal
from rlframe.errors import ProgramError
from rlframe.interprocess.waiting import Inbox

_log = logging.getLogger(__name__)

_JOIN_TIMEOUT = 30.0  # maximum seconds in which each node must end


class ThreadsEngine(ResourceEngine):
    """Constructs each node's object in `add`, and runs it in a thread of this process."""

    in_process = True

    def __init__(self, options: EngineOptions | None = None) -> None:
        super().__init__(options or EngineOptions())
        self._nodes: list[tuple[str, Any]] = []
        self._addresses: dict[str, str] = {}  # group -> address of the group's Reverb server
        self._ended: Inbox[tuple[str, BaseException | None]] = Inbox()

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Engine`."""
        try:
            node = constructor(*args, **kwargs)
        except BaseException:
            self._close()
            raise
        self._nodes.append((group, node))
        return node

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """See `RunsReverb`. Do not use `path`: the server saves no checkpoints."""
        with extras.explain_import_error("--replay reverb", "reverb"):
            import reverb

        server = reverb.Server(tables(), port=None)
        self._resources.callback(server.stop)
        self._addresses[group] = f"localhost:{server.port}"
        return reverb.Client(self._addresses[group])

    @property
    def groups(self) -> dict[str, int]:
        """See `Engine`."""
        return dict(collections.Counter(group for group, _ in self._nodes))

    def address_of(self, group: str) -> str:
        """See `Engine`. Only Reverb servers have an address."""
        return self._addresses[group]

    def handle_of(self, group: str) -> Any:
        """See `Engine`. Return the node's object."""
        return next(node for group_of_node, node in self._nodes if group_of_node == group)

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine`. Call `watch` once, with this process as the only node."""
        if watch is not None:
            watch(False, [NodeStatus("launcher", pid=os.getpid())])
        # Use daemon threads, because threads that still work after a second Ctrl-C must not delay the process's end.
        threads = [
            threading.Thread(target=self._run, args=node, name=f"rlframe {node[0]}", daemon=True)
            for node in self._nodes
        ]
        end: tuple[str, BaseException | None] | None = None
        join_timeout = _JOIN_TIMEOUT
        with StopSignal(self._options.quiet) as stop:
            try:
                for thread in threads:
                    thread.start()
                end = self._wait_for_end(stop)
            except KeyboardInterrupt:  # a second Ctrl-C raises this
                join_timeout = 0.0
            finally:
                unsaved = self._end_nodes(threads, join_timeout)
        if end is not None and end[1] is not None:
            raise _node_error(end[0], "failed", end[1])
        if end is None and unsaved is not None:
            raise unsaved
        return stop.number

    def _wait_for_end(self, stop: StopSignal) -> tuple[str, BaseException | None] | None:
        """Wait for the node that ends the program: the node of `ending_group`, the last node, or a node that fails.

        Return its (group, error), or None if a signal came first.
        """
        ending, num_running = ending_group(self.groups), len(self._nodes)
        while stop.number is None:
            with contextlib.suppress(queue.Empty):
                group, error = self._ended.get(0.1)
                num_running -= 1
                if error is not None or group == ending or not num_running:
                    return group, error
        return None

    def _end_nodes(self, threads: list[threading.Thread], join_timeout: float) -> ProgramError | None:
        """End and close all nodes. If a node that must save has failed, return the error; otherwise return None.

        Args:
            threads: the threads of the nodes.
            join_timeout: maximum seconds in which each node must end.
        """
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C raises this
            for _, node in self._nodes:
                node.stop()
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join(join_timeout)
        for (group, _), thread in zip(self._nodes, threads):
            if thread.is_alive():
                self._ended.put((group, TimeoutError("the node did not end in time")))
        unsaved: ProgramError | None = None
        with contextlib.suppress(queue.Empty):
            while True:
                group, error = self._ended.get(0.0)
                if error is not None:
                    failed = _node_error(group, "failed while the program ended", error)
                    _log.warning("%s", failed)
                    unsaved = failed if traits_of(group).saves else unsaved
        with contextlib.suppress(KeyboardInterrupt):
            self._close()
        return unsaved

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
        self._resources.close()


def _node_error(group: str, outcome: str, error: BaseException) -> ProgramError:
    failure = ProgramError(f"The node {group} {outcome}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


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
