"""The contract of an engine: its options, `Engine`, and what only some engines can do (`RunsReverb`, `StartsWorkers`).

The end of the file has parts that our engines share.
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

GRACE = 8.0  # seconds between SIGTERM and SIGKILL, unless another number is asked for


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """How an engine runs nodes. They are also options of each topology of several nodes (`ProgramConfig`)."""

    ray_address: Union[str, None] = None  # the Ray cluster: auto or HOST:PORT; None: a Ray of this machine's own
    accelerators: tuple[AcceleratorGroup, ...] = (
        "learner",
    )  # the nodes that may use accelerators; the others get none
    max_restarts: int = 3  # how often each node may die and be started again
    hang_timeout: float = TIMEOUT  # seconds without a heartbeat after which a node is killed; 0: never
    grace_seconds: float = GRACE  # seconds in which nodes save and end, before they are killed


@dataclasses.dataclass(frozen=True)
class EngineOptions(NodeOptions):
    """The options of an engine. Each engine reads those of `NodeOptions` that `Engine.options` names, and these."""

    logs: pathlib.Path | None = None  # the directory in which the nodes' lines are kept; None: nowhere
    quiet: bool = False  # show no line of the nodes

    @property
    def output(self) -> Any:
        """The stream that shows the nodes' lines."""
        return NullStream() if self.quiet else sys.stderr


# WAITING: it has no process; the next one is started soon.
# RUNNING: it has a process. If that dies, the supervisor decides what follows.
# REPLACED: its process was killed on request, and the next one follows.
# ENDING: its process was told to end for good.
# ENDED: it has no process, and gets none.
NodeState = Literal["WAITING", "RUNNING", "REPLACED", "ENDING", "ENDED"]


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """What is known of a node while its program runs."""

    name: str  # "actor/0"
    state: NodeState = "RUNNING"
    incarnation: int = 0  # number of its restarts
    pid: int | None = None  # of its process, if that is known
    host: str = socket.gethostname()  # the name of the process's machine
    phase: str | None = None  # that the process was in at its last heartbeat; None: nobody watches it
    silent_for: int | None = None  # seconds since that heartbeat


# Called with (whether the nodes are being ended, the status of each) when these change.
Watch = Callable[[bool, list[NodeStatus]], None]


class Engine(Protocol):
    """Runs the nodes of one program: places them, connects them, and ends them together.

    Subclass it: the attributes have defaults. A class of this kind is made with `EngineOptions`, and named by
    `--engine`. `add` returns an object, or a handle that `rlframe.handles.resolve` knows: an argument for other nodes.

    Attributes:
        options: names of the `NodeOptions` that it reads; the others stay at their defaults.
        requires: extras of this package that it needs.
        in_process: whether its nodes are in the process that calls `run`, and share its memory.
        operator: name of the operator that starts workers which come and go while a program runs; None: nothing does.
    """

    options: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    in_process: ClassVar[bool] = False
    operator: ClassVar[str | None] = None

    def __init__(self, options: EngineOptions) -> None: ...

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a node, which constructs an object and calls its `run()`, and `stop()` when the program ends.

        Args:
            group: learner, inferencer, actor or monitor, say; what that decides is in `group_rules.py: TRAITS`.
            constructor: of the object.
            *args: its arguments; some may be what `add` gave for other nodes.
            **kwargs: the same.

        Returns:
            The node as an argument for other nodes.
        """

    @property
    def groups(self) -> Mapping[str, int]:
        """The number of nodes in each group."""

    def own(self, resource: Any) -> Any:
        """Return `resource`, whose `close()` is called when the program is over."""

    def address_of(self, group: str) -> str:
        """Return the address of the first node of a group, for callers outside of the program."""

    def handle_of(self, group: str) -> Any:
        """Return a handle to the first node of a group, for the process that calls `run`."""

    def run(self, watch: Watch | None = None) -> int | None:
        """Run the program to its end.

        Args:
            watch: called with the states of the nodes whenever they change.

        Returns:
            The number of the signal that ended it, or None where it ended by itself.

        Raises:
            ProgramError: a node failed for good, or had not saved what it should when the program was stopped.
        """


MakeWorker = Callable[[str, int, int], Any]  # (name, index, incarnation) -> the object of a worker


@runtime_checkable
class RunsReverb(Protocol):
    """An engine that can add a Reverb server to its program."""

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """Add a server of `tables`, whose checkpoints lie in `path`. Return it as an argument for other nodes."""


@runtime_checkable
class StartsWorkers(Protocol):
    """An engine on which an operator starts workers while the program runs."""

    def worker_nodes(self, makers: Mapping[str, MakeWorker], most: Mapping[str, int]) -> Any:
        """Return the nodes that an operator of this engine starts as workers.

        Args:
            makers: by group, makes the object of a worker.
            most: by group, how many may run at a time.

        Returns:
            By group, a function (index, incarnation) -> the node, a `StartableNode`.
        """


# --- for our engines


class ResourceEngine(Engine):
    """Base of our engines: it closes the resources that it owns when the program is over."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._resources = contextlib.ExitStack()

    def own(self, resource: Any) -> Any:
        """See `Engine`."""
        self._resources.callback(resource.close)
        return resource


def pick_free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def warn_about_open_ports(listening: str, output: TextIO) -> None:
    """Print that these nodes, named with their ports, listen on all interfaces (SECURITY.md)."""
    print(
        f"[launcher] {listening}, and what these start, listen on all interfaces of this machine, without "
        "authentication: whoever reaches such a port can run code as you. Close them (firewall, network namespace), or "
        "run where nobody else reaches this machine: see SECURITY.md.",
        file=output,
        flush=True,
    )
