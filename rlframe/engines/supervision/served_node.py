"""Nodes that are objects whose public methods are called over a transport, and the base of their engines.

- In the launcher: `ServedEngine.add` keeps the constructor and the address of each node as a `ServedNode`, which is
  pickled for the process of the node.
- In that process: `run_served_node` calls the constructor, serves the object's methods at the address, and calls its
  `run()`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar

from rlframe.engines.base import EngineOptions, ResourceEngine, Watch
from rlframe.engines.logs import NodeLogs
from rlframe.engines.supervision.node_main import LAUNCHER_PID, pickle_node
from rlframe.engines.supervision.program_supervisor import STOP_SIGNAL, ProgramSupervisor
from rlframe.engines.supervision.running import StartableNode
from rlframe.handles import Remote
from rlframe.interprocess.phases import STARTING
from rlframe.program_end import join_program
from rlframe.transport import Transport

MakeWorker = Callable[[str, int, int], Any]  # (name, index, incarnation) -> the object of a worker


# --- in the launcher


@dataclasses.dataclass(frozen=True)
class ServedNode:
    """The constructor of an object, and the address at which its methods are called."""

    group: str
    transport: Transport
    address: str
    constructor: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def pickled(self) -> bytes:
        """See `run_served_node`."""
        return pickle_node(self.group, self)


class ServedEngine(ResourceEngine):
    """Base of the engines whose nodes are `ServedNode`s. The handle to a node is a `Remote`.

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
    """Pickle a worker of elastic, for `run_served_node`.

    Args:
        transport: by which it is called.
        address: at which.
        make: a pickled `MakeWorker`.
        name, index, incarnation: its arguments.
    """
    return ServedNode(name, transport, address, _make_worker, (make, name, index, incarnation), {}).pickled()


# --- in the process of a node


def _make_worker(make: bytes, name: str, index: int, incarnation: int) -> Any:
    import cloudpickle

    return cloudpickle.loads(make)(name, index, incarnation)


def run_served_node(pickled: bytes, end: Callable[[], None] | None = None) -> None:
    """Make the object of a node in its process, serve it and run it.

    An object without `run` is served until SIGTERM, and closed then if it has `close`.

    Args:
        pickled: see `ServedNode.pickled`.
        end: ends the program; None: a signal to the launcher does, which started this process.
    """
    stop = threading.Event()
    join_program(stop, end or functools.partial(os.kill, int(os.environ[LAUNCHER_PID]), STOP_SIGNAL))
    set_at_sigterm(stop)
    with STARTING:
        import cloudpickle

        node = cloudpickle.loads(pickled)
        made = node.constructor(*node.args, **node.kwargs)
    server = node.transport.serve(public_methods(made), node.address)
    try:
        if hasattr(made, "run"):
            made.run()
        else:
            while not stop.wait(1.0):  # not without end: a signal that comes just before would not wake it
                pass
    finally:
        server.stop()
        if not hasattr(made, "run") and hasattr(made, "close"):
            made.close()


def public_methods(target: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods that others may call: those of the class whose names begin without an underscore."""
    names = (name for name in dir(type(target)) if not name.startswith("_"))
    return {name: getattr(target, name) for name in names if callable(getattr(type(target), name, None))}


def set_at_sigterm(stop: threading.Event) -> None:
    """Set the event at SIGTERM."""

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        # Not from here: the thread that the handler interrupts may hold the event's lock.
        threading.Thread(target=stop.set, daemon=True).start()

    signal.signal(signal.SIGTERM, handle)
