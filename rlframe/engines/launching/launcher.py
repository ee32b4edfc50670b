"""`launch(program)`: a Launchpad program in processes whose ends are told.

Launchpad's own launcher ignores a crashed node, or kills itself (exit code 137) while it ends the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rlframe.engines.base import GRACE, Watch
from rlframe.engines.launching.node_main import LAUNCHER_PID, command_of
from rlframe.engines.launching.supervisor import STOP_SIGNAL, GroupPolicy, NodeProcess, Supervisor
from rlframe.engines.logs import NodeLogs
from rlframe.errors import UsageError, suggest
from rlframe.interprocess.heartbeat import TIMEOUT

# One thread for JAX and numerical libraries, no accelerator: for every node but the learner.
ON_CPU = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "NPROC": "1",  # XLA's threads; its flag for a single one takes slower kernels too
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

_NODE_MAIN = "rlframe.engines.launching.node_main"

_OPEN = (
    "{}, and what these start, listen on all interfaces of this machine, without authentication: whoever reaches such "
    "a port can run code as you. Close them (firewall, network namespace), or run where nobody else reaches this "
    "machine: see SECURITY.md."
)


@dataclasses.dataclass(frozen=True)
class KnownAddress:
    """What a `launchpad.Address` can be bound to (an `AbstractAddressBuilder`, by its method)."""

    address: str  # "host:port"

    def build(self) -> str:
        """Returns the address."""
        return self.address


def launch(
    program: Any,
    policies: Mapping[str, GroupPolicy] | None = None,
    output: TextIO | None = None,
    ports: Mapping[str, int] | None = None,
    logs: NodeLogs | None = None,
    hang_timeout: float = TIMEOUT,
    watch: Watch | None = None,
    grace: float = GRACE,
) -> int | None:
    """Runs every node of a program as a process, and returns when it is over.

    It is over when the nodes of the groups that decide have ended, when all nodes have, when a node calls
    `lp.stop()`, or on Ctrl-C, SIGTERM and SIGHUP (unless that is ignored). Every process gets SIGTERM then
    (`lp.stop_event()` is set) and is killed after `grace` seconds. Nothing outlives the caller, whatever it dies of.

    One line at the start names the nodes that listen: Courier and Reverb do so on all interfaces (SECURITY.md).

    Args:
        program: a `launchpad.Program`.
        policies: by group label; a group without one has no restarts and decides nothing.
        output: where the nodes' lines go; stderr.
        ports: by group label, that of the group's first node (the next ones follow); others are picked.
        logs: where the nodes' lines are kept as well; None: nowhere.
        hang_timeout: seconds that a node's interpreter may be silent before the node is killed and started again, as
            one that died; so is one whose work hangs (docs/failures.md). 0: none is.
        watch: see `Supervisor`.
        grace: seconds that nodes have to end after SIGTERM.

    Returns:
        The number of the signal that ended the program, or None where it ended by itself.

    Raises:
        ProgramError: a node failed for good, or one that `saves` while the program was stopped; the message names it
            and has its traceback. A second Ctrl-C kills those that have not ended.
        UsageError: a policy is of a group that the program has not, or a node cannot be pickled.
    """
    policies = policies or {}
    for label in policies:
        if label not in program.groups:
            raise UsageError(
                f"The program has no group {label!r}; it has {', '.join(program.groups)}."
                f"{suggest(label, program.groups)}"
            )
    with _functions(program, ports or {}) as descriptors:
        nodes = []
        for label, group in program.groups.items():
            policy = policies.get(label, GroupPolicy())
            policy = dataclasses.replace(policy, env={**policy.env, LAUNCHER_PID: str(os.getpid())})
            for index in range(len(group)):
                name = f"{label}/{index}" if len(group) > 1 else label
                command = command_of(_NODE_MAIN, str(descriptors[label]), str(index), name)
                nodes.append(NodeProcess(name, command, policy, (descriptors[label],)))
        if listening := _open_ports(program):
            print(f"[launcher] {_OPEN.format(listening)}", file=output or sys.stderr, flush=True)
        return Supervisor(nodes, output, logs, hang_timeout=hang_timeout, watch=watch, grace=grace).run()


@contextlib.contextmanager
def _functions(program: Any, ports: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Prepares the nodes as `lp.launch` does, and gives a descriptor of the pickled functions for each group.

    Descriptors of memory, not files: nothing is left behind when the launcher is killed.
    """
    import cloudpickle
    from absl import flags
    from launchpad import context  # which defines the flags
    from launchpad.launch import serialization

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1], known_only=True)
    stopper = functools.partial(os.kill, os.getpid(), STOP_SIGNAL)
    for group in program.groups.values():
        for node in group:
            node.launch_context.initialize(context.LaunchType.LOCAL_MULTI_PROCESSING, None, stopper)
    for label, group in program.groups.items():
        for node in group:
            for handle in node.input_handles:
                handle.connect(node, label)
    for node in program.get_all_nodes():
        node.bind_addresses()
    for label, first in ports.items():
        for port, address in enumerate((each for node in program.groups[label] for each in node.addresses), first):
            address.bind(KnownAddress(f"localhost:{port}"))
    serialization.enable_lru_cache_pickling_once()
    descriptors: dict[str, int] = {}
    try:
        for label, group in program.groups.items():
            try:
                pickled = cloudpickle.dumps([node.function for node in group])
            except Exception as error:
                raise UsageError(
                    f"The nodes of the group {label!r} cannot be sent to their processes: "
                    f"{type(error).__name__}: {error}. Their arguments must be picklable."
                ) from error
            descriptors[label] = os.memfd_create(f"rlframe {label}")
            with open(f"/proc/self/fd/{descriptors[label]}", "wb") as file:
                file.write(pickled)
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _open_ports(program: Any) -> str:
    """The nodes of a program whose addresses are bound, with their ports: "learner (port 1), actor (ports 2, 3)".

    Empty where no node listens.
    """
    listed = []
    for label, group in program.groups.items():
        ports = [address.resolve().rpartition(":")[2] for node in group for address in node.addresses]
        if ports:
            listed.append(f"{label} (port{'s' * (len(ports) > 1)} {', '.join(ports)})")
    return ", ".join(listed)
