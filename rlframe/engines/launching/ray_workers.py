"""Nodes that come and go while a program runs on Ray: the workers of an operator.

Whoever has the program's connection to Ray starts them, and they end with it at the latest. So who asks for them may
die, and finds them again.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlframe.engines.launching.local_node import LocalNode
from rlframe.engines.launching.node_main import pickle_node
from rlframe.engines.launching.running import FOR_GOOD, GroupPolicy, TakeLine
from rlframe.engines.logs import show
from rlframe.handles import Remote
from rlframe.transport.ray import RayTransport, here

if TYPE_CHECKING:
    from rlframe.engines.launching.ray_cluster import RayCluster
    from rlframe.engines.launching.ray_running import RunningActor

Make = Callable[[str, int, int], Any]  # (name, index, incarnation) -> the object of a node

_ADDRESS = "workers"  # at which the one that starts them is called, on its Ray node
_CALLED_WITHIN = 5.0  # seconds
_PLACED_WITHIN = 15.0  # seconds after which it is said that Ray has not started a worker yet


@dataclasses.dataclass(frozen=True)
class SeenWorker:
    """A worker that was started, and has not been cleared away.

    Attributes:
        address: at which `RayTransport` calls it; None until it serves.
        host: the name of its machine; empty where that is not known yet.
        pid: its process there.
        problem: how it ended, or why it does not start.
        has_ended: whether it has.
    """

    role: str
    index: int
    incarnation: int
    address: str | None
    host: str
    pid: int | None
    problem: str
    has_ended: bool


@dataclasses.dataclass(frozen=True)
class WorkerGroup:
    """The workers of one role.

    Attributes:
        pickled: a `Make`; see `pickled_make`.
        policy: what holds for their processes.
        cpus: that each has to itself.
        gpus: the same.
        is_bound: whether they share memory with the process that starts them.
    """

    pickled: bytes
    policy: GroupPolicy
    cpus: float = 0.0
    gpus: float = 0.0
    is_bound: bool = False


class RayWorkers:
    """Starts workers beside Ray actors, lists and ends them. Pickles as a handle to it, for processes of its Ray node.

    Args:
        cluster: where they run.
        groups: by role.

    Attributes:
        take_line: is given (the worker's name, each line that it writes); stderr.
    """

    def __init__(self, cluster: RayCluster, groups: Mapping[str, WorkerGroup]) -> None:
        self.take_line: TakeLine = functools.partial(show, sys.stderr)
        self._cluster, self._groups = cluster, dict(groups)
        self._running: dict[tuple[str, int, int], RunningActor] = {}
        self._told: set[tuple[str, int, int]] = set()  # to end
        self._lock = threading.Lock()
        methods: dict[str, Callable[..., Any]] = {
            "roles": self.roles,
            "list": self.list,
            "start": self.start,
            "stop": self.stop,
        }
        self._remove = here().open(here().socket(_ADDRESS))  # even where this process is killed
        self._server = RayTransport().serve(methods, _ADDRESS)

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, ([_ADDRESS], "launcher", _CALLED_WITHIN, None, RayTransport())

    def roles(self) -> Iterable[str]:
        """The roles that there are workers of."""
        return tuple(self._groups)

    def list(self) -> list[SeenWorker]:
        """All that were started and not cleared away."""
        with self._lock:
            return [self._seen(key, running) for key, running in self._running.items()]

    def start(self, role: str, index: int, incarnation: int) -> None:
        """Has Ray start a worker, in the background. One that was started is not started again."""
        from rlframe.engines.launching.ray_host import HostedNode

        name, address, group = f"{role}/{index}", f"{role}/{index}/{incarnation}", self._groups[role]
        node = LocalNode(role, RayTransport(), address, _make, (group.pickled, name, index, incarnation), {})
        # It has no heartbeat: those who call it see it hang.
        hosted = HostedNode(name, address, node.pickled(), group.policy, self._cluster.token, 0.0)
        placed = self._cluster.place(hosted, group.cpus, group.gpus, group.is_bound, _no_end)
        with self._lock:
            if (role, index, incarnation) not in self._running:
                self._running[role, index, incarnation] = placed.start(None, _no_matter, self._take)

    def stop(self, role: str, index: int, incarnation: int, kill: bool) -> None:
        """Tells a worker to end, or kills it, or clears away one that has ended. May be repeated."""
        key = role, index, incarnation
        with self._lock:
            running, is_told = self._running.get(key), key in self._told
            self._told.add(key)
            if running is None or running.code is not None:
                self._running.pop(key, None)
                self._told.discard(key)
        if running is None:
            return
        if running.code is not None:
            if not is_told:
                self._take(running.name, f"(incarnation {incarnation}) {_ending(running)}")
        elif kill:
            running.send(signal.SIGKILL)
        elif not is_told:
            running.send(signal.SIGTERM)
            running.send(signal.SIGCONT)  # one that was stopped would not hear of it

    def close(self) -> None:
        """Ends all of them, and takes no more calls."""
        self._server.stop()
        with self._lock:
            running = list(self._running.values())
            self._running.clear()
        for each in running:
            each.send(signal.SIGKILL)
        for each in running:
            each.wait()
        self._remove()

    def _take(self, name: str, line: str) -> None:
        self.take_line(name, line)

    def _seen(self, key: tuple[str, int, int], running: RunningActor) -> SeenWorker:
        has_ended, problem = running.code is not None, ""
        if has_ended:
            problem = f"{running.name} {_ending(running)}"
        elif running.pid is None and running.lived() > _PLACED_WITHIN:
            problem = f"{running.name} has not been started by Ray yet: its nodes may have no CPU to spare."
        host = running.host if running.pid is not None else ""
        return SeenWorker(*key, running.serves_at, host, running.pid, problem, has_ended)


def pickled_make(role: str, make: Make) -> bytes:
    """What makes the workers of a role, for `WorkerGroup`. Raises UsageError where it cannot be pickled."""
    return pickle_node(role, make)


def _make(pickled: bytes, name: str, index: int, incarnation: int) -> Any:
    import cloudpickle

    return cloudpickle.loads(pickled)(name, index, incarnation)


def _ending(running: RunningActor) -> str:
    if running.code == 0:
        return "ended by itself."
    again = " It would fail again." if running.code == FOR_GOOD else ""
    last = running.last_line
    return f"{running.how()}.{again}" + (f" Its last line: {last}" if last else "")


def _no_end() -> None:
    """A worker does not end the program."""


def _no_matter(running: Any) -> None:
    """The end of a worker is seen by who lists it."""
