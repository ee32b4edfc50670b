"""The contract of an engine: what a topology and a session ask of it. And the rules of groups, which engines share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol, TextIO, Union

from rlframe.engines.logs import Nowhere
from rlframe.errors import UsageError
from rlframe.interprocess.heartbeat import TIMEOUT

GRACE = 8.0  # seconds between SIGTERM and SIGKILL, unless another number is asked for

Accelerated = Literal["learner", "inferencer", "policy"]  # groups whose nodes may use accelerators

# The groups whose nodes save when they end. If a program is stopped, everything is saved only if these ended well.
SAVING_GROUPS = ("learner", "replay", "coordinator")

# A program ends with the first of these groups that it has. Each has one node.
_ENDING_GROUPS = ("coordinator", "monitor", "learner")

NO_ACCELERATOR = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}

# JAX and numerical libraries with one thread, on the CPU.
ON_CPU = {
    **NO_ACCELERATOR,
    "NPROC": "1",  # XLA's threads; its flag for a single one takes slower kernels too
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

_PREALLOCATES = "XLA_PYTHON_CLIENT_PREALLOCATE"

# Groups that have the cores which the others leave: more threads than cores slow each other. They work in turns.
_WIDE_GROUPS = ("learner", "policy")

# Called with (whether the nodes are being ended, `node_status` of each) when these change.
Watch = Callable[[bool, list[dict[str, Any]]], None]


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """How an engine runs nodes. They are also options of each topology of several nodes (`ProgramConfig`)."""

    ray_address: Union[str, None] = None  # the Ray cluster: auto or HOST:PORT; None: a Ray of this machine's own
    accelerators: tuple[Accelerated, ...] = ("learner",)  # the nodes that may use accelerators; the others get none
    max_restarts: int = 3  # how often each node may die and be started again
    hang_timeout: float = TIMEOUT  # seconds without a heartbeat after which a node is killed; 0: none that hangs is
    grace_seconds: float = GRACE  # that nodes have to save and end, once they are told to, before they are killed


@dataclasses.dataclass(frozen=True)
class EngineOptions(NodeOptions):
    """The options of an engine. Each engine reads those of `NodeOptions` that `Engine.options` names, and these."""

    logs: pathlib.Path | None = None  # the directory in which the nodes' lines are kept; None: nowhere
    quiet: bool = False  # show no line of the nodes

    @property
    def output(self) -> Any:
        """The stream that shows the nodes' lines."""
        return Nowhere() if self.quiet else sys.stderr


class Engine(Protocol):
    """Runs the nodes of one program: places them, connects them, and ends them together.

    A class of this kind is made with `EngineOptions`, and named by `--engine`. What `add` gives for a node is the
    engine's own, and good as an argument of its other nodes: an object, or a handle that `rlframe.handles.resolve`
    knows.

    Attributes:
        options: names of the `NodeOptions` that it reads; the others stay at their defaults.
        requires: extras of this package that it needs.
        in_process: whether its nodes are in the process that calls `run`, and share its memory.
        runs_reverb: whether `add_reverb` starts a server.
        operator: name of the operator that starts workers which come and go while a program runs; None: nothing does.
    """

    options: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    in_process: ClassVar[bool] = False
    runs_reverb: ClassVar[bool] = True
    operator: ClassVar[str | None] = None

    def __init__(self, options: EngineOptions) -> None: ...

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a node, which constructs an object and calls its `run()`, and `stop()` when the program ends.

        Args:
            group: learner, inferencer, actor or monitor, say; the program ends as `ending_group` says.
            constructor: of the object.
            *args: its arguments; some may be what `add` gave for other nodes.
            **kwargs: the same.

        Returns:
            What stands for the node in the arguments of others.
        """

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """Add a Reverb server of `tables`, whose checkpoints lie in `path`; where `runs_reverb` is True."""
        del group, tables, path
        raise UsageError(f"{type(self).__name__} runs no Reverb server.")

    def worker_nodes(self, makers: Mapping[str, Callable[[str, int, int], Any]], most: Mapping[str, int]) -> Any:
        """Return the nodes that an operator of this engine starts as workers while the program runs.

        Args:
            makers: by role, makes the object of a worker, given (its name, its index, its incarnation).
            most: by role, how many may run at a time.

        Returns:
            By role, a function (index, incarnation) -> the node, a `SupervisedNode`.

        Raises:
            UsageError: this engine has no operator of its own.
        """
        del makers, most
        raise UsageError(f"{type(self).__name__} starts no nodes while a program runs. The engine ray does.")

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
            watch: is told how the nodes are, whenever that changes.

        Returns:
            The number of the signal that ended it, or None where it ended by itself.

        Raises:
            ProgramError: a node failed for good, or had not saved what it should when the program was stopped.
        """


class ResourceEngine(Engine):
    """Base of our engines: it closes the resources that it owns when the program is over."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._resources = contextlib.ExitStack()

    def own(self, resource: Any) -> Any:
        """See `Engine`."""
        self._resources.callback(resource.close)
        return resource


# --- the rules of groups: what restarts, what ends the program, what must save, who gets accelerators and cores


@dataclasses.dataclass(frozen=True)
class GroupRules:
    """The rules for the nodes of one group (label) of a program."""

    # Each node is started again, at the same address, until it has died more often than this. The default suits any
    # program, since its nodes may not bear a restart; those of our topologies do (`NodeOptions.max_restarts`).
    max_restarts: int = 0
    ends_program: bool = False  # the program is over, and well, when the nodes of all such groups have ended well
    must_save: bool = False  # a program that is stopped has ended well only if these nodes have, since they save then
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)  # environment variables; None: removed


def ending_group(groups: Iterable[str]) -> str | None:
    """Return the group whose end is the program's: of `heavy_env`, "monitor". None: it ends with its last node."""
    there = set(groups)
    return next((group for group in _ENDING_GROUPS if group in there), None)


def rules_by_group(groups: Mapping[str, int], options: EngineOptions) -> dict[str, GroupRules]:
    """Return the rules of each group of a program.

    Args:
        groups: how many nodes each has.
        options: of the engine.
    """
    ending = ending_group(groups)
    return {
        group: GroupRules(
            max_restarts=options.max_restarts,
            ends_program=group == ending,
            must_save=group in SAVING_GROUPS,
            env=_variables(group, groups, options.accelerators),
        )
        for group in groups
    }


def _variables(group: str, groups: Mapping[str, int], accelerators: Iterable[str]) -> dict[str, str]:
    found = {"NPROC": str(_cores_left(groups))} if group in _WIDE_GROUPS else dict(ON_CPU)
    if group not in accelerators:
        return {**found, **NO_ACCELERATOR}
    for name in NO_ACCELERATOR:
        found.pop(name, None)
    # If several nodes share an accelerator, none may take all of its memory.
    if sum(count for name, count in groups.items() if name in accelerators) > 1 and _PREALLOCATES not in os.environ:
        found[_PREALLOCATES] = "false"
    return found


def _cores_left(groups: Mapping[str, int]) -> int:
    idle = (*_WIDE_GROUPS, ending_group(groups))
    busy = sum(count for name, count in groups.items() if name not in idle)
    return max(1, len(os.sched_getaffinity(0)) - busy)


# --- for the engines


def node_status(name: str, incarnation: int, pid: int | None, state: str = "BUSY") -> dict[str, Any]:
    """Return the row of a node in `rlframe status`, with the keys that the workers of elastic have.

    Args:
        name: of the node: `actor/0`.
        incarnation: number of its restarts.
        pid: of its process.
        state: a `WorkerState` (`rlframe.coordinator.states`).
    """
    role, _, index = name.partition("/")
    return {
        "worker_id": name,
        "role": role,
        "index": int(index or 0),
        "incarnation": incarnation,
        "state": state,
        "host": socket.gethostname(),
        "pid": pid,
    }


def pick_free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def warn_of_open_ports(listening: str, output: TextIO) -> None:
    """Print that these nodes, named with their ports, listen on all interfaces (SECURITY.md)."""
    print(
        f"[launcher] {listening}, and what these start, listen on all interfaces of this machine, without "
        "authentication: whoever reaches such a port can run code as you. Close them (firewall, network namespace), or "
        "run where nobody else reaches this machine: see SECURITY.md.",
        file=output,
        flush=True,
    )
