"""The Ray actor of a node: it starts the node's process beside itself, watches it, and relays calls.

The process is one as the engine `local` has them, and dies with the actor. So a node has a main thread of its own, an
exit code and last words whatever it dies of, and is called over a socket by its neighbors, which takes a tenth of the
time of a call of an actor.
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
from rlframe.errors import UnavailableError
from rlframe.interprocess.heartbeat import HeartbeatMonitor
from rlframe.interprocess.memory import MACHINE
from rlframe.transport.base import CALL_TIMEOUT
from rlframe.transport.messages import Parts
from rlframe.transport.ray import RaySockets, call_relay
from rlframe.transport.sockets import SocketClient, SocketServer, SocketTransport

with extras.explain_import_error("--engine ray", "ray"):
    import ray

WATCH_TIMEOUT = 0.5  # seconds that `NodeHost.watch` waits for a change

_LINES = 10_000  # that are kept until they are fetched
_CALLS = 32  # that are passed on to the node at a time

Handles = Mapping[str, Any]  # by the name of a node, its actor

# Calls that wait for the node must not keep those about it waiting.
CONCURRENCY = {"watch": 2, "signal": 2, "call": _CALLS}


class NodeSnapshot(NamedTuple):
    """The state of a node, as its supervisor sees it.

    Attributes:
        lines: that it has written since the last look.
        total: how many there have been in all.
        page: its heartbeat; None: nobody watches it.
        host: the name of its machine.
        pid: its number there.
        code: as `RunningNode.code`.
        ends: whether it has asked for the end of the program.
        serves: whether it takes calls.
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
    """The actor. Its calls are the supervisor's, and those of other hosts' relays.

    Args:
        name, address, pickled, rules: see `StartableRayNode`.
        token: of the program: see `RayCluster`.
        hang_timeout: see `Supervisor`.
        imports: where the launcher imports from. Ray tells its actors only of two of these directories.
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
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
        self._count, self._ends, self._has_exited = 0, False, False
        heartbeat = HeartbeatMonitor(hang_timeout, 0.0) if hang_timeout else None
        env = {**rules.env, **self._relay.ray_sockets.variables, MACHINE: ray_node}
        sys.path += [path for path in imports if path not in sys.path]  # the node's is the same
        process = StartableProcess.of(name, run_ray_node, pickled, dataclasses.replace(rules, env=env))
        self._node = process.start(heartbeat, self._on_exit, self._take)

    @ray.method(concurrency_group="watch")
    def watch(self, count: int, others: Handles) -> NodeSnapshot:
        """Wait a little for a change, and return the state of the node.

        Args:
            count: of the lines that have been fetched.
            others: the actors of nodes that are new, or new again.
        """
        self._relay.others.update(others)
        with self._changed:
            self._changed.wait_for(lambda: self._count > count or self._has_exited or self._ends, WATCH_TIMEOUT)
            new = self._count - count
            lines = list(self._lines)[-new:] if new > 0 else []
            heartbeat, running = self._node.heartbeat, self._node
            page = heartbeat.page if heartbeat is not None else None
            code = running.code if self._has_exited else None
            serves = os.path.exists(self._path)
            return NodeSnapshot(lines, self._count, page, socket.gethostname(), running.pid, code, self._ends, serves)

    @ray.method(concurrency_group="signal")
    def send(self, number: int) -> None:
        """Signal the node: see `RunningNode`."""
        self._node.send(number)

    @ray.method(concurrency_group="signal")
    def reaches(self) -> bool:
        """Return True if the node can be called."""
        return SocketTransport().is_reachable(self._path)

    @ray.method(concurrency_group="call")
    def call(self, packed: Parts) -> Parts | str:
        """Pass a call on to the node. Return the packed answer, or a text that says why there is none."""
        try:
            return self._client.exchange(packed)
        except UnavailableError as error:
            return str(error)

    @ray.method(concurrency_group="signal")
    def subscribe(self, other: str, policy: Policy) -> None:
        """Offer the node's versions to the host of another node: see `PublishedVersions`."""

        def offer(version: int, references: list[Any]) -> None:
            if other in self._relay.others:
                self._relay.others[other].offer.remote(self._address, policy, version, references)

        self._versions.setdefault(policy, PublishedVersions(self._client, policy)).subscribe(other, offer)

    @ray.method(concurrency_group="signal")
    def offer(self, source: str, policy: Policy, version: int, references: list[Any]) -> None:
        """Take the reference to a version of another node: see `FetchedVersions`."""
        self._relay.versions_of(source, policy).take(version, references)

    def _take(self, name: str, text: str) -> None:
        del name
        with self._changed:
            self._lines.append(text)
            self._count += 1
            self._changed.notify_all()

    def _on_exit(self, running: RunningNode) -> None:
        running.send(signal.SIGKILL)  # to the processes that it started
        for versions in list(self._versions.values()):
            versions.close()
        with contextlib.suppress(FileNotFoundError):  # it was killed: it will be elsewhere, perhaps
            os.unlink(self._path)
        with self._changed:
            self._has_exited = True
            self._changed.notify_all()

    def _end_program(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()


class Relay:
    """Passes calls of processes of this Ray node on to nodes elsewhere. Its own process is a Ray actor or driver.

    Args:
        station: where it is found.
        *sockets: paths that are to be gone when this process has ended, beside its own.
        subscriber: the node beside which this is; None: none.

    Attributes:
        station: the same.
        others: the actors of all nodes.
        end_program: what a node calls to end the program.
    """

    def __init__(self, ray_sockets: RaySockets, *sockets: str, subscriber: str | None = None) -> None:
        self._subscriber = subscriber
        self._versions: dict[tuple[str, Policy], FetchedVersions] = {}  # by the node that has them
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
        """Stop: pass no more calls on."""
        self._server.stop()
        self._close()

    def versions_of(self, node: str, policy: Policy) -> FetchedVersions:
        """Return the versions that a node on another Ray node has."""
        key = node, policy
        with self._lock:
            if key not in self._versions:
                self._versions[key] = FetchedVersions(lambda host: host.subscribe.remote(self._subscriber, policy))
            return self._versions[key]

    def _answer_versions(self, node: str, method: str, *args: Any) -> Any:
        if self._subscriber is None or node not in self.others:
            return None
        policy = tuple(arg for arg in args if isinstance(arg, str))  # they come first
        return self.versions_of(node, policy).answer(self.others[node], method, *args[len(policy) :])

    def _pass_on(self, node: str, packed: Parts) -> Parts:
        answer = self._ask(node, "call", packed)
        if isinstance(answer, str):
            raise UnavailableError(answer)
        # Arrays in Ray's store are read-only; the caller may write to its own.
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
    """Run a node in its process, beside its host."""
    run_served_node(pickled, end=lambda: call_relay("end_program"))
