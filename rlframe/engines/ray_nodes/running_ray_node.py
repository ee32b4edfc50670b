"""A node that runs beside its Ray actor, as a `Supervisor` sees it."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import extras
from rlframe.engines.group_rules import GroupRules
from rlframe.engines.ray_nodes.host import CONCURRENCY, HostedNode, NodeHost, Seen
from rlframe.engines.supervision.nodes import OnExit, RunningNode, TakeLine
from rlframe.interprocess.heartbeat import HeartbeatMonitor

with extras.needed("--engine ray", "ray"):
    import ray

_KILLED_WITHIN = 5.0  # seconds within which the actor of a killed node must confirm its end


@dataclasses.dataclass(frozen=True)
class RayNode:
    """A node of a program on Ray. See `StartableNode`.

    Attributes:
        hosted: what its actor runs.
        options: of its actor.
        hosts: the address and the actor of each node of the program, in the order of their start.
        others: the actors as the launcher's own relay has them: by address, the newest ones.
        end_program: is called when a node asks for the end.
    """

    hosted: HostedNode
    options: dict[str, Any]
    hosts: list[tuple[str, Any]]
    others: dict[str, Any]
    end_program: Callable[[], None]

    @property
    def name(self) -> str:
        """See `StartableNode`."""
        return self.hosted.name

    @property
    def rules(self) -> GroupRules:
        """See `StartableNode`."""
        return self.hosted.rules

    def start(self, heartbeat: HeartbeatMonitor | None, on_exit: OnExit, take_line: TakeLine) -> RunningRayNode:
        """See `StartableNode`."""
        return RunningRayNode(self, heartbeat, on_exit, take_line)


class RunningRayNode(RunningNode):
    """An actor, and the thread that watches it."""

    def __init__(self, node: RayNode, heartbeat: HeartbeatMonitor | None, on_exit: OnExit, take_line: TakeLine) -> None:
        super().__init__(node.name, heartbeat, take_line)
        self._node, self._lost, self._killed_at = node, "", float("inf")
        make: Any = ray.remote(concurrency_groups=CONCURRENCY)(NodeHost)  # type: ignore[call-overload]
        self._host = make.options(max_restarts=0, **node.options).remote(node.hosted)
        node.hosts.append((node.hosted.address, self._host))
        node.others[node.hosted.address] = self._host
        self._watcher = threading.Thread(target=self._watch, args=(on_exit,), daemon=True)
        self._watcher.start()

    def send(self, number: int) -> None:
        """See `RunningNode`."""
        if number == signal.SIGKILL:
            self._killed_at = min(self._killed_at, time.monotonic())
        self._host.send.remote(number)

    def wait(self) -> None:
        """See `RunningNode`."""
        self._watcher.join()

    def exit_reason(self) -> str:
        """See `RunningNode`."""
        return self._lost if self._lost and not self.hang_reason else super().exit_reason()

    def _watch(self, on_exit: OnExit) -> None:
        count = known = 0
        while self.code is None:
            new = self._node.hosts[known:]
            known += len(new)
            try:
                seen = self._answer(self._host.watch.remote(count, dict(new)))
            except ray.exceptions.RayError as error:
                words = str(error).strip().splitlines()
                self._lost = f"was lost with its Ray actor ({words[-1] if words else type(error).__name__})"
                seen = None
            if seen is None:
                self.code = -signal.SIGKILL
            else:
                count = seen.total
                self._take_in(seen)
        ray.kill(self._host, no_restart=True)
        on_exit(self)

    def _answer(self, reference: Any) -> Seen | None:
        """Wait for an answer of the actor. Return None if the node was killed, and the actor no longer answers."""
        while not ray.wait([reference], timeout=0.5)[0]:
            if time.monotonic() > self._killed_at + _KILLED_WITHIN:
                return None
        return ray.get(reference)

    def _take_in(self, seen: Seen) -> None:
        self.pid, self.host = seen.pid, seen.host
        self.serves_at = self._node.hosted.address if seen.serves else None
        for line in seen.lines:
            self._take(line)
        if self.heartbeat is not None and seen.page is not None:
            self.heartbeat.page = seen.page
        if seen.ends:
            self._node.end_program()
        self.code = seen.code
