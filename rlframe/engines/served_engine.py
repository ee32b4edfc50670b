"""The base of the engines `local` and `ray`, whose nodes call each other over a `Transport`.

`ServedEngine.add` stores the constructor and the address of each node in a `ServedNode`. The node's process unpickles
the `ServedNode`. There, `node_main.run_served_node` calls the constructor, serves the object's public methods at
the address, and calls the object's `run()`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rlframe.engines.base import EngineOptions, ResourceEngine, Watch
from rlframe.engines.logs import NodeLogs
from rlframe.engines.supervision.nodes import StartableNode, pickle_node
from rlframe.engines.supervision.supervisor import ProgramSupervisor
from rlframe.handles import Remote
from rlframe.transport import Transport


@dataclasses.dataclass(frozen=True)
class ServedNode:
    """The constructor of a node's object, and the address at which its methods are served."""

    group: str
    transport: Transport
    address: str
    constructor: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def pickled(self) -> bytes:
        """Return the pickled node for `run_served_node`."""
        return pickle_node(self.group, self)


class ServedEngine(ResourceEngine):
    """Base class of the engines that store nodes as `ServedNode`s. The handle to a node is a `Remote`.

    Args:
        options: see `EngineOptions`.
    """

    transport: ClassVar[Transport]

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._nodes: dict[str, list[ServedNode]] = collections.defaultdict(list)  # by group

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Remote:
        """See `Engine`."""
        address = self._address(group, len(self._nodes[group]))
        self._nodes[group].append(ServedNode(group, self.transport, address, constructor, args, kwargs))
        return Remote([address], group, transport=self.transport)

    @property
    def groups(self) -> dict[str, int]:
        """See `Engine`."""
        return {group: len(nodes) for group, nodes in self._nodes.items()}

    def address_of(self, group: str) -> str:
        """See `Engine`."""
        return self._nodes[group][0].address

    def handle_of(self, group: str) -> Remote:
        """See `Engine`."""
        return Remote([self._nodes[group][0].address], group, transport=self.transport)

    def _address(self, group: str, index: int) -> str:
        """Return the address of a node."""
        raise NotImplementedError

    def _supervisor(self, nodes: Sequence[StartableNode], watch: Watch | None) -> ProgramSupervisor:
        options = self._options
        return ProgramSupervisor(
            nodes,
            NodeLogs(options.logs, options.output),
            hang_timeout=options.hang_timeout,
            watch=watch,
            grace=options.grace_seconds,
        )


def pickle_worker(transport: Transport, address: str, make: bytes, name: str, index: int, incarnation: int) -> bytes:
    """Pickle a worker of the topology elastic for `run_served_node`. The worker's name is also its group.

    Args:
        transport: transport that serves the worker.
        address: address of the worker.
        make: a pickled `MakeWorker`.
        name, index, incarnation: arguments of `make`.
    """
    return ServedNode(name, transport, address, _make_worker, (make, name, index, incarnation), {}).pickled()


def _make_worker(make: bytes, name: str, index: int, incarnation: int) -> Any:
    import cloudpickle

    return cloudpickle.loads(make)(name, index, incarnation)
