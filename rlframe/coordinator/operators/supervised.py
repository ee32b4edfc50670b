"""Operators whose workers are processes of this machine (`LocalOperator`) or run on Ray (`RayOperator`).

Their base class extends the supervisor of nodes (`rlframe.engines.supervision.supervisor`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

from rlframe.coordinator.messages import ROLES, Role, WorkerInfo, WorkerKey, worker_id_of
from rlframe.engines.base import MakeWorker, NodeState
from rlframe.engines.group_rules import ON_CPU, GroupRules
from rlframe.engines.logs import NodeLogs
from rlframe.engines.served_engine import pickle_worker
from rlframe.engines.supervision.node_main import run_served_node
from rlframe.engines.supervision.nodes import EXIT_PERMANENT, RunningNode, StartableNode, StartableProcess, pickle_node
from rlframe.engines.supervision.supervisor import Backoff, Slot, Supervisor
from rlframe.errors import UsageError
from rlframe.handles import Remote
from rlframe.interprocess.heartbeat import TIMEOUT
from rlframe.transport import Transport
from rlframe.transport.ray import RayTransport, current_sockets
from rlframe.transport.sockets import SocketDirectory, SocketTransport

WorkerEnv = Mapping[str, "str | None"]  # environment variables; None removes a variable
MakeNode = Callable[[int, int], StartableNode]  # function of (index, incarnation) that returns a worker's node

# Only the learner uses accelerators and more than one thread.
ENV: Mapping[str, WorkerEnv] = {role: {} if role == "learner" else ON_CPU for role in ROLES}

BACKOFF = Backoff(healthy=30.0)
_LOCAL_TRANSPORT = SocketTransport()
_RAY_ADDRESS = "operator"  # address of a `RayOperator`, on the Ray node where it is created
_EVERY, _GRACE = 0.1, 7.0
_CALL_TIMEOUT = 5.0  # timeout in seconds of a call through a handle
_START_WITHIN = 15.0  # seconds until it counts as a problem that a started worker has no process


class SupervisedOperator(Supervisor):
    """An operator that supervises the workers in a thread of this process. See `Operator`.

    When this process ends, its workers end too. The operator pickles as a handle. If the launcher creates the
    operator, a restarted coordinator can continue with the workers of the earlier coordinator.

    Args:
        nodes: For each role, a function that makes a worker's node.
        transport: Transport for calls to the workers and to this object.
        address: Address at which this operator accepts calls.
        logs, hang_timeout, backoff: See `Supervisor`.
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
            raise UsageError(f"This operator has no workers of the role {role!r}, only {', '.join(self._nodes)}.")
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
        """Add or remove slots until each requested worker has one slot. Keep every slot that has a running worker."""
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
        """Start the next incarnation of a worker. If the start fails, try again later."""
        try:
            super().start(slot)
        except Exception as error:  # keep this thread alive, because all workers need it
            slot.deaths += 1
            slot.problem = f"{slot.name} could not be started: {type(error).__name__}: {error}."
            self.restart_later(slot)

    def decide_after_exit(self, slot: Slot, running: RunningNode, state: NodeState) -> None:
        """Start the next incarnation later, unless the worker was released."""
        if state == "RUNNING":
            reason = _exit_reason(running)
            slot.problem = f"{slot.name} {reason}"
            self.node_logs.warn(slot.name, f"(incarnation {slot.incarnation}) {reason}")
        running.send(signal.SIGKILL)  # kill the processes that the worker has started and left running
        if state != "ENDING":
            self.count_death(slot, running)
            self.restart_later(slot)
        self._adjust_slots(_role_of(slot))

    def _worker_info(self, slot: Slot) -> WorkerInfo:
        running, problem = slot.running, slot.problem
        info = WorkerInfo(_role_of(slot), int(slot.name.partition("/")[2]), slot.incarnation, is_live=False)
        if slot.deaths > 1:
            problem += f" It died {slot.deaths} times in a row."
        if running is None:
            return dataclasses.replace(info, problem=problem)
        if running.uptime() > self.backoff.healthy:
            problem = ""
        if running.pid is None and running.uptime() > _START_WITHIN:
            problem = f"Ray has not started {slot.name} yet. Check that a Ray node has a free CPU."
        return dataclasses.replace(
            info,
            address=running.serves_at,
            host=running.host if running.pid is not None else "",
            pid=running.pid,
            is_live=slot.state == "RUNNING" and not running.hang_reason,
            problem=problem,
        )


class OperatorHandle(Remote):
    """A handle to an operator in another process. See `Operator`: all methods except `close` call the operator.

    Args:
        kind: Name of the operator's class.
        address: Address of the operator.
        transport: Transport for calls to the operator and its workers.
    """

    every, grace = _EVERY, _GRACE

    def __init__(self, kind: str, address: str, transport: Transport) -> None:
        super().__init__([address], "launcher", _CALL_TIMEOUT, None, transport)
        self.kind, self.address, self.transport = kind, address, transport

    def __reduce__(self) -> tuple[Any, ...]:
        return OperatorHandle, (self.kind, self.address, self.transport)

    def close(self) -> None:
        """Do nothing: the workers belong to the other process."""


def _role_of(slot: Slot) -> Role:
    return cast(Role, slot.name.partition("/")[0])


def _exit_reason(running: RunningNode) -> str:
    if running.code == 0:
        return "ended by itself."
    again = " It would fail again." if running.code == EXIT_PERMANENT else ""
    last = running.last_line
    return f"{running.exit_reason()}.{again}" + (f" Its last line: {last}" if last else "")


def _wake() -> None:
    """Do nothing. As an event in the queue, this function wakes the supervisor's thread."""


class LocalOperator(SupervisedOperator):
    """An operator that runs workers as processes of this machine. See `Operator`.

    The workers' sockets are accessible only to the current user.

    Args:
        makers: For each role, a function of (worker_id, index, incarnation) that returns a worker. The operator calls
            it in the worker's process.
        env: For each role, additional environment variables of the workers; None removes a variable. The default for a
            role is `ENV[role]`.
        output: Stream for the workers' output. The default is stderr.
        logs: Directory for a copy of the output, in `ROLE-INDEX.log`. None writes no copy.
        hang_timeout, backoff: See `Supervisor`.

    Raises:
        UsageError: A maker cannot be pickled.
    """

    def __init__(
        self,
        makers: Mapping[Role, MakeWorker],
        *,
        env: Mapping[str, WorkerEnv] | None = None,
        output: TextIO | None = None,
        logs: pathlib.Path | None = None,
        hang_timeout: float = TIMEOUT,
        backoff: Backoff = BACKOFF,
    ) -> None:
        rules = {role: GroupRules(env=variables) for role, variables in {**ENV, **(env or {})}.items()}
        for role, make in makers.items():
            pickle_node(role, make)  # if a maker cannot be pickled, raise now, not at the first start
        self._sockets = SocketDirectory()
        super().__init__(
            {role: functools.partial(self._node, role, make, rules[role]) for role, make in makers.items()},
            _LOCAL_TRANSPORT,
            f"{self._sockets.path}/operator",
            logs=NodeLogs(logs, output),
            hang_timeout=hang_timeout,
            backoff=backoff,
        )

    def close(self) -> None:
        """See `Operator`."""
        super().close()
        self._sockets.close()

    def _node(self, role: Role, make: MakeWorker, rules: GroupRules, index: int, incarnation: int) -> StartableProcess:
        name, address = worker_id_of(role, index), f"{self._sockets.path}/{role}-{index}-{incarnation}"
        # Pickle only now, because Launchpad addresses in the maker cannot be resolved before the program runs.
        pickled = pickle_worker(_LOCAL_TRANSPORT, address, pickle_node(role, make), name, index, incarnation)
        return StartableProcess.of(name, _run_worker, pickled, rules, address)


def _run_worker(pickled: bytes) -> None:
    run_served_node(pickled, end=lambda: None)  # the end of a worker does not end the program


class RayOperator(SupervisedOperator):
    """An operator that runs workers on a Ray cluster. See `Operator`. Its process must be connected to Ray.

    Args:
        nodes: See `RayEngine.worker_nodes`.
        output: Stream for the workers' output. The default is stderr.
        logs: Directory for a copy of the output. None writes no copy.
        hang_timeout: See `Supervisor`.
    """

    def __init__(
        self,
        nodes: Mapping[Role, MakeNode],
        *,
        output: TextIO | None = None,
        logs: pathlib.Path | None = None,
        hang_timeout: float = 0.0,
    ) -> None:
        self._remove = current_sockets().open(current_sockets().socket(_RAY_ADDRESS))  # also removed after SIGKILL
        super().__init__(nodes, RayTransport(), _RAY_ADDRESS, logs=NodeLogs(logs, output), hang_timeout=hang_timeout)

    def close(self) -> None:
        """See `Operator`."""
        if not self._is_closed:
            super().close()
            self._remove()
