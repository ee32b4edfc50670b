"""The contract of engines: their options, `Engine`, and the optional protocols `RunsReverb` and `StartsWorkers`.

The end of the file has code that several engines share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, TextIO, Union, runtime_checkable

from rlframe.engines.group_rules import AcceleratorGroup
from rlframe.engines.logs import NullStream
from rlframe.interprocess.heartbeat import TIMEOUT

GRACE = 8.0  # default seconds between SIGTERM and SIGKILL


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """Options for nodes. `ProgramConfig` gives topologies with several nodes the same options."""

    ray_address: Union[str, None] = None  # Ray cluster: auto or HOST:PORT; None starts Ray on this machine
    accelerators: tuple[AcceleratorGroup, ...] = ("learner",)  # groups whose nodes may use accelerators
    max_restarts: int = 3  # restarts of each node in a row; 15 minutes without a death reset the count
    hang_timeout: float = TIMEOUT  # seconds without a heartbeat after which a node is killed; 0 means never
    grace_seconds: float = GRACE  # seconds for nodes to save and end before they are killed


@dataclasses.dataclass(frozen=True)
class EngineOptions(NodeOptions):
    """Options of an engine. An engine ignores each `NodeOptions` field that is not in its `Engine.options`."""

    logs: pathlib.Path | None = None  # directory for the log files of nodes; None means no log files
    quiet: bool = False  # do not show the output of nodes

    @property
    def output(self) -> Any:
        """The stream that shows the output of nodes."""
        return NullStream() if self.quiet else sys.stderr


# The states of a node:
# WAITING: the node has no process, and will be restarted after its backoff.
# RUNNING: the node has a process.
# REPLACED: an operator of elastic has killed the node's process, and a new process will follow.
# ENDING: the node's process has received SIGTERM, and no new process will follow.
# ENDED: the node has no process, and no new process will follow.
NodeState = Literal["WAITING", "RUNNING", "REPLACED", "ENDING", "ENDED"]


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """The status of a node in a running program."""

    name: str  # "actor/0"
    state: NodeState = "RUNNING"
    incarnation: int = 0  # number of restarts
    pid: int | None = None  # process id; None if it is unknown
    host: str = socket.gethostname()  # name of the machine on which the process runs
    phase: str | None = None  # the phase in the latest heartbeat; None if the node has no heartbeat
    silent_for: int | None = None  # seconds since the latest heartbeat


# A callback that receives changes of node states. Arguments: whether the program is ending, and the node statuses.
Watch = Callable[[bool, list[NodeStatus]], None]


class Engine(Protocol):
    """Runs the nodes of one program: places them, connects them, and ends them together.

    Subclass this protocol to use the defaults of its attributes. The option `--engine` selects an engine class. `add`
    returns an object or a handle for `rlframe.handles.resolve`, which may be an argument of other nodes.

    Attributes:
        options: names of the `NodeOptions` that the engine uses. Users can set only these.
        requires: extras of this package that the engine needs.
        in_process: whether the nodes run in the process that calls `run`, and share its memory.
        operator: name of the operator that starts workers while a program runs; None if there is no such operator.
    """

    options: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    in_process: ClassVar[bool] = False
    operator: ClassVar[str | None] = None

    def __init__(self, options: EngineOptions) -> None: ...

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a node. The node constructs an object and calls its `run()`.

        When the program ends, `run` must return soon. With `handles.stop_with_program(self.stop)`, the program's end
        calls `self.stop`. A process that continues to run is killed after `grace_seconds`.

        Args:
            group: the node's group, such as "learner" or "actor". `group_rules.py: TRAITS` has the traits of groups.
            constructor: the object's class, or a function that returns the object.
            *args: arguments of the constructor. They may include results of `add` for other nodes.
            **kwargs: keyword arguments of the constructor.

        Returns:
            The node as an argument for other nodes.
        """

    @property
    def groups(self) -> Mapping[str, int]:
        """The number of nodes in each group."""

    def own(self, resource: Any) -> Any:
        """Return the resource, and call its `close()` when the program is over."""

    def address_of(self, group: str) -> str:
        """Return the address of the first node of a group, for callers outside the program."""

    def handle_of(self, group: str) -> Any:
        """Return a handle to the first node of a group, for the process that calls `run`."""

    def run(self, watch: Watch | None = None) -> int | None:
        """Run the program to its end.

        Args:
            watch: callback for changes of the nodes' states.

        Returns:
            The number of the signal that ended the program, or None if no signal did.

        Raises:
            ProgramError: a node failed and has no restarts left, or a node did not save when the program was stopped.
        """


MakeWorker = Callable[[str, int, int], Any]  # function (name, index, incarnation) -> the worker object


@runtime_checkable
class RunsReverb(Protocol):
    """An engine that can add a Reverb server to its program."""

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """Add a Reverb server with `tables`, which saves checkpoints in `path`. Return an argument for other nodes."""


@runtime_checkable
class StartsWorkers(Protocol):
    """An engine on which an operator starts workers while the program runs."""

    def worker_nodes(self, makers: Mapping[str, MakeWorker], most: Mapping[str, int]) -> Any:
        """Return functions that create the nodes of workers, for an operator of this engine.

        Args:
            makers: for each group, a function that creates a worker object.
            most: for each group, the maximum number of running workers.

        Returns:
            For each group, a function (index, incarnation) -> `StartableNode`.
        """


# --- shared code of the engines


class ResourceEngine(Engine):
    """Base of the engines: it closes the resources that it owns when the program is over."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._resources = contextlib.ExitStack()

    def own(self, resource: Any) -> Any:
        """See `Engine`."""
        self._resources.callback(resource.close)
        return resource


def pick_free_port() -> int:
    """Return an unused port."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def warn_about_open_ports(listening: str, output: TextIO) -> None:
    """Print a warning that nodes listen on all interfaces (SECURITY.md).

    Args:
        listening: text that names the nodes and their ports.
        output: the stream for the warning.
    """
    print(
        f"[launcher] {listening}, and their child processes, listen on all interfaces of this machine, without "
        "authentication: anyone who can reach such a port can run code as you. Close these ports (firewall, network "
        "namespace), or run on a network that nobody else can reach: see SECURITY.md.",
        file=output,
        flush=True,
    )
