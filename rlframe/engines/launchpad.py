"""Programs of Launchpad on this machine: the engine `launchpad`, and `launch(program)`, which runs any such program.

Launchpad's own launcher ignores a crashed node, or kills itself (exit code 137) while it ends the others.
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
from rlframe.engines.supervision.nodes import pickle_node, program_processes
from rlframe.engines.supervision.program_supervisor import STOP_SIGNAL, ProgramSupervisor
from rlframe.errors import UsageError, suggest
from rlframe.interprocess.heartbeat import TIMEOUT
from rlframe.interprocess.phases import STARTING


class LaunchpadEngine(ResourceEngine):
    """Builds `program`, a `launchpad.Program`, to which more nodes may be added before `run`.

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
        self._ports: dict[str, int] = {}  # by group, of its first node, where that is known

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
        """See `Engine`: "host:port"."""
        return f"localhost:{self._ports.setdefault(group, pick_free_port())}"

    def handle_of(self, group: str) -> handles.Remote:
        """See `Engine`."""
        return handles.Remote([self.address_of(group)], group)

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine`; as `rlframe.launch`."""
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
    """Run every node of a program as a process, and return when it is over.

    It is over when the nodes of the groups with the rule `ends_program` have ended, when all nodes have, when a node
    calls `lp.stop()`, or on Ctrl-C, SIGTERM and SIGHUP (unless that is ignored). Every process gets SIGTERM then
    (`lp.stop_event()` is set) and is killed after `grace` seconds. No process outlives the caller.

    One line at the start names the nodes that listen: Courier and Reverb do so on all interfaces (SECURITY.md).

    Args:
        program: a `launchpad.Program`.
        rules: by group; a group without rules has no restarts and does not end the program.
        output: where the nodes' lines go; stderr.
        ports: by group, that of its first node (the next ones follow); others are picked.
        logs: the directory in which they are kept, too; None: they are not kept.
        hang_timeout: seconds that a node's interpreter may be silent before the node is killed and started again, as
            one that died; so is one whose work hangs (docs/failures.md). 0: none is.
        watch: see `ProgramSupervisor`.
        grace: seconds that nodes have to end after SIGTERM.

    Returns:
        The number of the signal that ended the program, or None where it ended by itself.

    Raises:
        ProgramError: a node failed for good, or, with the rule `must_save`, while the program was stopped; the message
            names it and has its traceback. A second Ctrl-C kills those that have not ended.
        UsageError: the rules are of a group that the program has not, or a node cannot be pickled.
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
    """Run a node in its process, with Launchpad made ready for it."""
    with STARTING:
        import cloudpickle
        from absl import flags
        from launchpad.launch import worker_manager

        flags.FLAGS(sys.argv[:1])
        flags.FLAGS["lp_termination_notice_secs"].value = -1  # no countdown: the supervisor has one
        worker_manager.WorkerManager(register_in_thread=True)  # SIGTERM becomes `lp.stop_event()`
        function = cloudpickle.loads(pickled)
    function()


def _prepare(program: Any, ports: Mapping[str, int]) -> None:
    """Prepare the nodes for their processes, as `lp.launch` does: give them a context, handles and addresses."""
    from absl import flags
    from launchpad import context  # which defines the flags
    from launchpad.launch import serialization

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1], known_only=True)
    stopper = functools.partial(os.kill, os.getpid(), STOP_SIGNAL)
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
    """Return the nodes of a program that listen, with their ports: "learner (port 1), actor (ports 2, 3)".

    The text is empty if no node listens.
    """
    listed = []
    for group, nodes in program.groups.items():
        ports = [address.resolve().rpartition(":")[2] for node in nodes for address in node.addresses]
        if ports:
            listed.append(f"{group} (port{'s' * (len(ports) > 1)} {', '.join(ports)})")
    return ", ".join(listed)


@dataclasses.dataclass(frozen=True)
class FixedAddress:
    """An address to bind a `launchpad.Address` to: its `AbstractAddressBuilder`."""

    address: str  # "host:port"

    def build(self) -> str:
        """Return the address."""
        return self.address
