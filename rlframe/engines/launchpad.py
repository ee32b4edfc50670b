"""The engine of real processes on this machine: a Launchpad program, run by `rlframe.launch`."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from rlframe import extras, handles
from rlframe.engines.base import SAVING_GROUPS, Engine, EngineOptions, Watch, deciding_group
from rlframe.engines.launching.launcher import ON_CPU, launch
from rlframe.engines.launching.supervisor import GroupPolicy
from rlframe.engines.logs import NodeLogs
from rlframe.errors import UsageError
from rlframe.interprocess.progress import STARTING


class LaunchpadEngine(Engine):
    """Builds `program`, a `launchpad.Program`, to which more nodes may be added before `run`.

    Args:
        options: see `EngineOptions`.

    Raises:
        UsageError: one of the ports that are asked for is in use.
    """

    options = ("max_restarts", "hang_timeout", "grace_seconds", "ports")
    requires = ("launchpad",)
    operator = "local"

    def __init__(self, options: EngineOptions) -> None:
        with extras.needed("--engine launchpad", "launchpad"):
            import launchpad as lp

        self.program = lp.Program("rlframe")
        self._asked = options
        self._logs = NodeLogs(options.logs)
        self._ports = dict(options.ports)
        check_free(self._ports)
        self._resources = contextlib.ExitStack()

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Engine`."""
        import launchpad as lp

        with self.program.group(group):
            return self.program.add_node(lp.CourierNode(functools.partial(_start, constructor), *args, **kwargs))

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """See `Engine`."""
        with extras.needed("--replay reverb", "reverb"):
            from rlframe.engines.launching.reverb_node import CheckpointedReverbNode

        with self.program.group(group):
            node = CheckpointedReverbNode(tables, path, at_end=self._asked.grace_seconds / 2.0)
            return self.program.add_node(node)

    def own(self, resource: Any) -> Any:
        """See `Engine`."""
        self._resources.callback(resource.close)
        return resource

    def address_of(self, group: str) -> str:
        """See `Engine`: "host:port"."""
        return f"localhost:{self._ports.setdefault(group, _pick_free())}"

    def handle_of(self, group: str) -> handles.Remote:
        """See `Engine`."""
        return handles.Remote([self.address_of(group)], group)

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine`; as `rlframe.launch`."""
        with self._resources:
            policies = {label: self._policy(label) for label in self.program.groups}
            return launch(
                self.program,
                policies,
                ports=self._ports,
                logs=self._logs,
                hang_timeout=self._asked.hang_timeout,
                watch=watch,
                grace=self._asked.grace_seconds,
            )

    def _policy(self, label: str) -> GroupPolicy:
        # The accelerators are the learner's, and the cores that others leave: more threads than cores slow each other.
        env = {"NPROC": str(self._cores_left())} if label == "learner" else ON_CPU
        max_restarts = 0 if label == "guest" else self._asked.max_restarts  # it has its own deadline
        decides, saves = label == deciding_group(self.program.groups), label in SAVING_GROUPS
        return GroupPolicy(max_restarts=max_restarts, decides=decides, saves=saves, env=env)

    def _cores_left(self) -> int:
        idle = ("learner", deciding_group(self.program.groups))
        busy = sum(len(nodes) for label, nodes in self.program.groups.items() if label not in idle)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores - busy)


def check_free(ports: Mapping[str, int]) -> None:
    """Raises UsageError where a port, by what listens at it, cannot be listened at on all interfaces.

    gRPC would not notice: two of its servers may share a port.
    """
    for name, port in ports.items():
        if not 0 < port < 2**16:
            raise UsageError(f"--listen: the {name}'s port would be {port}; ports are 1 to 65535.")
        for family in (socket.AF_INET, socket.AF_INET6) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
            try:
                socket.create_server(("", port), family=family).close()
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise UsageError(
                    f"--listen: the {name} cannot listen at port {port}: {reason}. Choose another: of --listen PORT, "
                    f"{len(ports)} ports from PORT on must be free."
                ) from error


def _start(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with STARTING:
        return constructor(*args, **kwargs)


def _pick_free() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
