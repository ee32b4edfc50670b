"""The supervisor: it starts nodes, starts the dead and the hung again after a backoff, and ends them.

`ProgramSupervisor` (`program_supervisor.py`) runs the nodes of a program to its end with it. `SupervisedOperator`
(`rlframe.coordinator.operators.supervised`) keeps the workers of elastic running. What a node is (a process of this
machine, a process beside a Ray actor) is in `StartableNode`.
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

    first: float = 0.5  # doubled for each death that follows
    longest: float = 10.0  # from the sixth death on: the default of 3 restarts never waits so long
    healthy: float = 900.0  # of life, after which a death counts as the first; seconds in which it hung do not count

    def delay(self, deaths: int) -> float:
        """Return the seconds to wait after this many deaths in a row."""
        return min(self.first * 2.0 ** min(deaths - 1, 30), self.longest)


@dataclasses.dataclass
class Slot:
    """The place of one node: the process that runs in it, and the counters of its restarts.

    Attributes:
        name: of the node: `actor/1`.
        make: returns the node to start, given its incarnation: a node of a program is always the same, a worker of
            elastic is not.
        rules: of the node's group.
        state: see `NodeState`.
        deadline: time of the next start if the state is WAITING, of the kill if it is ENDING; else infinite.
        running: the process; None while there is none.
        incarnation: number of starts before the newest one.
        deaths: in a row.
        problem: how its latest process died, or why it does not start; empty after a healthy time.
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
    """Keeps nodes running. A subclass puts a `Slot` for each node into `slots`, calls `step` in a loop, and decides in
    `decide_after_exit` what the exit of a process means: it may call `count_death` and `restart_later`.

    `start`, `terminate` and `kill` act on a slot at once, `kill_all` on all. The thread that calls `step` calls them.
    Another thread holds `lock` meanwhile, or puts a function that calls them into `events`.

    Args:
        logs: take the lines of the nodes, and warnings about them; None: they are shown on stderr.
        hang_timeout: seconds without a heartbeat (`rlframe.interprocess.heartbeat`) after which a node is killed, as is
            one whose work makes no progress; that counts as a death. 0: hung nodes are not killed.
        grace: seconds from SIGTERM to SIGKILL.
        backoff: seconds from a death to the restart.

    Attributes:
        slots: by name of the node.
        lock: of the slots; `step` holds it except while it waits.
        events: functions for the next `step` to call.
        node_logs: the argument `logs`.
        backoff: the argument.
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
        self._hang_timeout, self._look_every = hang_timeout, heartbeat_interval(hang_timeout) if hang_timeout else 1.0
        self._clock = SuspendAwareClock(
            2.0 * self._look_every
        )  # stands still while this process does: see `HeartbeatMonitor`
        self.slots: dict[str, Slot] = {}
        self.lock = threading.RLock()
        self.events: Inbox[Callable[[], None]] = Inbox()

    def decide_after_exit(self, slot: Slot, running: RunningNode, state: NodeState) -> None:
        """Decide what follows the exit of a process: a restart, the end of the program, or nothing.

        Args:
            slot: its slot, which is ENDED now.
            running: the process.
            state: of the slot, until the exit: RUNNING, REPLACED or ENDING.
        """
        raise NotImplementedError

    def step(self) -> None:
        """Wait for the next event and handle it; then make the kills and starts that are due."""
        now = time.monotonic()
        due = min((slot.deadline for slot in self.slots.values()), default=math.inf)
        event = None
        with contextlib.suppress(queue.Empty):
            event = self.events.get(max(0.0, min(due - now, self._look_every)))
        with self.lock:
            if event is not None:
                event()
            looked_at = self._clock.tick()
            for slot in list(self.slots.values()):
                if slot.running is not None and slot.state == "RUNNING":
                    slot.running.kill_if_hung(looked_at)
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
        """Count a death: in a row with those before, unless the process lived for a healthy time."""
        slot.deaths = 1 if running.uptime() > self.backoff.healthy else slot.deaths + 1

    def restart_later(self, slot: Slot) -> float:
        """Schedule the next start, and return the seconds until then."""
        delay = self.backoff.delay(slot.deaths)
        slot.state, slot.deadline = "WAITING", time.monotonic() + delay
        return delay

    def terminate(self, slot: Slot) -> None:
        """End a node for good: tell its process to end, and kill it after `grace` seconds."""
        if slot.running is None:
            slot.state, slot.deadline = "ENDED", math.inf
        elif slot.state == "RUNNING":
            slot.state, slot.deadline = "ENDING", time.monotonic() + self._grace
            slot.running.send(signal.SIGTERM)
            slot.running.send(signal.SIGCONT)  # a process that was paused does not handle SIGTERM
        else:  # it is killed already
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
