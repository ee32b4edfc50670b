"""The engine `launchpad`, and `launch(program)`, which runs any Launchpad program on this machine.

Use `launch` instead of `lp.launch`: if a node crashes, `lp.launch` either ignores the crash or kills its own process
(exit code 137) while it ends the other nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rlframe import extras, handles
from rlframe.engines.base import (
    GRACE,
    EngineOptions,
    ResourceEngine,
    Watch,
    pick_free_port,
    warn_about_open_ports,
)
from rlframe.engines.group_rules import GroupRules, rules_by_group
from rlframe.engines.logs import NodeLogs
from rlframe.engines.supervision.nodes import end_program_of, pickle_node, program_processes
from rlframe.engines.supervision.supervisor import ProgramSupervisor
from rlframe.errors import UsageError, suggest
from rlframe.interprocess.heartbeat import STARTING, TIMEOUT


class LaunchpadEngine(ResourceEngine):
    """Builds a `launchpad.Program` in the attribute `program`. Callers may add more nodes to the program before `run`.

    Args:
        options: see `EngineOptions`.
    """

    options = ("max_restarts", "hang_timeout", "grace_seconds", "accelerators")
    requires = ("launchpad",)
    operator = "local"

    def __init__(self, options: EngineOptions) -> None:
        with extras.explain_import_error("--engine launchpad", "launchpad"):
            import launchpad as lp

        super().__init__(options)
        self.program = lp.Program("rlframe")
        self._ports: dict[str, int] = {}  # group -> fixed port of the group's first node

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `Engine`."""
        import launchpad as lp

        with self.program.group(group):
            return self.program.add_node(lp.CourierNode(functools.partial(_construct, constructor), *args, **kwargs))

    def add_reverb(self, group: str, tables: Any, path: str) -> Any:
        """See `RunsReverb`."""
        with extras.explain_import_error("--replay reverb", "reverb"):
            from rlframe.engines.reverb_node import CheckpointedReverbNode

        with self.program.group(group):
            node = CheckpointedReverbNode(tables, path, at_end=self._options.grace_seconds / 2.0)
            return self.program.add_node(node)

    @property
    def groups(self) -> dict[str, int]:
        """See `Engine`."""
        return {group: len(nodes) for group, nodes in self.program.groups.items()}

    def address_of(self, group: str) -> str:
        """See `Engine`. Return "host:port"."""
        return f"localhost:{self._ports.setdefault(group, pick_free_port())}"

    def handle_of(self, group: str) -> handles.Remote:
        """See `Engine`."""
        return handles.Remote([self.address_of(group)], group)

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine` and `launch`."""
        with self._resources:
            return launch(
                self.program,
                rules_by_group(self.groups, self._options.max_restarts, self._options.accelerators),
                ports=self._ports,
                logs=self._options.logs,
                output=self._options.output,
                hang_timeout=self._options.hang_timeout,
                watch=watch,
                grace=self._options.grace_seconds,
            )


def _construct(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with STARTING:
        return constructor(*args, **kwargs)


def launch(
    program: Any,
    rules: Mapping[str, GroupRules] | None = None,
    output: TextIO | None = None,
    ports: Mapping[str, int] | None = None,
    logs: pathlib.Path | None = None,
    hang_timeout: float = TIMEOUT,
    watch: Watch | None = None,
    grace: float = GRACE,
) -> int | None:
    """Run every node of a program as a process, until the program ends.

    The program ends when the nodes of all groups with the rule `ends_program` have ended, when all nodes have ended,
    when a node calls `lp.stop()`, or on Ctrl-C, SIGTERM or SIGHUP (unless SIGHUP is ignored). Then every process gets
    SIGTERM, which sets `lp.stop_event()`, and is killed after `grace` seconds. A second Ctrl-C kills all processes
    immediately. No process outlives the caller.

    At the start, a warning lists the nodes that listen on ports: Courier and Reverb listen on all interfaces
    (SECURITY.md).

    Args:
        program: a `launchpad.Program`.
        rules: rules for each group. A group without rules has no restarts and does not end the program.
        output: stream for the nodes' output; None means stderr.
        ports: for each group, the port of its first node. The second node gets the next port number, and so on.
            Groups without an entry use free ports.
        logs: directory for log files; None means no log files.
        hang_timeout: seconds without a heartbeat after which a node is killed. A node whose work makes no progress is
            also killed (docs/run/failures.md). A killed node is restarted if it has restarts left. 0 means that hung
            nodes are not killed.
        watch: callback for changes of the nodes' states; see `Watch`.
        grace: seconds between SIGTERM and SIGKILL.

    Returns:
        The number of the signal that ended the program, or None if no signal did.

    Raises:
        ProgramError: a node failed and has no restarts left, or a node with the rule `must_save` failed while the
            program ended. The message contains the node's name and traceback.
        UsageError: the rules contain an unknown group, or a node cannot be pickled.
    """
    rules = rules or {}
    for group in rules:
        if group not in program.groups:
            raise UsageError(
                f"The program has no group {group!r}; it has {', '.join(program.groups)}."
                f"{suggest(group, program.groups)}"
            )
    _prepare(program, ports or {})
    pickled = {group: [pickle_node(group, node.function) for node in nodes] for group, nodes in program.groups.items()}
    processes = program_processes(run_launchpad_node, pickled, rules)
    if listening := _open_ports(program):
        warn_about_open_ports(listening, output or sys.stderr)
    return ProgramSupervisor(
        processes, NodeLogs(logs, output), hang_timeout=hang_timeout, watch=watch, grace=grace
    ).run()


def run_launchpad_node(pickled: bytes) -> None:
    """Set up Launchpad in a node's process, and run the node."""
    with STARTING:
        import cloudpickle
        from absl import flags
        from launchpad.launch import worker_manager

        flags.FLAGS(sys.argv[:1])
        flags.FLAGS["lp_termination_notice_secs"].value = -1  # turns off Launchpad's countdown
        worker_manager.WorkerManager(register_in_thread=True)  # makes SIGTERM set `lp.stop_event()`
        function = cloudpickle.loads(pickled)
    function()


def _prepare(program: Any, ports: Mapping[str, int]) -> None:
    """Set the context, handles and addresses of the nodes, as `lp.launch` does."""
    from absl import flags
    from launchpad import context  # this import defines the flags
    from launchpad.launch import serialization

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1], known_only=True)
    stopper = functools.partial(end_program_of, os.getpid())
    for node in program.get_all_nodes():
        node.launch_context.initialize(context.LaunchType.LOCAL_MULTI_PROCESSING, None, stopper)
    for group, nodes in program.groups.items():
        for node in nodes:
            for handle in node.input_handles:
                handle.connect(node, group)
    for node in program.get_all_nodes():
        node.bind_addresses()
    for group, first in ports.items():
        for port, address in enumerate((each for node in program.groups[group] for each in node.addresses), first):
            address.bind(FixedAddress(f"localhost:{port}"))
    serialization.enable_lru_cache_pickling_once()


def _open_ports(program: Any) -> str:
    """Return a text that lists the nodes with ports, such as "learner (port 1), actor (ports 2, 3)", or ""."""
    listed = []
    for group, nodes in program.groups.items():
        ports = [address.resolve().rpartition(":")[2] for node in nodes for address in node.addresses]
        if ports:
            listed.append(f"{group} (port{'s' * (len(ports) > 1)} {', '.join(ports)})")
    return ", ".join(listed)


@dataclasses.dataclass(frozen=True)
class FixedAddress:
    """An `AbstractAddressBuilder` of Launchpad with a known address."""

    address: str  # "host:port"

    def build(self) -> str:
        """Return the address."""
        return self.address
