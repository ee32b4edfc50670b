"""Ray, as the launcher has it: a cluster, or a Ray of the program's own on this machine, and the nodes there.

`RayCluster.place` says where a node may be. The supervisor starts the `StartableRayNode`, and watches the
`RunningRayNode`, which asks the actor of the node (`host.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlframe import extras
from rlframe.engines.group_rules import GroupRules
from rlframe.engines.ray_nodes.host import CONCURRENCY, NodeHost, NodeSnapshot, Relay
from rlframe.engines.supervision.nodes import OnExit, RunningNode, TakeLine
from rlframe.errors import UsageError
from rlframe.interprocess.heartbeat import HeartbeatMonitor
from rlframe.interprocess.memory import MACHINE
from rlframe.transport.ray import RaySockets, join
from rlframe.transport.sockets import SocketDirectory
from rlframe.user_code.directories import import_path

with extras.explain_import_error("--engine ray", "ray"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_RELAY = "relay-launcher"
_KILLED_WITHIN = 5.0  # seconds within which the actor of a killed node must confirm its end


class RayCluster:
    """Connects this process to Ray, and to the nodes of a program there.

    Args:
        address: "auto" or "HOST:PORT"; None: a Ray of its own is started, and ended by `close`, or with this process.

    Attributes:
        token: by which what belongs to the program is told from what belongs to others.
        hosts: the address and the actor of each node of the program, in the order of their start.
        others: the actors as the launcher's own relay has them: by address, the newest ones.

    Raises:
        UsageError: Ray cannot be reached.
    """

    def __init__(self, address: str | None) -> None:
        self.token = secrets.token_hex(4)
        with contextlib.ExitStack() as opened:
            opened.enter_context(_connected_to_ray(address))
            self._ray_node = ray.get_runtime_context().get_node_id()
            relay = Relay(RaySockets(RaySockets.path(self.token, self._ray_node), _RELAY))
            opened.callback(relay.close)
            opened.enter_context(_at(relay.ray_sockets, self._ray_node))
            self.hosts: list[tuple[str, Any]] = []
            self.others = relay.others
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Disconnect: processes of this program that still run end."""
        self._opened.close()

    def place(
        self,
        name: str,
        address: str,
        pickled: bytes,
        rules: GroupRules,
        cpus: float,
        gpus: float,
        shares_memory: bool,
        end_program: Callable[[], None],
    ) -> StartableRayNode:
        """Return a node that can be started.

        Args:
            name, address, pickled, rules, end_program: see `StartableRayNode`.
            cpus: that it has to itself.
            gpus: the same.
            is_bound: whether it shares memory with this process: then it is on the same Ray node.
        """
        affinity = NodeAffinitySchedulingStrategy(self._ray_node, soft=False)
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": affinity if shares_memory else "SPREAD"}
        return StartableRayNode(name, address, pickled, rules, options, self, end_program)

    def cpus(self, nodes: int, shares_memory: bool) -> float:
        """Return the CPUs for each of so many nodes: one, or its share if there are fewer."""
        total = sum(
            there.get("CPU", 0.0) for name, there in self._resources() if not shares_memory or name == self._ray_node
        )
        return 1.0 if total >= nodes else int(1000 * total / nodes) / 1000

    def gpus(self, nodes: int) -> float:
        """Return the accelerators for each of so many nodes: its share of those of the best Ray node."""
        most = max((there.get("GPU", 0.0) for _, there in self._resources()), default=0.0)
        if nodes == 0:
            return 0.0
        return float(int(most / nodes)) if most >= nodes else int(1000 * most / nodes) / 1000

    def _resources(self) -> Iterator[tuple[str, dict[str, float]]]:
        return ((node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"])


@contextlib.contextmanager
def _connected_to_ray(address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start a Ray on this machine, which ends with this process at the latest."""
    if ray.is_initialized():  # by the caller, who also ends it
        yield
        return
    with contextlib.ExitStack() as opened:
        handler = signal.getsignal(signal.SIGTERM)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            if address is not None:
                ray.init(address=address, **quiet)
            else:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # on a busy machine
                directory = SocketDirectory()  # removed with all that Ray writes, even where this process is killed
                opened.callback(directory.close)
                cpus = max(1, len(os.sched_getaffinity(0)))
                ray.init("local", num_cpus=cpus, include_dashboard=False, _temp_dir=directory.path, **quiet)
        except UnicodeEncodeError as error:
            raise UsageError(
                f"Ray takes no directory whose path is not UTF-8: got {error.object!r}. Start the run, and the script, "
                "from another directory, or choose another engine."
            ) from error
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"Ray cannot be reached (--ray-address {address}): {error}") from error
        opened.callback(ray.shutdown)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has set another one
        yield


@contextlib.contextmanager
def _at(ray_sockets: RaySockets, ray_node: str) -> Iterator[None]:
    """Connect this process to nodes, and let it share memory with the nodes on its Ray node."""
    before = os.environ.get(MACHINE)
    os.environ[MACHINE] = ray_node
    join(ray_sockets)
    try:
        yield
    finally:
        join(None)
        if before is None:
            del os.environ[MACHINE]
        else:
            os.environ[MACHINE] = before


@dataclasses.dataclass(frozen=True)
class StartableRayNode:
    """A node of a program on Ray. See `StartableNode`.

    Attributes:
        name: of the node, for messages: `learner`.
        address: at which it is called: `learner/0`.
        pickled: a `ServedNode`.
        rules: of its group.
        options: of its actor.
        cluster: where it is.
        end_program: is called when the node asks for the end.
    """

    name: str
    address: str
    pickled: bytes
    rules: GroupRules
    options: dict[str, Any]
    cluster: RayCluster
    end_program: Callable[[], None]

    def start(self, heartbeat: HeartbeatMonitor | None, on_exit: OnExit, take_line: TakeLine) -> RunningRayNode:
        """See `StartableNode`."""
        return RunningRayNode(self, heartbeat, on_exit, take_line)


class RunningRayNode(RunningNode):
    """An actor, and the thread that watches it."""

    def __init__(
        self, node: StartableRayNode, heartbeat: HeartbeatMonitor | None, on_exit: OnExit, take_line: TakeLine
    ) -> None:
        super().__init__(node.name, heartbeat, take_line)
        self._node, self._lost, self._killed_at = node, "", float("inf")
        make: Any = ray.remote(concurrency_groups=CONCURRENCY)(NodeHost)  # type: ignore[call-overload]
        self._host = make.options(max_restarts=0, **node.options).remote(
            node.name,
            node.address,
            node.pickled,
            node.rules,
            node.cluster.token,
            heartbeat.timeout if heartbeat is not None else 0.0,
            import_path(),
        )
        node.cluster.hosts.append((node.address, self._host))
        node.cluster.others[node.address] = self._host
        self._watcher = threading.Thread(target=self._watch, args=(on_exit,), daemon=True)
        self._watcher.start()

    def send(self, number: int) -> None:
        """See `RunningNode`."""
        if number == signal.SIGKILL:
            self._killed_at = min(self._killed_at, time.monotonic())
        self._host.send.remote(number)

    def wait(self) -> None:
        """See `RunningNode`."""
        self._watcher.join()

    def exit_reason(self) -> str:
        """See `RunningNode`."""
        return self._lost if self._lost and not self.hang_reason else super().exit_reason()

    def _watch(self, on_exit: OnExit) -> None:
        count = known = 0
        while self.code is None:
            new = self._node.cluster.hosts[known:]
            known += len(new)
            try:
                seen = self._answer(self._host.watch.remote(count, dict(new)))
            except ray.exceptions.RayError as error:
                words = str(error).strip().splitlines()
                self._lost = f"was lost with its Ray actor ({words[-1] if words else type(error).__name__})"
                seen = None
            if seen is None:
                self.code = -signal.SIGKILL
            else:
                count = seen.total
                self._take_in(seen)
        ray.kill(self._host, no_restart=True)
        on_exit(self)

    def _answer(self, reference: Any) -> NodeSnapshot | None:
        """Wait for an answer of the actor. Return None if the node was killed, and the actor no longer answers."""
        while not ray.wait([reference], timeout=0.5)[0]:
            if time.monotonic() > self._killed_at + _KILLED_WITHIN:
                return None
        return ray.get(reference)

    def _take_in(self, seen: NodeSnapshot) -> None:
        self.pid, self.host = seen.pid, seen.host
        self.serves_at = self._node.address if seen.serves else None
        for line in seen.lines:
            self._take(line)
        if self.heartbeat is not None and seen.page is not None:
            self.heartbeat.page = seen.page
        if seen.ends:
            self._node.end_program()
        self.code = seen.code
