"""The supervisor of a program: it runs all nodes until the program is over, and ends them together."""

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

STOP_SIGNAL = signal.SIGUSR1  # sent to the launcher by a node that ends the program (`lp.stop()`)


class ProgramSupervisor(Supervisor):
    """Runs nodes until those that end the program or all have ended, one fails for good, or `stop` or a signal comes.

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
        self._reported: Any = None  # to `watch`
        self._signal_number: int | None = None
        self._is_stopping = False
        self._is_complete = False  # the nodes that end the program have ended well
        self._failure: str | None = None  # the error of the node that failed for good
        self._unsaved: str | None = None  # the error of a node that should have saved, and did not
        self.add(*nodes)

    def add(self, *nodes: StartableNode) -> None:
        """Add nodes that need this object to be made. Call it before `run`."""
        self.slots.update({node.name: _slot_of(node) for node in nodes})

    def stop(self) -> None:
        """End the program, and well. Any thread may call it."""
        self.events.put(self._end_nodes)

    def run(self) -> int | None:
        """Run the program to its end.

        Returns:
            The number of the signal that ended it (the first one), or None if it ended by itself.

        Raises:
            ProgramError: a node failed more often than it may, or before it had saved when the program was stopped, or
                was killed by a second Ctrl-C; the message has its name and its traceback.
        """
        with signal_handlers((*stop_signals(), STOP_SIGNAL), self._on_signal):
            try:
                for slot in self.slots.values():
                    self.start(slot)
                self._report_states()
                while not self._is_over():
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

    def _is_over(self) -> bool:
        return all(slot.state == "ENDED" for slot in self.slots.values())

    # --- the end of a process

    def decide_after_exit(self, slot: Slot, running: RunningNode, state: NodeState) -> None:
        """Restart a node that died; end the program if that is its end."""
        if state == "ENDING":
            self._check_saved(slot, running)
        elif running.code == 0:
            self._end_if_complete()
        else:
            self._restart_or_fail(slot, running)

    def _check_saved(self, slot: Slot, running: RunningNode) -> None:
        """Note that a node which should save ended badly while the program ended, and warn of any that did."""
        ending = f"{running.exit_reason()} while the program ended"
        if running.code not in (0, -signal.SIGTERM, -signal.SIGKILL):
            self.node_logs.warn(slot.name, ending)
        if slot.rules.must_save and running.code not in (0, -signal.SIGTERM):  # one that SIGTERM kills had not begun
            self._note_unsaved(slot, ending, running.last_output())

    def _end_if_complete(self) -> None:
        """End the program if all nodes that end it have ended well. (One that died waits, or has ended the program.)"""
        ending = [slot for slot in self.slots.values() if slot.rules.ends_program]
        if ending and all(slot.state == "ENDED" for slot in ending):
            self._is_complete = True
            self._end_nodes()

    def _restart_or_fail(self, slot: Slot, running: RunningNode) -> None:
        """Start a node that died again after a pause; end the program if it died too often, or would die again."""
        self.count_death(slot, running)
        reason, restarts = running.exit_reason(), slot.rules.max_restarts
        if running.code == EXIT_PERMANENT or slot.deaths > restarts:
            times = f" (and {slot.deaths - 1} times before)" if slot.deaths > 1 else ""
            self._failure = f"The node {slot.name} {reason}{times}.{running.last_output()}"
            self._end_nodes()
        else:
            delay = self.restart_later(slot)
            self.node_logs.warn(slot.name, f"{reason}: restart {slot.deaths} of {restarts} in {delay:g} s")

    # --- the end of the program

    def _end_nodes(self) -> None:
        """Tell all nodes to end. Those that are to be started again are not, and cannot save."""
        if self._is_stopping:
            return
        self._is_stopping = True
        for slot in self.slots.values():
            if slot.rules.must_save and slot.state == "WAITING":
                self._note_unsaved(slot, "had died, and was not back yet when the program was stopped", "")
            self.terminate(slot)

    def _note_unsaved(self, slot: Slot, reason: str, last_output: str) -> None:
        self._unsaved = f"The node {slot.name} {reason}: its unsaved work is lost.{last_output}"

    def _on_signal(self, number: int) -> None:
        self.events.put(self._end_nodes if number == STOP_SIGNAL else functools.partial(self._end_by_signal, number))

    def _end_by_signal(self, number: int) -> None:
        """End the nodes at the first Ctrl-C or SIGTERM; kill them at the second one."""
        if self._signal_number is not None:
            self.kill_all()
        elif not self._is_stopping:
            count = sum(slot.running is not None for slot in self.slots.values())
            self.node_logs.warn(
                "launcher", f"{signal.Signals(number).name}: ending {count} processes; once more kills them"
            )
        self._signal_number = self._signal_number or number
        self._end_nodes()

    # --- for `watch`

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
