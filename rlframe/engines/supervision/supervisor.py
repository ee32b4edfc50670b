"""`Supervisor` starts nodes, restarts dead and hung nodes after a backoff, and ends them.

It has two subclasses. `ProgramSupervisor` runs all nodes of a program until its end, and then ends all nodes together.
`SupervisedOperator` (`rlframe.coordinator.operators.supervised`) runs the workers of the topology elastic.
A `StartableNode` can start a process on this machine, or a process of a Ray actor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlframe.engines.base import GRACE, NodeState, NodeStatus, Watch
from rlframe.engines.group_rules import GroupRules
from rlframe.engines.logs import NodeLogs
from rlframe.engines.stopping import signal_handlers, stop_signals
from rlframe.engines.supervision.nodes import EXIT_PERMANENT, STOP_SIGNAL, RunningNode, StartableNode
from rlframe.errors import ProgramError
from rlframe.interprocess.heartbeat import HeartbeatMonitor, SuspendAwareClock, heartbeat_interval
from rlframe.interprocess.waiting import Inbox


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Seconds from the death of a node to its restart."""

    first: float = 0.5  # seconds after the first death; the seconds double with each later death
    longest: float = 10.0  # maximum seconds; the sixth death reaches it, but by default a node has only 3 restarts
    healthy: float = 900.0  # seconds without a death or hang after which the count of deaths starts again

    def delay(self, deaths: int) -> float:
        """Return the seconds to wait after this many deaths in a row."""
        return min(self.first * 2.0 ** min(deaths - 1, 30), self.longest)


@dataclasses.dataclass
class Slot:
    """The supervisor's record of one node, across restarts.

    Attributes:
        name: name of the node, such as `actor/1`.
        make: function (incarnation) -> the node to start. For a program, it always returns the same node. For a worker
            of elastic, it returns a new node for each incarnation.
        rules: rules of the node's group.
        state: see `NodeState`.
        deadline: time of the restart (state WAITING), time of the kill (state ENDING), or infinity (other states).
        running: the process; None if the node has no process.
        incarnation: number of restarts; -1 before the first start.
        deaths: number of deaths in a row.
        problem: how the latest process died, or why the node does not start; "" if the process ran long enough since.
    """

    name: str
    make: Callable[[int], StartableNode]
    rules: GroupRules = dataclasses.field(default_factory=GroupRules)
    state: NodeState = "ENDED"
    deadline: float = math.inf
    running: RunningNode | None = None
    incarnation: int = -1
    deaths: int = 0
    problem: str = ""


class Supervisor:
    """Starts nodes, restarts them after a death or hang, and ends them.

    A subclass adds a `Slot` for each node to `slots` and calls `step` in a loop. Its method `decide_after_exit` handles
    the exit of a process, and may call `count_death` and `restart_later`.

    `start`, `terminate` and `kill` act on one slot. `kill_all` acts on all slots. Call these methods in the thread that
    calls `step`. Another thread must hold `lock` during the call, or put a function with the call into `events`.

    Args:
        logs: receives the output of the nodes, and warnings about them; None means that stderr shows both.
        hang_timeout: seconds without a heartbeat (`rlframe.interprocess.heartbeat`) after which a node is killed. A
            node whose work makes no progress is also killed. Each kill counts as a death. 0 means that hung nodes
            are not killed.
        grace: seconds from SIGTERM to SIGKILL.
        backoff: seconds from a death to the restart.

    Attributes:
        slots: a dict of node name -> slot.
        lock: lock of the slots. `step` holds the lock, except while `step` waits for an event.
        events: functions that the next `step` calls.
        node_logs: the argument `logs`.
        backoff: the argument `backoff`.
    """

    def __init__(
        self,
        logs: NodeLogs | None = None,
        *,
        hang_timeout: float = 0.0,
        grace: float = GRACE,
        backoff: Backoff | None = None,
    ) -> None:
        self.node_logs = logs or NodeLogs()
        self.backoff = backoff or Backoff()
        self._grace = grace
        self._hang_timeout = hang_timeout
        self._poll_interval = heartbeat_interval(hang_timeout) if hang_timeout else 1.0
        self._clock = SuspendAwareClock(2.0 * self._poll_interval)  # see `HeartbeatMonitor`
        self.slots: dict[str, Slot] = {}
        self.lock = threading.RLock()
        self.events: Inbox[Callable[[], None]] = Inbox()

    def decide_after_exit(self, slot: Slot, running: RunningNode, state: NodeState) -> None:
        """Handle the exit of a process: restart the node, end the program, or do nothing.

        Args:
            slot: the node's slot, whose state is now ENDED.
            running: the process.
            state: the slot's state before the exit: RUNNING, REPLACED or ENDING.
        """
        raise NotImplementedError

    def step(self) -> None:
        """Wait for the next event and handle it. Kill hung nodes. Kill or start nodes whose deadline has passed."""
        now = time.monotonic()
        due = min((slot.deadline for slot in self.slots.values()), default=math.inf)
        event = None
        with contextlib.suppress(queue.Empty):
            event = self.events.get(max(0.0, min(due - now, self._poll_interval)))
        with self.lock:
            if event is not None:
                event()
            clock_time = self._clock.tick()
            for slot in list(self.slots.values()):
                if slot.running is not None and slot.state == "RUNNING":
                    slot.running.kill_if_hung(clock_time)
                is_due = slot.deadline <= time.monotonic()
                if is_due and slot.state == "WAITING":
                    self.start(slot)
                elif is_due:
                    self.node_logs.warn(slot.name, f"did not end within {self._grace:g} s: killed")
                    self.kill(slot)

    def start(self, slot: Slot) -> None:
        """Start the next incarnation of a node."""
        slot.state, slot.deadline, slot.incarnation = "RUNNING", math.inf, slot.incarnation + 1
        heartbeat = HeartbeatMonitor(self._hang_timeout, self._clock()) if self._hang_timeout else None
        slot.running = slot.make(slot.incarnation).start(heartbeat, self._on_exit, self.node_logs.write)

    def _on_exit(self, running: RunningNode) -> None:
        self.events.put(functools.partial(self._exit_event, running))

    def _exit_event(self, running: RunningNode) -> None:
        slot = self.slots.get(running.name)
        if slot is not None and slot.running is running:
            state, slot.state = slot.state, "ENDED"
            slot.running, slot.deadline = None, math.inf
            self.decide_after_exit(slot, running, state)

    def count_death(self, slot: Slot, running: RunningNode) -> None:
        """Increase the slot's count of deaths. If the process ran longer than `backoff.healthy`, set the count to 1."""
        slot.deaths = 1 if running.uptime() > self.backoff.healthy else slot.deaths + 1

    def restart_later(self, slot: Slot) -> float:
        """Schedule the node's next start. Return the seconds until this start."""
        delay = self.backoff.delay(slot.deaths)
        slot.state, slot.deadline = "WAITING", time.monotonic() + delay
        return delay

    def terminate(self, slot: Slot) -> None:
        """End a node without a restart: send SIGTERM, and kill its process after `grace` seconds."""
        if slot.running is None:
            slot.state, slot.deadline = "ENDED", math.inf
        elif slot.state == "RUNNING":
            slot.state, slot.deadline = "ENDING", time.monotonic() + self._grace
            slot.running.send(signal.SIGTERM)
            slot.running.send(signal.SIGCONT)  # a suspended process cannot handle SIGTERM
        else:  # the process has already been killed
            slot.state = "ENDING"

    def kill(self, slot: Slot) -> None:
        """Kill the process of a slot, if there is one."""
        slot.deadline = math.inf
        if slot.running is not None:
            slot.running.send(signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill all processes, and wait until they have ended."""
        running = [slot.running for slot in self.slots.values() if slot.running is not None]
        for each in running:
            each.send(signal.SIGKILL)
        for each in running:
            each.wait()


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
        """Restart a failed node after its backoff. If a restart is not allowed or would fail, end the program.

        A restarted actor continues like this: `restart_later` sets the time of the restart, `start` starts a process,
        and `node_main.run_served_node` makes the same objects in it. `Actor.__init__` then claims the rank of the dead
        actor again. See "A process dies or hangs" in docs/project/architecture.md.
        """
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
