"""`Supervisor` starts nodes, restarts dead and hung nodes after a backoff, and ends them.

It has two subclasses. `ProgramSupervisor` (`program_supervisor.py`) runs the nodes of a program.
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
from collections.abc import Callable

from rlframe.engines.base import GRACE, NodeState
from rlframe.engines.group_rules import GroupRules
from rlframe.engines.logs import NodeLogs
from rlframe.engines.supervision.nodes import RunningNode, StartableNode
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
        self._grace, self.backoff = grace, backoff or Backoff()
        self._hang_timeout, self._poll_interval = (
            hang_timeout,
            heartbeat_interval(hang_timeout) if hang_timeout else 1.0,
        )
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
