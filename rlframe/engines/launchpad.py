"""The engine of real processes on this machine: a Launchpad program, run by `rlframe.launch`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from rlframe import extras, handles
from rlframe.engines.base import Engine, EngineOptions, Watch
from rlframe.engines.launching.launcher import launch
from rlframe.engines.launching.placement import policies
from rlframe.engines.launching.ports import pick_free_port
from rlframe.engines.logs import NodeLogs
from rlframe.interprocess.progress import STARTING


class LaunchpadEngine(Engine):
    """Builds `program`, a `launchpad.Program`, to which more nodes may be added before `run`.

    Args:
        options: see `EngineOptions`.
    """

    options = ("max_restarts", "hang_timeout", "grace_seconds", "accelerators")
    requires = ("launchpad",)
    operator = "local"

    def __init__(self, options: EngineOptions) -> None:
        with extras.needed("--engine launchpad", "launchpad"):
            import launchpad as lp

        self.program = lp.Program("rlframe")
        self._asked = options
        self._logs = NodeLogs(options.logs)
        self._ports: dict[str, int] = {}  # by group, of its first node, where that is known
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

    @property
    def groups(self) -> dict[str, int]:
        """See `Engine`."""
        return {label: len(nodes) for label, nodes in self.program.groups.items()}

    def own(self, resource: Any) -> Any:
        """See `Engine`."""
        self._resources.callback(resource.close)
        return resource

    def address_of(self, group: str) -> str:
        """See `Engine`: "host:port"."""
        return f"localhost:{self._ports.setdefault(group, pick_free_port())}"

    def handle_of(self, group: str) -> handles.Remote:
        """See `Engine`."""
        return handles.Remote([self.address_of(group)], group)

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine`; as `rlframe.launch`."""
        with self._resources:
            return launch(
                self.program,
                policies(self.groups, self._asked),
                self._asked.output,
                ports=self._ports,
                logs=self._logs,
                hang_timeout=self._asked.hang_timeout,
                watch=watch,
                grace=self._asked.grace_seconds,
            )


def _start(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with STARTING:
        return constructor(*args, **kwargs)
