"""The launcher's part of the engine `ray`: it connects to a cluster or starts Ray on this machine, and starts nodes.

`RayCluster.place` returns a `StartableRayNode`. The supervisor starts this node and gets a `RunningRayNode`, which
receives the node's state from the node's Ray actor (`host.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlframe import extras, retry
from rlframe.engines.devices import MEMORY_SHARE, share_memory
from rlframe.engines.group_rules import GroupRules
from rlframe.engines.ray_nodes.host import CONCURRENCY, SHARED_DIRECTORY, NodeHost, NodeSnapshot, Relay
from rlframe.engines.supervision.nodes import OnExit, RunningNode, TakeLine
from rlframe.errors import UsageError
from rlframe.interprocess.heartbeat import HeartbeatMonitor
from rlframe.interprocess.memory import MACHINE
from rlframe.interprocess.processes import environment_variable
from rlframe.transport.ray import RaySockets, use_sockets
from rlframe.transport.sockets import SocketDirectory
from rlframe.user_code.directories import import_path

with extras.explain_import_error("--engine ray", "ray"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_RELAY = "relay-launcher"
_REACHABLE_WITHIN = 15.0  # seconds in which the address of a cluster must accept a connection
_KILL_TIMEOUT = 5.0  # seconds that a Ray actor has to confirm the end of a killed node


class RayCluster:
    """Connects this process to Ray, and to the nodes of a program that run on Ray.

    Args:
        address: "auto" or "HOST:PORT". None starts Ray on this machine until `close` or the end of this process.
        directory: a directory that each machine with a node must have. None means no directory.

    Attributes:
        token: a random id of the program, which is part of the paths of the program's sockets.
        hosts: (address, Ray actor) of each started node, in the order of the starts.
        others: a dict of node address -> the node's newest Ray actor, for the launcher's relay.

    Raises:
        UsageError: Ray cannot be reached.
    """

    def __init__(self, address: str | None, directory: pathlib.Path | None = None) -> None:
        self._env = {} if directory is None else {SHARED_DIRECTORY: str(directory)}
        self.token = secrets.token_hex(4)
        with contextlib.ExitStack() as opened:
            opened.enter_context(_connected_to_ray(address))
            self._ray_node = ray.get_runtime_context().get_node_id()
            relay = Relay(RaySockets(RaySockets.path(self.token, self._ray_node), _RELAY))
            opened.callback(relay.close)
            # Share memory with the nodes on the same Ray node, and call nodes.
            opened.enter_context(environment_variable(MACHINE, self._ray_node))
            use_sockets(relay.ray_sockets)  # not undone by `close`: then a call through an old handle raises PeerError
            self.hosts: list[tuple[str, Any]] = []
            self.others = relay.others
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Disconnect from Ray. All processes of the program end."""
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
        """Return a node that the supervisor can start.

        Args:
            name, address, pickled, rules, end_program: see `StartableRayNode`.
            cpus: number of CPUs that the node reserves.
            gpus: number of accelerators that the node reserves.
            shares_memory: whether the node shares memory with this process, and so must run on the same Ray node.
        """
        affinity = NodeAffinitySchedulingStrategy(self._ray_node, soft=False)
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": affinity if shares_memory else "SPREAD"}
        env = {**rules.env, **self._env}
        if env.pop(MEMORY_SHARE, None) is not None and gpus > 0:  # this node may have a whole accelerator
            env.update(share_memory(1.0 / gpus))
        rules = dataclasses.replace(rules, env=env)
        return StartableRayNode(name, address, pickled, rules, options, self, end_program)

    @property
    def num_machines(self) -> int:
        """The number of Ray nodes in the cluster."""
        return len(list(self._resources()))

    def cpus(self, nodes: int, shares_memory: bool) -> float:
        """Return the number of CPUs for each of `nodes` nodes: 1, or an equal fraction if there are too few CPUs.

        Args:
            nodes: number of nodes.
            shares_memory: if True, count only the CPUs of the Ray node on which this process runs.
        """
        total = sum(
            there.get("CPU", 0.0) for name, there in self._resources() if not shares_memory or name == self._ray_node
        )
        return 1.0 if total >= nodes else int(1000 * total / nodes) / 1000

    def gpus(self, nodes: int) -> float:
        """Return the number of accelerators for each of `nodes` nodes.

        All nodes must fit on the Ray node with the most accelerators, in equal shares.
        """
        most = max((there.get("GPU", 0.0) for _, there in self._resources()), default=0.0)
        if nodes == 0:
            return 0.0
        return float(int(most / nodes)) if most >= nodes else int(1000 * most / nodes) / 1000

    def _resources(self) -> Iterator[tuple[str, dict[str, float]]]:
        return ((node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"])


@contextlib.contextmanager
def _connected_to_ray(address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine. Ray ends with the `with` block or with this process."""
    if ray.is_initialized():  # the caller started Ray and will shut it down
        yield
        return
    with contextlib.ExitStack() as opened:
        handler = signal.getsignal(signal.SIGTERM)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            if address is not None:
                _wait_until_reachable(address)
                ray.init(address=address, **quiet)
            else:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # a busy machine can need 2 minutes
                directory = SocketDirectory()  # contains Ray's files; it is removed even if this process is killed
                opened.callback(directory.close)
                cpus = max(1, len(os.sched_getaffinity(0)))
                ray.init("local", num_cpus=cpus, include_dashboard=False, _temp_dir=directory.path, **quiet)
        except UnicodeEncodeError as error:
            raise UsageError(
                f"Ray supports only directories with a UTF-8 path: got {error.object!r}. Start the run from another "
                "directory, or choose another engine."
            ) from error
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"Ray cannot be reached (--ray-address {address}): {error} If the cluster needs a token, this shell "
                "needs the same RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as `ray start`."
            ) from error
        opened.callback(ray.shutdown)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # restore the handler that Ray has replaced
        yield


def _wait_until_reachable(address: str) -> None:
    """Raise UsageError if nothing listens at `HOST:PORT` for some seconds. Ray would wait for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():  # `auto`, or an address such as ray://HOST:PORT
        return
    reason = ""
    for pause in retry.backoff(0.5, 2.0, _REACHABLE_WITHIN):
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            return
        except OSError as error:
            reason = str(error)
        time.sleep(pause)
    raise UsageError(
        f"Nothing listens at --ray-address {address} ({reason}). Start Ray on {host} with `ray start --head "
        f"--port={port}`, or check the address and the firewall."
    )


@dataclasses.dataclass(frozen=True)
class StartableRayNode:
    """A node of a program on Ray. See `StartableNode`.

    Attributes:
        name: name of the node for messages, such as `learner`.
        address: address for calls, such as `learner/0`.
        pickled: a pickled `ServedNode`.
        rules: rules of the node's group.
        options: options of the node's Ray actor.
        cluster: the cluster.
        end_program: function that is called when the node ends the program.
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
    """A running node: the node's Ray actor, and the thread that watches the actor."""

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

    def kill_if_hung(self, now: float) -> None:
        """See `RunningNode`. A node cannot hang while it waits for free cores of the cluster."""
        if self.pid is None and self.heartbeat is not None:
            self.heartbeat.restart(now)
        super().kill_if_hung(now)

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
                snapshot = self._answer(self._host.watch.remote(count, dict(new)))
            except ray.exceptions.RayError as error:
                text = str(error).strip().splitlines()
                self._lost = f"was lost with its Ray actor ({text[-1] if text else type(error).__name__})"
                snapshot = None
            if snapshot is None:
                self.code = -signal.SIGKILL
            else:
                count = snapshot.total
                self._update(snapshot)
        ray.kill(self._host, no_restart=True)
        on_exit(self)

    def _answer(self, reference: Any) -> NodeSnapshot | None:
        """Wait for the actor's answer. Return None if the node was killed and the actor did not answer in time."""
        while not ray.wait([reference], timeout=0.5)[0]:
            if time.monotonic() > self._killed_at + _KILL_TIMEOUT:
                return None
        return ray.get(reference)

    def _update(self, snapshot: NodeSnapshot) -> None:
        self.pid, self.host = snapshot.pid, snapshot.host
        self.serves_at = self._node.address if snapshot.serves else None
        for line in snapshot.lines:
            self._take(line)
        if self.heartbeat is not None and snapshot.page is not None:
            self.heartbeat.page = snapshot.page
        if snapshot.ends:
            self._node.end_program()
        self.code = snapshot.code
