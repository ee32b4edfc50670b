"""The Ray that a program runs on, a cluster or one of its own on this machine, and where its nodes may be."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rlframe import extras
from rlframe.engines.ray_nodes.host import HostedNode, Relay
from rlframe.engines.ray_nodes.running_ray_node import RayNode
from rlframe.errors import UsageError
from rlframe.interprocess.memory import MACHINE
from rlframe.transport.ray import Station, join
from rlframe.transport.sockets import SocketDirectory

with extras.needed("--engine ray", "ray"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_RELAY = "relay-launcher"


class RayCluster:
    """Connects this process to Ray, and to the nodes of a program there.

    Args:
        address: "auto" or "HOST:PORT"; None: a Ray of its own is started, and ended by `close`, or with this process.

    Attributes:
        token: by which what belongs to the program is told from what belongs to others.

    Raises:
        UsageError: Ray cannot be reached.
    """

    def __init__(self, address: str | None) -> None:
        self.token = secrets.token_hex(4)
        with contextlib.ExitStack() as opened:
            opened.enter_context(_connected_to_ray(address))
            self._ray_node = ray.get_runtime_context().get_node_id()
            relay = Relay(Station(Station.path(self.token, self._ray_node), _RELAY))
            opened.callback(relay.close)
            opened.enter_context(_at(relay.station, self._ray_node))
            self._hosts: list[tuple[str, Any]] = []
            self._others = relay.others
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Disconnect: processes of this program that still run end."""
        self._opened.close()

    def place(
        self, hosted: HostedNode, cpus: float, gpus: float, is_bound: bool, end_program: Callable[[], None]
    ) -> RayNode:
        """Return a node that can be started.

        Args:
            hosted: the node.
            cpus: that it has to itself.
            gpus: the same.
            is_bound: whether it shares memory with this process: then it is on the same Ray node.
            end_program: is called when the node asks for that.
        """
        affinity = NodeAffinitySchedulingStrategy(self._ray_node, soft=False)
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": affinity if is_bound else "SPREAD"}
        return RayNode(hosted, options, self._hosts, self._others, end_program)

    def cpus(self, nodes: int, is_bound: bool) -> float:
        """Return the CPUs for each of so many nodes: one, or its share if there are fewer."""
        total = sum(
            there.get("CPU", 0.0) for name, there in self._resources() if not is_bound or name == self._ray_node
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
def _at(station: Station, ray_node: str) -> Iterator[None]:
    """Connect this process to nodes, and let it share memory with the nodes on its Ray node."""
    before = os.environ.get(MACHINE)
    os.environ[MACHINE] = ray_node
    join(station)
    try:
        yield
    finally:
        join(None)
        if before is None:
            del os.environ[MACHINE]
        else:
            os.environ[MACHINE] = before
