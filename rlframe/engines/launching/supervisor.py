"""The processes of a program: their output prefixed, the dead and the hung restarted, all of them ended together.

Engines say which processes there are (`SupervisedNode`) and what the end of each means; nothing here knows what runs
in them.
"""

from __future__ import annotations

import collections
import functools
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rlframe.engines.base import GRACE, Watch, node_status
from rlframe.engines.launching.running import FOR_GOOD, RunningNode, SupervisedNode
from rlframe.engines.logs import NodeLogs, show
from rlframe.engines.stopping import handling, stop_signals
from rlframe.errors import ProgramError
from rlframe.interprocess.heartbeat import Clock, HeartbeatMonitor, interval_of
from rlframe.interprocess.inbox import Inbox

_BACKOFF, _LONGEST_BACKOFF = 0.5, 10.0  # seconds before the first restart, doubled for each that follows
_HEALTHY = 900.0  # seconds of life after which a death is as the first; those in which it hung do not count

STOP_SIGNAL = signal.SIGUSR1  # sent to the launcher by a node that ends the program (`lp.stop()`)


class Supervisor:
    """Runs processes until one that decides has ended, all have, one fails for good, or it is told to stop.

    Args:
        nodes: the processes.
        output: where their lines go, each behind the name of its node.
        logs: where they are kept as well, by node; None: nowhere.
        hang_timeout: seconds without a heartbeat (`rlframe.interprocess.heartbeat`) after which a process is killed,
            as is one whose work makes no progress; that counts as a death. 0: none is, and none needs to beat.
        watch: is told whether the processes are being ended, and `node_status` of each, when that changes.
        grace: seconds from SIGTERM to SIGKILL when the program ends.
    """

    def __init__(
        self,
        nodes: Sequence[SupervisedNode],
        output: TextIO | None = None,
        logs: NodeLogs | None = None,
        *,
        hang_timeout: float = 0.0,
        watch: Watch | None = None,
        grace: float = GRACE,
    ) -> None:
        self._nodes = list(nodes)
        self._watch = watch
        self._told: Any = None  # to `watch`
        self._starts: dict[str, int] = collections.defaultdict(int)
        self._logs = logs if logs is not None else NodeLogs(None)
        self._output = output if output is not None else sys.stderr
        self._write_lock = threading.Lock()
        self._events: Inbox[Callable[[], None]] = Inbox()  # each is what to do about it
        self._running: dict[str, RunningNode] = {}
        self._deaths: dict[str, int] = collections.defaultdict(int)
        self._restart_at: dict[str, float] = {}
        self._ended_well: set[str] = set()
        self._signal: int | None = None
        self._stopping_since: float | None = None
        self._out_of_patience = False
        self._is_complete = False  # those that decide have ended well
        self._failure: str | None = None
        self._unsaved: str | None = None
        self._grace = grace
        self._hang_timeout, self._look_every = hang_timeout, interval_of(hang_timeout) if hang_timeout else 1.0
        self._clock = Clock(2.0 * self._look_every)  # stands still while this process does: see `HeartbeatMonitor`

    def add(self, *nodes: SupervisedNode) -> None:
        """Adds nodes that need it to be made: before it runs."""
        self._nodes += nodes

    def stop(self) -> None:
        """Ends the program, and well. Any thread may call it."""
        self._events.put(self._stop)

    def take_line(self, name: str, text: str) -> None:
        """Shows and keeps a line of a process, be it started from here or not. Any thread may call it."""
        self._logs.write(name, text)
        self._show(name, text)

    def run(self) -> int | None:
        """Runs to the end.

        Returns:
            The number of the signal that ended it (the first one), or None where it ended by itself.

        Raises:
            ProgramError: a node failed, more often than it may, or before it had saved what it should when the program
                was stopped, or was killed by a second Ctrl-C; the message has its name and its traceback.
        """
        with handling((*stop_signals(), STOP_SIGNAL), self._on_signal):
            try:
                for node in self._nodes:
                    self._start(node)
                self._tell()
                while not self._is_over():
                    self._handle_event()
                    self._kill_late()
                    self._kill_hung()
                    self._restart_due()
                    self._tell()
            finally:
                self._kill_all()
                self._logs.close()
        if self._failure is not None:
            raise ProgramError(self._failure)
        if self._unsaved is not None and not self._is_complete:
            raise ProgramError(self._unsaved)
        return self._signal

    def _is_over(self) -> bool:
        return not self._running and (self._stopping_since is not None or not self._restart_at)

    def _handle_event(self) -> None:
        """Waits for the next event, and does what it asks for."""
        now = time.monotonic()
        waits = [at - now for at in self._restart_at.values()] if self._stopping_since is None else []
        if self._stopping_since is not None and not self._out_of_patience:
            waits.append(self._stopping_since + self._grace - now)
        try:
            event = self._events.get(max(0.0, min([*waits, self._look_every])))
        except queue.Empty:
            return
        event()

    def _has_ended(self, running: RunningNode) -> None:
        self._events.put(functools.partial(self._ended, running))

    def _signalled(self, number: int) -> None:
        if self._signal is not None:
            self._kill_all()
        elif self._stopping_since is None:
            name = signal.Signals(number).name
            self._say("launcher", f"{name}: ending {len(self._running)} processes; once more kills them")
        self._signal = self._signal or number
        self._stop()

    def _kill_late(self) -> None:
        """Kills those that have not ended when the patience with them has."""
        if self._out_of_patience or self._stopping_since is None:
            return
        if time.monotonic() > self._stopping_since + self._grace:
            self._out_of_patience = True
            for running in self._running.values():
                self._say(running.name, f"did not end within {self._grace:g} s: killed")
            self._kill_all()

    def _ended(self, running: RunningNode) -> None:
        if self._running.get(running.name) is not running:
            return
        del self._running[running.name]
        node = next(node for node in self._nodes if node.name == running.name)
        code, how = running.code, running.how()
        if self._stopping_since is not None:
            if code not in (0, -signal.SIGTERM, -signal.SIGKILL):
                self._say(node.name, f"{how} while the program ended")
            # One that SIGTERM kills had not begun.
            if node.policy.saves and code not in (0, -signal.SIGTERM):
                self._lose(node, f"{how} while the program ended", running.last_words())
            return
        if code == 0:
            self._ended_well.add(node.name)
            deciding = [other.name for other in self._nodes if other.policy.decides]
            if node.policy.decides and self._ended_well.issuperset(deciding):
                self._is_complete = True
                self._stop()
            return
        if running.lived() > _HEALTHY:
            self._deaths[node.name] = 0
        self._deaths[node.name] += 1
        deaths = self._deaths[node.name]
        if code == FOR_GOOD or deaths > node.policy.max_restarts:
            times = f" (and {deaths - 1} times before)" if deaths > 1 else ""
            self._failure = f"The node {node.name} {how}{times}.{running.last_words()}"
            self._stop()
            return
        delay = min(_BACKOFF * 2 ** (deaths - 1), _LONGEST_BACKOFF)
        self._say(node.name, f"{how}: restart {deaths} of {node.policy.max_restarts} in {delay:g} s")
        self._restart_at[node.name] = time.monotonic() + delay

    def _kill_hung(self) -> None:
        now = self._clock.tick()
        if self._stopping_since is not None:  # who does not end is killed in any case
            return
        for running in self._running.values():
            if running.pulse is not None and not running.hangs:
                running.hangs = running.pulse.problem(now)
                if running.hangs:
                    running.send(signal.SIGKILL)

    def _restart_due(self) -> None:
        if self._stopping_since is not None:
            return
        for node in self._nodes:
            if self._restart_at.get(node.name, float("inf")) <= time.monotonic():
                del self._restart_at[node.name]
                self._start(node)

    def _start(self, node: SupervisedNode) -> None:
        # From this thread, which lives as long as the program: a parent-death signal is about the parent's thread.
        self._starts[node.name] += 1
        pulse = HeartbeatMonitor(self._hang_timeout, self._clock()) if self._hang_timeout else None
        self._running[node.name] = node.start(pulse, self._has_ended, self.take_line)

    def _stop(self) -> None:
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            for node in self._nodes:
                if node.policy.saves and node.name in self._restart_at:
                    self._lose(node, "had died, and was not back yet when the program was stopped", "")
            for running in self._running.values():
                running.send(signal.SIGTERM)
                running.send(signal.SIGCONT)  # one that was paused would not hear of it

    def _tell(self) -> None:
        if self._watch is None:
            return
        now = self._stopping_since is not None, [self._status_of(node) for node in self._nodes]
        if now != self._told:
            self._told = now
            self._watch(*now)

    def _status_of(self, node: SupervisedNode) -> dict[str, Any]:
        running = self._running.get(node.name)
        state = "LOST" if node.name in self._restart_at else "GONE"  # as a `WorkerState` of a coordinator is called
        pid = None if running is None else running.pid
        status = node_status(node.name, self._starts[node.name] - 1, pid, state if running is None else "BUSY")
        if running is not None:
            status.update(host=running.host)
        if running is not None and running.pulse is not None:
            status.update(phase=running.pulse.phase, silent_for=round(running.pulse.silent))
        return status

    def _lose(self, node: SupervisedNode, how: str, last_words: str) -> None:
        self._unsaved = f"The node {node.name} {how}: what it had not saved is lost.{last_words}"

    def _kill_all(self) -> None:
        for running in self._running.values():
            running.send(signal.SIGKILL)
        for running in self._running.values():
            running.wait()

    def _on_signal(self, number: int) -> None:
        self._events.put(self._stop if number == STOP_SIGNAL else functools.partial(self._signalled, number))

    def _say(self, name: str, text: str) -> None:
        self._logs.warn(name, text)
        self._show(name, text)

    def _show(self, name: str, text: str) -> None:
        with self._write_lock:
            show(self._output, name, text)
