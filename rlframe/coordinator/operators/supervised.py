"""Workers under the supervisor that also runs the nodes of programs (`rlframe.engines.supervision.supervisor`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from rlframe.coordinator.messages import Role, WorkerInfo, WorkerKey, worker_id_of
from rlframe.engines.base import NodeState
from rlframe.engines.logs import NodeLogs
from rlframe.engines.supervision.nodes import EXIT_PERMANENT, RunningNode, StartableNode
from rlframe.engines.supervision.supervisor import Backoff, Slot, Supervisor
from rlframe.errors import UsageError
from rlframe.handles import Remote
from rlframe.transport import Transport

MakeNode = Callable[[int, int], StartableNode]  # (index, incarnation) -> the node of a worker

BACKOFF = Backoff(healthy=30.0)
_EVERY, _GRACE = 0.1, 7.0
_CALL_TIMEOUT = 5.0  # seconds for a call by a handle
_START_WITHIN = 15.0  # seconds after which it is a problem that a worker has no process yet


class SupervisedOperator(Supervisor):
    """Keeps the workers of each role running, in a thread of this process. See `Operator`.

    They end with this process at the latest. The operator pickles as a handle: if the launcher makes it, the
    coordinator may die, and its successor finds the workers.

    Args:
        nodes: by role, makes the nodes of the workers.
        transport: by which the workers are called, and this object by its handles.
        address: of this object.
        logs, hang_timeout, backoff: see `Supervisor`.
    """

    every, grace = _EVERY, _GRACE

    def __init__(
        self,
        nodes: Mapping[Role, MakeNode],
        transport: Transport,
        address: str,
        *,
        logs: NodeLogs | None = None,
        hang_timeout: float = 0.0,
        backoff: Backoff = BACKOFF,
    ) -> None:
        super().__init__(logs, hang_timeout=hang_timeout, grace=_GRACE, backoff=backoff)
        self.transport, self._nodes = transport, nodes
        self._wanted: dict[Role, int] = {}
        self._is_closed = False
        calls: list[Callable[..., Any]] = [self.list_workers, self.scale, self.replace, self.release]
        self._server = transport.serve({call.__name__: call for call in calls}, address)
        self._thread = threading.Thread(target=self._run, name="rlframe supervisor", daemon=True)
        self._thread.start()

    def __reduce__(self) -> tuple[Any, ...]:
        return OperatorHandle, (type(self).__name__, self._server.address, self.transport)

    def list_workers(self) -> list[WorkerInfo]:
        """See `Operator`."""
        with self.lock:
            return [self._worker_info(slot) for slot in self.slots.values() if slot.state != "ENDED"]

    def scale(self, role: Role, n: int) -> None:
        """See `Operator`."""
        if n and role not in self._nodes:
            raise UsageError(f"There are no workers of the role {role!r}, only {', '.join(self._nodes)}.")
        with self.lock:
            self._wanted[role] = n
            self._adjust_slots(role)
        self.events.put(_wake)

    def replace(self, key: WorkerKey) -> None:
        """See `Operator`."""
        with self.lock:
            slot = self.slots.get(key[0])
            if slot is not None and slot.incarnation == key[1] and slot.state == "RUNNING":
                slot.state, slot.problem = "REPLACED", f"{slot.name} was replaced."
                self.kill(slot)

    def release(self, key: WorkerKey) -> None:
        """See `Operator`."""
        with self.lock:
            slot = self.slots.get(key[0])
            if slot is not None and slot.incarnation == key[1] and slot.running is not None:
                self._end_slot(slot)
                self._adjust_slots(_role_of(slot))
        self.events.put(_wake)

    def close(self) -> None:
        """Kill the workers that still run."""
        if not self._is_closed:
            self._is_closed = True
            self.events.put(_wake)
            self._thread.join()
            self.kill_all()
            self._server.stop()
            self.node_logs.close()

    def _run(self) -> None:
        while not self._is_closed:
            self.step()

    def _adjust_slots(self, role: Role) -> None:
        """Want as many slots as are asked for; a running one is never given up here."""
        slots = [
            slot for slot in self.slots.values() if _role_of(slot) == role and slot.state not in ("ENDING", "ENDED")
        ]
        for slot in reversed(slots[:]):
            if len(slots) > self._wanted[role] and slot.state == "WAITING":
                self._end_slot(slot)
                slots.remove(slot)
        for index in itertools.count():
            if len(slots) >= self._wanted[role]:
                break
            slot = self._slot(role, index)
            if slot.state == "ENDED":
                slot.state, slot.deadline = "WAITING", time.monotonic()
                slots.append(slot)

    def _end_slot(self, slot: Slot) -> None:
        slot.deaths, slot.problem = 0, ""
        self.terminate(slot)

    def _slot(self, role: Role, index: int) -> Slot:
        name = worker_id_of(role, index)
        return self.slots.setdefault(name, Slot(name, functools.partial(self._nodes[role], index)))

    def start(self, slot: Slot) -> None:
        """Start the next incarnation of a worker; later, if that fails."""
        try:
            super().start(slot)
        except Exception as error:  # no room for a process, or any error of Ray: the other workers need this thread
            slot.deaths += 1
            slot.problem = f"{slot.name} could not be started: {type(error).__name__}: {error}."
            self.restart_later(slot)

    def decide_after_exit(self, slot: Slot, running: RunningNode, state: NodeState) -> None:
        """Start the next incarnation later, unless the worker was released."""
        if state == "RUNNING":
            reason = _exit_reason(running)
            slot.problem = f"{slot.name} {reason}"
            self.node_logs.warn(slot.name, f"(incarnation {slot.incarnation}) {reason}")
        running.send(signal.SIGKILL)  # to the processes that it started, and left
        if state != "ENDING":
            self.count_death(slot, running)
            self.restart_later(slot)
        self._adjust_slots(_role_of(slot))

    def _worker_info(self, slot: Slot) -> WorkerInfo:
        running, problem = slot.running, slot.problem
        info = WorkerInfo(_role_of(slot), int(slot.name.partition("/")[2]), slot.incarnation, is_live=False)
        if slot.deaths > 1:
            problem += f" It died {slot.deaths} times in succession."
        if running is None:
            return dataclasses.replace(info, problem=problem)
        if running.uptime() > self.backoff.healthy:
            problem = ""
        if running.pid is None and running.uptime() > _START_WITHIN:
            problem = f"{slot.name} has not been started by Ray yet: its nodes may have no CPU to spare."
        return dataclasses.replace(
            info,
            address=running.serves_at,
            host=running.host if running.pid is not None else "",
            pid=running.pid,
            is_live=slot.state == "RUNNING" and not running.hang_reason,
            problem=problem,
        )


class OperatorHandle:
    """An operator in another process. See `Operator`.

    Args:
        kind: the name of its class.
        address: at which it is called.
        transport: by which it and its workers are called.
    """

    every, grace = _EVERY, _GRACE

    def __init__(self, kind: str, address: str, transport: Transport) -> None:
        self.kind, self.transport = kind, transport
        self._operator = Remote([address], "launcher", _CALL_TIMEOUT, None, transport)

    def list_workers(self) -> list[WorkerInfo]:
        """See `Operator`."""
        return self._operator.list_workers()

    def scale(self, role: Role, n: int) -> None:
        """See `Operator`."""
        self._operator.scale(role, n)

    def replace(self, key: WorkerKey) -> None:
        """See `Operator`."""
        self._operator.replace(key)

    def release(self, key: WorkerKey) -> None:
        """See `Operator`."""
        self._operator.release(key)

    def close(self) -> None:
        """See `Operator`: the workers belong to the other process."""


def _role_of(slot: Slot) -> Role:
    return cast(Role, slot.name.partition("/")[0])


def _exit_reason(running: RunningNode) -> str:
    if running.code == 0:
        return "ended by itself."
    again = " It would fail again." if running.code == EXIT_PERMANENT else ""
    last = running.last_line
    return f"{running.exit_reason()}.{again}" + (f" Its last line: {last}" if last else "")


def _wake() -> None:
    """Wake the supervisor's thread."""
