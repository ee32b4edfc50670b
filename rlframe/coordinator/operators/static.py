"""Workers that somebody else starts: the operator is told where they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from rlframe.coordinator.messages import Alive
from rlframe.coordinator.operators.base import Operator, WorkerInfo, WorkerKey, worker_id_of
from rlframe.errors import UsageError
from rlframe.handles import Poll, Remote
from rlframe.transport import Transport

_EVERY = 0.5  # seconds between two pings of a worker
_FORGOTTEN = 5.0  # seconds without an answer after which a worker is not listed
_CONNECTING = 1.0  # seconds that `connect` waits for all to answer


class StaticOperator(Operator):
    """Lists, of the workers at these addresses, those that answer. Starts and ends none.

    A worker says itself which it is, and of which incarnation: who starts it again gives it a higher one. One that
    was reported is listed no more; its next incarnation is. One that was released is: it may be wanted again.

    Args:
        addresses: by role, where each worker is called; the first is to be that role's index 0, and so on.
    """

    def __init__(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self._workers = {
            worker_id_of(role, index): _Worker(role, index, address, self.transport)
            for role, of_role in addresses.items()
            for index, address in enumerate(of_role)
        }
        if not self._workers:
            raise UsageError('A static operator needs the address of a worker: {"learner": ["host:port"], ...}.')
        self._refused: dict[str, int] = {}  # worker_id -> the newest incarnation that is not wanted back
        self._closed = threading.Event()
        self._all_answered = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def connect(self) -> list[WorkerInfo]:
        """Waits, up to a second, for all to answer, and returns those that did."""
        with self._lock:
            if self._thread is None:
                self._closed.clear()
                self._thread = threading.Thread(target=self._watch, name="rlframe static operator", daemon=True)
                self._thread.start()
        self._all_answered.wait(_CONNECTING)
        return self.list()

    def request(self, role: str, n: int) -> None:
        """Changes nothing: there are as many as were given."""

    def list(self) -> list[WorkerInfo]:
        """The workers that answered lately."""
        infos = [worker.info() for worker in self._workers.values()]
        with self._lock:
            return [info for info in infos if info and info.incarnation > self._refused.get(info.worker_id, -1)]

    def report_failed(self, ids: Iterable[WorkerKey]) -> None:
        """Lists these no more."""
        with self._lock:
            for worker_id, incarnation in ids:
                self._refused[worker_id] = max(incarnation, self._refused.get(worker_id, -1))

    def release(self, ids: Iterable[WorkerKey]) -> None:
        """Changes nothing: they wait where they are."""

    def disconnect(self, end_workers: bool = True) -> None:
        """Stops asking; the workers are not this operator's to end."""
        self._closed.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CONNECTING)

    def problems(self) -> dict[str, str]:
        """Which workers do not answer, or are not who they should be."""
        return {worker_id: worker.problem for worker_id, worker in self._workers.items() if worker.problem}

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._closed.is_set():
            for worker in self._workers.values():
                worker.ask()
            if all(worker.answered_at for worker in self._workers.values()):
                self._all_answered.set()
            hurry = not self._all_answered.is_set() and time.monotonic() < began + _CONNECTING
            self._closed.wait(0.02 if hurry else _EVERY)


class _Worker:
    """A worker at an address, and when it last said that it is alive."""

    def __init__(self, role: str, index: int, address: str, transport: Transport) -> None:
        self.role, self.index, self.address = role, index, address
        self.worker_id = worker_id_of(role, index)
        self.answered_at = 0.0
        self.problem = f"{self.worker_id} at {address} has not answered yet."
        self._incarnation = 0
        self._poll = Poll(Remote([address], self.worker_id, transport=transport), "ping")

    def ask(self) -> None:
        """Takes the answer to the ping before, if it has come, and pings again."""
        answer = self._poll()
        if isinstance(answer, Alive):
            self.answered_at, self._incarnation = time.monotonic(), answer.incarnation
            expected = answer.worker_id == self.worker_id
            self.problem = "" if expected else f"At {self.address} is {answer.worker_id}, not {self.worker_id}."
        elif self.answered_at and time.monotonic() > self.answered_at + _FORGOTTEN:
            self.problem = f"{self.worker_id} at {self.address} does not answer any more."

    def info(self) -> WorkerInfo | None:
        """None where it does not answer, or is another."""
        if self.problem:
            return None
        host = self.address.rpartition(":")[0]
        return WorkerInfo(
            self.worker_id, self.role, self.index, self._incarnation, self.address, host, None, stays=True
        )
