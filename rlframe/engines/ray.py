"""The engine `ray`: a Ray actor starts the process of each node, on a Ray cluster or on this machine.

Ray selects the machine of each actor. The launcher restarts nodes, enforces deadlines, writes logs and ends the
program, as under the engine `local`. If the launcher dies, all nodes end. A new run can resume from the checkpoints.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlframe import extras
from rlframe.engines.base import EngineOptions, MakeWorker, Watch
from rlframe.engines.group_rules import GroupRules, rules_by_group, traits_of
from rlframe.engines.served_engine import ServedEngine, pickle_worker
from rlframe.engines.supervision.nodes import StartableNode, pickle_node
from rlframe.transport.ray import RayTransport


class RayEngine(ServedEngine):
    """Runs each node in a process that a Ray actor starts."""

    options = ("max_restarts", "hang_timeout", "grace_seconds", "accelerators", "ray_address")
    requires = ("ray",)
    operator = "ray"
    transport = RayTransport()

    def __init__(self, options: EngineOptions) -> None:
        with extras.explain_import_error("--engine ray", "ray"):
            from rlframe.engines.ray_nodes.cluster import RayCluster
        super().__init__(options)
        self._owned: list[Any] = []
        self._cluster = RayCluster(options.ray_address, None if options.logs is None else options.logs.parent)
        self._resources.callback(self._cluster.close)

    def worker_nodes(
        self, makers: Mapping[str, MakeWorker], most: Mapping[str, int]
    ) -> dict[str, Callable[[int, int], StartableNode]]:
        """See `StartsWorkers`."""
        are_bound = {group: refers_to(make, self._owned) for group, make in makers.items()}
        rules_of, shares = self._rules(most), self._shares(most, any(are_bound.values()))

        def node(group: str, make: bytes, index: int, incarnation: int) -> StartableNode:
            name, address = f"{group}/{index}", f"{group}/{index}/{incarnation}"
            pickled = pickle_worker(self.transport, address, make, name, index, incarnation)
            rules, shares_memory = rules_of[group], are_bound[group]
            return self._cluster.place(name, address, pickled, rules, *shares[group], shares_memory, lambda: None)

        return {group: functools.partial(node, group, pickle_node(group, make)) for group, make in makers.items()}

    def own(self, resource: Any) -> Any:
        """See `Engine`. Nodes that refer to the resource run on this process's Ray node, because they share memory."""
        self._owned.append(resource)
        return super().own(resource)

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine` and `launchpad.launch`."""
        with self._resources:
            supervisor = self._supervisor([], watch)
            supervisor.add(*self._program_nodes(supervisor.stop))
            return supervisor.run()

    def _program_nodes(self, end_program: Callable[[], None]) -> Iterator[StartableNode]:
        """Yield the nodes. Each node reserves its share of the cluster's CPUs and accelerators."""
        groups = self.groups
        pickled = {
            node.address: (node.pickled(), refers_to(node, self._owned))
            for nodes in self._nodes.values()
            for node in nodes
        }
        rules_of, shares = self._rules(groups), self._shares(groups, any(bound for _, bound in pickled.values()))
        for group, nodes in self._nodes.items():
            for node in nodes:
                content, shares_memory = pickled[node.address]
                name = node.address if len(nodes) > 1 else group
                yield self._cluster.place(
                    name, node.address, content, rules_of[group], *shares[group], shares_memory, end_program
                )

    def _rules(self, groups: Mapping[str, int]) -> dict[str, GroupRules]:
        options, one_machine = self._options, self._cluster.num_machines == 1
        return rules_by_group(groups, options.max_restarts, options.accelerators, one_machine)

    def _shares(self, groups: Mapping[str, int], shares_memory: bool) -> dict[str, tuple[float, float]]:
        """Return a dict of group -> (CPUs, accelerators) that each node of the group reserves."""
        busy = [group for group in groups if traits_of(group).is_busy]
        served = [group for group in groups if group in self._options.accelerators]
        cpus = self._cluster.cpus(sum(groups[group] for group in busy), shares_memory)
        gpus = self._cluster.gpus(sum(groups[group] for group in served))
        return {group: (cpus * (group in busy), gpus * (group in served)) for group in groups}

    def _address(self, group: str, index: int) -> str:
        return f"{group}/{index}"


def refers_to(target: Any, resources: list[Any]) -> bool:
    """Return True if a pickle of `target` would contain one of the resources."""
    import cloudpickle

    wanted, found = {id(each) for each in resources}, []

    class Finder(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> None:
            if id(obj) in wanted:
                found.append(obj)

    Finder(io.BytesIO(), 5).dump(target)
    return bool(found)
