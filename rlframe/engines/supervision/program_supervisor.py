"""`ProgramSupervisor` runs all nodes of a program until its end, and then ends all nodes together."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Sequence
from typing import Any

from rlframe.engines.base import GRACE, NodeState, NodeStatus, Watch
from rlframe.engines.logs import NodeLogs
from rlframe.engines.stopping import signal_handlers, stop_signals
from rlframe.engines.supervision.nodes import EXIT_PERMANENT, RunningNode, StartableNode
from rlframe.engines.supervision.supervisor import Backoff, Slot, Supervisor
from rlframe.errors import ProgramError

STOP_SIGNAL = signal.SIGUSR1  # a node sends this signal to the launcher to end the program, for example in `lp.stop()`


class ProgramSupervisor(Supervisor):
    """Runs the nodes of a program until its end.

    The program ends when the first of these events happens: all nodes with the rule `ends_program` have ended, all
    nodes have ended, a node fails and has no restarts left, `stop` is called, or a signal arrives.

    Args:
        nodes: the nodes.
        logs, hang_timeout, backoff: see `Supervisor`.
        watch: see `Watch`.
        grace: seconds from SIGTERM to SIGKILL when the program ends.
    """

    def __init__(
        self,
        nodes: Sequence[StartableNode],
        logs: NodeLogs | None = None,
        *,
        hang_timeout: float = 0.0,
        watch: Watch | None = None,
        grace: float = GRACE,
        backoff: Backoff | None = None,
    ) -> None:
        super().__init__(logs, hang_timeout=hang_timeout, grace=grace, backoff=backoff)
        self._watch = watch
        self._reported: Any = None  # the arguments of the latest call of `watch`
        self._signal_number: int | None = None
        self._is_stopping = False
        self._is_complete = False  # whether all nodes with the rule `ends_program` have exited with code 0
        self._failure: str | None = None  # error of a node that failed and has no restarts left
        self._unsaved: str | None = None  # error of a node that should have saved but did not
        self.add(*nodes)

    def add(self, *nodes: StartableNode) -> None:
        """Add nodes. Call this method before `run`."""
        self.slots.update({node.name: _slot_of(node) for node in nodes})

    def stop(self) -> None:
        """End the program without an error. Any thread may call this method."""
        self.events.put(self._end_nodes)

    def run(self) -> int | None:
        """Run the program to its end.

        Returns:
            The number of the first signal that ended the program, or None if no signal did.

        Raises:
            ProgramError: a node failed and has no restarts left, or a node with the rule `must_save` failed or was
                killed while the program ended. The message contains the node's name and traceback.
        """
        with signal_handlers((*stop_signals(), STOP_SIGNAL), self._on_signal):
            try:
                for slot in self.slots.values():
                    self.start(slot)
                self._report_states()
                while any(slot.state != "ENDED" for slot in self.slots.values()):
                    self.step()
                    self._report_states()
            finally:
                self.kill_all()
                self.node_logs.close()
        if self._failure is not None:
            raise ProgramError(self._failure)
        if self._unsaved is not None and not self._is_complete:
            raise ProgramError(self._unsaved)
        return self._signal_number

    # --- the end of a process

    def decide_after_exit(self, slot: Slot, running: RunningNode, state: NodeState) -> None:
        """See `Supervisor`. Restart the node or end the program, depending on the exit code and the node's rules."""
        if state == "ENDING":
            self._check_saved(slot, running)
        elif running.code == 0:
            self._end_if_complete()
        else:
            self._restart_or_fail(slot, running)

    def _check_saved(self, slot: Slot, running: RunningNode) -> None:
        """Warn about a node that failed while the program ended. Record the failure if the node must save."""
        ending = f"{running.exit_reason()} while the program ended"
        if running.code not in (0, -signal.SIGTERM, -signal.SIGKILL):
            self.node_logs.warn(slot.name, ending)
        # A node that SIGTERM killed had not started its work. It has nothing to save.
        if slot.rules.must_save and running.code not in (0, -signal.SIGTERM):
            self._note_unsaved(slot, ending, running.last_output())

    def _end_if_complete(self) -> None:
        """End the program if all nodes with the rule `ends_program` have ended with exit code 0.

        A failed node needs no check here: its state is WAITING, or the program is already ending.
        """
        ending = [slot for slot in self.slots.values() if slot.rules.ends_program]
        if ending and all(slot.state == "ENDED" for slot in ending):
            self._is_complete = True
            self._end_nodes()

    def _restart_or_fail(self, slot: Slot, running: RunningNode) -> None:
        """Restart a failed node after its backoff. If a restart is not allowed or would fail, end the program."""
        self.count_death(slot, running)
        reason, restarts = running.exit_reason(), slot.rules.max_restarts
        if running.code == EXIT_PERMANENT or slot.deaths > restarts:
            before = slot.deaths - 1
            times = f" (and {before} time{'s' * (before > 1)} before)" if before else ""
            self._failure = f"The node {slot.name} {reason}{times}.{running.last_output()}"
            self._end_nodes()
        else:
            delay = self.restart_later(slot)
            self.node_logs.warn(slot.name, f"{reason}: restart {slot.deaths} of {restarts} in {delay:g} s")

    # --- the end of the program

    def _end_nodes(self) -> None:
        """Terminate all nodes. A node that waits for its restart will not restart, so it cannot save its work."""
        if self._is_stopping:
            return
        self._is_stopping = True
        for slot in self.slots.values():
            if slot.rules.must_save and slot.state == "WAITING":
                self._note_unsaved(slot, "had died and was not restarted before the program was stopped", "")
            self.terminate(slot)

    def _note_unsaved(self, slot: Slot, reason: str, last_output: str) -> None:
        self._unsaved = f"The node {slot.name} {reason}: its unsaved work is lost.{last_output}"

    def _on_signal(self, number: int) -> None:
        self.events.put(self._end_nodes if number == STOP_SIGNAL else functools.partial(self._end_by_signal, number))

    def _end_by_signal(self, number: int) -> None:
        """Terminate the nodes at the first stop signal. Kill them at the second signal."""
        if self._signal_number is not None:
            self.kill_all()
        elif not self._is_stopping:
            count = sum(slot.running is not None for slot in self.slots.values())
            self.node_logs.warn(
                "launcher", f"{signal.Signals(number).name}: ending {count} processes; repeat to kill them"
            )
        self._signal_number = self._signal_number or number
        self._end_nodes()

    # --- calls of `watch`

    def _report_states(self) -> None:
        """Call `watch` if a state has changed."""
        now = self._is_stopping, [self._status_of(slot) for slot in self.slots.values()]
        if self._watch is not None and now != self._reported:
            self._reported = now
            self._watch(*now)

    def _status_of(self, slot: Slot) -> NodeStatus:
        running = slot.running
        if running is None:
            return NodeStatus(slot.name, slot.state, slot.incarnation)
        status = NodeStatus(slot.name, slot.state, slot.incarnation, running.pid, running.host)
        if running.heartbeat is None:
            return status
        return dataclasses.replace(status, phase=running.heartbeat.phase, silent_for=round(running.heartbeat.silent))


def _slot_of(node: StartableNode) -> Slot:
    return Slot(node.name, lambda _: node, node.rules)
