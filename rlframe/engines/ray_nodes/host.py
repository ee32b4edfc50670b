"""`NodeHost` is the Ray actor of a node. It starts the node's process, watches it, and relays calls.

The engine `local` starts the same process. The process dies with the actor. A separate process gives the node a main
thread, and makes the node's exit code and last output available. Nodes on the same Ray node call each other over
sockets: this takes a tenth of the time of a call through Ray actors.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlframe import extras
from rlframe.engines.group_rules import GroupRules
from rlframe.engines.ray_nodes.params import FetchedVersions, Policy, PublishedVersions
from rlframe.engines.supervision.node_main import run_served_node
from rlframe.engines.supervision.nodes import RunningNode, StartableProcess
from rlframe.errors import UnavailableError, UsageError
from rlframe.interprocess.heartbeat import HeartbeatMonitor
from rlframe.interprocess.memory import MACHINE
from rlframe.transport.base import CALL_TIMEOUT, Parts
from rlframe.transport.ray import RaySockets, call_relay
from rlframe.transport.sockets import SocketClient, SocketServer, SocketTransport

with extras.explain_import_error("--engine ray", "ray"):
    import ray

SHARED_DIRECTORY = "RLFRAME_SHARED_DIRECTORY"  # environment variable: a directory that each machine must have
WATCH_TIMEOUT = 0.5  # seconds that `NodeHost.watch` waits for a change

_MAX_LINES = 10_000  # maximum number of output lines that are kept for the supervisor; older lines are dropped
_MAX_CALLS = 32  # maximum number of concurrent calls to the node

Handles = Mapping[str, Any]  # address of a node -> its Ray actor

# Concurrency groups of the Ray actor. They are separate, so that slow calls to the node do not delay the supervisor.
CONCURRENCY = {"watch": 2, "signal": 2, "call": _MAX_CALLS}


class NodeSnapshot(NamedTuple):
    """The state of a node, for its supervisor.

    Attributes:
        lines: output lines since the previous snapshot.
        total: total number of output lines.
        page: the memory page that contains the node's heartbeat; None if the node has no heartbeat.
        host: name of the node's machine.
        pid: process id of the node on that machine.
        code: see `RunningNode.code`.
        ends: whether the node has asked the supervisor to end the program.
        serves: whether the node accepts calls.
    """

    lines: list[str]
    total: int
    page: bytes | None
    host: str
    pid: int | None
    code: int | None
    ends: bool
    serves: bool


class NodeHost:
    """The Ray actor of a node. Its callers are the supervisor and the relays of other hosts.

    Args:
        name, address, pickled, rules: see `StartableRayNode`.
        token: token of the program: see `RayCluster`.
        hang_timeout: see `Supervisor`.
        imports: the launcher's `sys.path`. It is necessary because Ray passes only two of its directories to actors.
    """

    def __init__(
        self,
        name: str,
        address: str,
        pickled: bytes,
        rules: GroupRules,
        token: str,
        hang_timeout: float,
        imports: Sequence[str],
    ) -> None:
        ray_node = ray.get_runtime_context().get_node_id()
        ray_sockets = RaySockets(RaySockets.path(token, ray_node), f"relay-{address.replace('/', '-')}")
        self._address = address
        self._relay = Relay(ray_sockets, ray_sockets.socket(address), subscriber=address)
        self._relay.end_program = self._end_program
        self._path = self._relay.ray_sockets.socket(address)
        self._client = SocketClient(self._path)
        self._versions: dict[Policy, PublishedVersions] = {}
        self._changed = threading.Condition()
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
        self._count, self._ends, self._has_exited = 0, False, False
        heartbeat = HeartbeatMonitor(hang_timeout, 0.0) if hang_timeout else None
        env = {**rules.env, **self._relay.ray_sockets.variables, MACHINE: ray_node}
        sys.path += [path for path in imports if path not in sys.path]  # the node's process inherits `sys.path`
        process = StartableProcess.of(name, run_ray_node, pickled, dataclasses.replace(rules, env=env))
        self._node = process.start(heartbeat, self._on_exit, self._take)

    @ray.method(concurrency_group="watch")
    def watch(self, count: int, others: Handles) -> NodeSnapshot:
        """Wait for the next change of the node's state, but at most WATCH_TIMEOUT. Return the state.

        Args:
            count: number of output lines that the supervisor has received so far.
            others: Ray actors of the nodes that were started or restarted since the previous call.
        """
        self._relay.others.update(others)
        with self._changed:
            self._changed.wait_for(lambda: self._count > count or self._has_exited or self._ends, WATCH_TIMEOUT)
            new = self._count - count
            lines = list(self._lines)[-new:] if new > 0 else []
            return NodeSnapshot(
                lines=lines,
                total=self._count,
                page=self._node.heartbeat.page if self._node.heartbeat is not None else None,
                host=socket.gethostname(),
                pid=self._node.pid,
                code=self._node.code if self._has_exited else None,
                ends=self._ends,
                serves=os.path.exists(self._path),
            )

    @ray.method(concurrency_group="signal")
    def send(self, number: int) -> None:
        """Send a signal to the node: see `RunningNode`."""
        self._node.send(number)

    @ray.method(concurrency_group="signal")
    def reaches(self) -> bool:
        """Return True if the node accepts calls."""
        return SocketTransport().is_reachable(self._path)

    @ray.method(concurrency_group="call")
    def call(self, packed: Parts) -> Parts | str:
        """Relay a packed call to the node. Return the packed answer, or an error message if no answer arrived."""
        try:
            return self._client.exchange(packed)
        except UnavailableError as error:
            return str(error)

    @ray.method(concurrency_group="signal")
    def subscribe(self, other: str, policy: Policy) -> None:
        """Send each new version of this node's parameters to the host of another node: see `PublishedVersions`."""

        def offer(version: int, references: list[Any]) -> None:
            if other in self._relay.others:
                self._relay.others[other].offer.remote(self._address, policy, version, references)

        self._versions.setdefault(policy, PublishedVersions(self._client, policy)).subscribe(other, offer)

    @ray.method(concurrency_group="signal")
    def offer(self, source: str, policy: Policy, version: int, references: list[Any]) -> None:
        """Receive the reference to a version of another node's parameters: see `FetchedVersions`."""
        self._relay.versions_of(source, policy).take(version, references)

    def _take(self, _: str, text: str) -> None:
        with self._changed:
            self._lines.append(text)
            self._count += 1
            self._changed.notify_all()

    def _on_exit(self, running: RunningNode) -> None:
        running.send(signal.SIGKILL)  # kills the processes that the node has started
        for versions in list(self._versions.values()):
            versions.close()
        with contextlib.suppress(FileNotFoundError):  # a killed node does not remove its socket
            os.unlink(self._path)
        with self._changed:
            self._has_exited = True
            self._changed.notify_all()

    def _end_program(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()


class Relay:
    """Relays calls from processes on this Ray node to nodes on other Ray nodes. Runs in a Ray actor or in the launcher.

    Args:
        ray_sockets: the directory and name of the relay's socket.
        *sockets: paths of further sockets that are also removed when this process ends.
        subscriber: address of this host's node. Other hosts send parameter versions to it. None in the launcher.

    Attributes:
        ray_sockets: the argument `ray_sockets`.
        others: a dict of node address -> Ray actor, for all nodes of the program.
        end_program: function that a node calls to end the program.
    """

    def __init__(self, ray_sockets: RaySockets, *sockets: str, subscriber: str | None = None) -> None:
        self._subscriber = subscriber
        self._versions: dict[
            tuple[str, Policy], FetchedVersions
        ] = {}  # the keys are (address of the publishing node, policy)
        self._lock = threading.Lock()
        self.ray_sockets, self.others = ray_sockets, dict[str, Any]()
        self.end_program: Callable[[], None] = lambda: None
        self._close = ray_sockets.open(f"{ray_sockets.directory}/{ray_sockets.relay}", *sockets)
        methods: dict[str, Callable[..., Any]] = {
            "relay": self._pass_on,
            "reaches": self._reaches,
            "versions": self._answer_versions,
            "end_program": lambda: self.end_program(),
        }
        self._server = SocketServer(methods, f"{ray_sockets.directory}/{ray_sockets.relay}")

    def close(self) -> None:
        """Stop relaying calls."""
        self._server.stop()
        self._close()

    def versions_of(self, node: str, policy: Policy) -> FetchedVersions:
        """Return the fetched parameter versions of a node on another Ray node."""
        key = node, policy
        with self._lock:
            if key not in self._versions:
                self._versions[key] = FetchedVersions(lambda host: host.subscribe.remote(self._subscriber, policy))
            return self._versions[key]

    def _answer_versions(self, node: str, method: str, *args: Any) -> Any:
        if self._subscriber is None or node not in self.others:
            return None
        policy = tuple(arg for arg in args if isinstance(arg, str))  # the arguments that select the policy come first
        return self.versions_of(node, policy).answer(self.others[node], method, *args[len(policy) :])

    def _pass_on(self, node: str, packed: Parts) -> Parts:
        answer = self._ask(node, "call", packed)
        if isinstance(answer, str):
            raise UnavailableError(answer)
        # Copy the arrays: arrays from Ray's object store are read-only, but the caller may write to its arrays.
        return [part if part.flags.writeable else part.copy() for part in answer]

    def _reaches(self, node: str) -> bool:
        return node in self.others and self._ask(node, "reaches")

    def _ask(self, node: str, method: str, *args: Any) -> Any:
        host = self.others.get(node)
        if host is None:
            raise UnavailableError(f"the node {node} has not been started")
        try:
            return ray.get(getattr(host, method).remote(*args), timeout=CALL_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            raise UnavailableError(f"no answer within {CALL_TIMEOUT:g} s") from None
        except ray.exceptions.RayError as error:
            raise UnavailableError(str(error).partition("\n")[0]) from None


def run_ray_node(pickled: bytes) -> None:
    """Run a node in its process.

    Raises:
        UsageError: this machine does not have the run directory.
    """
    directory = os.environ.get(SHARED_DIRECTORY)
    if directory and not os.path.isdir(directory):
        raise UsageError(
            f"The machine {socket.gethostname()} does not have the run directory {directory}. With --engine ray, every "
            "machine needs it at the same path: give --run-dir a directory of a shared file system, such as NFS."
        )
    run_served_node(pickled, end=lambda: call_relay("end_program"))
