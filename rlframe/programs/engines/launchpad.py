"""The engine of real processes on this machine: a Launchpad program, run by `rlframe.launch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframe.programs.launching.launcher import ON_CPU, GroupPolicy, launch


class LaunchpadEngine:
    """Builds `program`, a `launchpad.Program`, to which more nodes may be added before `run`.

    Args:
        max_restarts: how often each node may die and be started again.
    """

    def __init__(self, max_restarts: int) -> None:
        import launchpad as lp

        self.program = lp.Program("rlframe")
        self._max_restarts = max_restarts
        self._resources: list[Any] = []

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `rlframe.programs.topologies.Engine`."""
        import launchpad as lp

        with self.program.group(group):
            return self.program.add_node(lp.CourierNode(constructor, *args, **kwargs))

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """See `rlframe.programs.topologies.Engine`."""
        from rlframe.programs.launching.reverb_node import CheckpointedReverbNode

        with self.program.group(group):
            return self.program.add_node(CheckpointedReverbNode(tables, path))

    def own(self, resource: Any) -> Any:
        """See `rlframe.programs.topologies.Engine`."""
        self._resources.append(resource)
        return resource

    def run(self) -> int | None:
        """As `rlframe.launch`."""
        try:
            return launch(self.program, {label: self._policy(label) for label in self.program.groups})
        finally:
            for resource in self._resources:
                resource.close()

    def _policy(self, label: str) -> GroupPolicy:
        # The accelerators are the learner's.
        env = {} if label == "learner" else ON_CPU
        return GroupPolicy(max_restarts=self._max_restarts, decides=label == "monitor", env=env)
