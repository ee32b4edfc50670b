"""The engine of real processes on this machine: a Launchpad program, run by `rlframe.launch`."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

from rlframe import extras, handles
from rlframe.interprocess.heartbeat import TIMEOUT
from rlframe.interprocess.progress import STARTING
from rlframe.programs.door import OPEN_GROUPS
from rlframe.programs.engines import SAVING_GROUPS
from rlframe.programs.launching.launcher import ON_CPU, GroupPolicy, launch
from rlframe.programs.launching.ports import KnownAddress, check_free, pick_free
from rlframe.programs.launching.supervisor import GRACE, Watch
from rlframe.programs.logs import NodeLogs


class LaunchpadEngine:
    """Builds `program`, a `launchpad.Program`, to which more nodes may be added before `run`.

    Args:
        max_restarts: how often each node may die and be started again.
        decides: the group that ends the program when its nodes have ended.
        listen: the port of the first of the nodes that other machines may call, whose ports follow each other; None:
            ports are picked.
        logs: the directory in which the nodes' lines are kept; None: nowhere.
        hang_timeout, grace: see `rlframe.launch`.

    Raises:
        UsageError: one of these ports is in use.
    """

    def __init__(
        self,
        max_restarts: int,
        *,
        decides: str = "monitor",
        listen: int | None = None,
        logs: pathlib.Path | None = None,
        hang_timeout: float = TIMEOUT,
        grace: float = GRACE,
    ) -> None:
        with extras.needed("--engine launchpad", "launchpad"):
            import launchpad as lp

        self.program = lp.Program("rlframe")
        self._logs = NodeLogs(logs)
        self._max_restarts, self._decides = max_restarts, decides
        self._hang_timeout, self._grace = hang_timeout, grace
        self._ports = {} if listen is None else {label: listen + i for i, label in enumerate(OPEN_GROUPS)}
        check_free(self._ports)
        self._resources: list[Any] = []

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `rlframe.programs.topologies.Engine`."""
        import launchpad as lp

        with self.program.group(group):
            return self.program.add_node(lp.CourierNode(functools.partial(_start, constructor), *args, **kwargs))

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """See `rlframe.programs.topologies.Engine`."""
        with extras.needed("--replay reverb", "reverb"):
            from rlframe.programs.launching.reverb_node import CheckpointedReverbNode

        with self.program.group(group):
            return self.program.add_node(CheckpointedReverbNode(tables, path, at_end=self._grace / 2.0))

    def address_of(self, group: str) -> str:
        """The "host:port" at which the one node of a group will be called, for who is no node of this program."""
        port = self._ports.setdefault(group, pick_free())
        return f"localhost:{port}"

    def handle_of(self, group: str) -> handles.Remote:
        """A handle to the one node of a group, for who is no node of this program."""
        return handles.Remote([self.address_of(group)], group)

    def reverb_at(self, address: str) -> Any:
        """What stands for the Reverb server at "host:port", which is no node of this program."""
        import launchpad as lp
        from launchpad.nodes.reverb.node import ReverbHandle

        there = lp.Address()
        there.bind(KnownAddress(address))
        return ReverbHandle(there)

    def own(self, resource: Any) -> Any:
        """See `rlframe.programs.topologies.Engine`."""
        self._resources.append(resource)
        return resource

    def run(self, watch: Watch | None = None) -> int | None:
        """As `rlframe.launch`, whose `watch` this is."""
        try:
            policies = {label: self._policy(label) for label in self.program.groups}
            return launch(
                self.program,
                policies,
                ports=self._ports,
                logs=self._logs,
                hang_timeout=self._hang_timeout,
                watch=watch,
                grace=self._grace,
            )
        finally:
            for resource in self._resources:
                resource.close()

    def _policy(self, label: str) -> GroupPolicy:
        # The accelerators are the learner's, and the cores that others leave: more threads than cores slow each other.
        env = {"NPROC": str(self._cores_left())} if label == "learner" else ON_CPU
        max_restarts = 0 if label == "guest" else self._max_restarts  # it has its own deadline
        decides, saves = label == self._decides, label in SAVING_GROUPS
        return GroupPolicy(max_restarts=max_restarts, decides=decides, saves=saves, env=env)

    def _cores_left(self) -> int:
        busy = sum(
            len(nodes) for label, nodes in self.program.groups.items() if label not in ("learner", self._decides)
        )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores - busy)


def _start(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with STARTING:
        return constructor(*args, **kwargs)
