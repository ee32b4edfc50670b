"""Workers as wanted against workers as seen: what to start, and what to end.

Pure: time, and what was seen, come in as arguments; nothing here starts or ends anything. So the same rules hold for
processes and actors, and a missed event cannot matter: every round looks at all there is.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from rlframe.coordinator.messages import Role, WorkerInfo, WorkerKey, worker_id_of


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Seconds before a worker that died young is replaced."""

    first: float = 0.5  # doubled for each death that follows
    longest: float = 10.0
    healthy: float = 30.0  # of life, after which a death is no sign of another, and its replacement starts at once


class _State(enum.Enum):
    CLOSED = "closed"  # nothing is wanted of this index
    DUE = "due"  # `incarnation` is to be started
    UP = "up"  # `incarnation` was started, or found


@dataclasses.dataclass
class _Slot:
    """One index of a role."""

    role: Role
    index: int
    incarnation: int = -1  # the newest that was, or is to be, started
    state: _State = _State.CLOSED
    up_since: float = 0.0
    due_at: float = 0.0
    deaths: int = 0  # of those that died young, in succession
    ended_upto: int = -1  # every incarnation up to this one is to be gone
    kill_at: float = 0.0  # when patience with those is over
    is_present: bool = False  # a process of it that has not ended was seen lately
    problem: str = ""

    def open(self, now: float) -> None:
        """Start the next incarnation."""
        self.incarnation, self.state, self.due_at = self.incarnation + 1, _State.DUE, now

    def die(self, now: float, backoff: Backoff, problem: str) -> None:
        """Its newest incarnation is no more, or not for long."""
        if now - self.up_since >= backoff.healthy:
            self.deaths = 0
            self.open(now)
        else:
            self.open(self.delay(now, backoff))
            self.problem = problem + (f" It died {self.deaths} times in succession." if self.deaths > 1 else "")

    def delay(self, now: float, backoff: Backoff) -> float:
        """Counts a failure; returns when to try again."""
        self.deaths += 1
        return now + min(backoff.first * 2 ** min(self.deaths - 1, 30), backoff.longest)


# Workers to start; and workers to end by themselves, or at once (True): that, or what is left of them, is to go. One is
# to be started again where it is not known whether it was: it must not be there twice.
Plan = tuple[list[WorkerInfo], list[tuple[WorkerInfo, bool]]]


class Reconciler:
    """Compare the workers that are wanted with those that were seen.

    Args:
        incarnations: by worker_id, the newest that was ever started: none at or below it is started again.
        backoff: between the deaths of a worker that does not stay up.
        grace: seconds that a released worker is given to end by itself.
    """

    def __init__(self, incarnations: Mapping[str, int], backoff: Backoff, grace: float) -> None:
        self._backoff, self._grace = backoff, grace
        self._wanted: dict[Role, int] = {}
        self._slots: dict[str, _Slot] = {}
        for worker_id, incarnation in incarnations.items():
            role: Any
            role, _, index = worker_id.rpartition("/")
            self._slot(role, int(index)).incarnation = incarnation

    def incarnations(self) -> dict[str, int]:
        """The newest of each worker: to be kept before any of it is started."""
        return {worker_id: slot.incarnation for worker_id, slot in self._slots.items() if slot.incarnation >= 0}

    def problems(self) -> dict[str, str]:
        """Why workers do not stay up, or do not start."""
        return {worker_id: slot.problem for worker_id, slot in self._slots.items() if slot.problem}

    def request(self, role: Role, n: int) -> None:
        """Want `n` workers of this role."""
        self._wanted[role] = n

    def is_wanted(self, key: WorkerKey) -> bool:
        """Whether this incarnation is the one that its index is to have."""
        slot = self._slots.get(key[0])
        return slot is not None and slot.state is _State.UP and slot.incarnation == key[1]

    def report_failed(self, key: WorkerKey, now: float) -> None:
        """Kill and replace this incarnation, unless it is on its way out already."""
        slot = self._slots.get(key[0])
        if slot is not None and self.is_wanted(key):
            slot.ended_upto, slot.kill_at = key[1], now
            slot.die(now, self._backoff, f"{key[0]} was reported as failed.")

    def release(self, key: WorkerKey, now: float) -> None:
        """End this incarnation for good."""
        slot = self._slots.get(key[0])
        if slot is not None and self.is_wanted(key):
            slot.ended_upto, slot.kill_at = key[1], now + self._grace
            slot.state, slot.deaths, slot.problem = _State.CLOSED, 0, ""

    def release_all(self, now: float) -> None:
        """End all workers."""
        self._wanted = dict.fromkeys(self._wanted, 0)
        for slot in self._slots.values():
            slot.ended_upto = max(slot.ended_upto, slot.incarnation)
            slot.kill_at = max(slot.kill_at, now + self._grace) if slot.state is _State.UP else slot.kill_at
            slot.state = _State.CLOSED

    def started(self, worker: WorkerInfo, now: float) -> None:
        """This worker was started."""
        slot = self._slots[worker.worker_id]
        slot.state, slot.up_since = _State.UP, now

    def failed_to_start(self, worker: WorkerInfo, now: float, problem: str) -> None:
        """This worker may, or may not, have been started: the same incarnation is tried again, after a while."""
        slot = self._slots[worker.worker_id]
        slot.due_at, slot.problem = slot.delay(now, self._backoff), problem

    def plan(self, seen: Iterable[WorkerInfo], now: float) -> Plan:
        """Return which workers to start and which to stop, given all that there are now."""
        seen = list(seen)
        live = self._take_in(seen, now)
        for worker_id, slot in self._slots.items():
            if slot.state is _State.UP and slot.incarnation not in live.get(worker_id, ()):
                how = next((s.problem for s in seen if s.key == (worker_id, slot.incarnation)), "")
                slot.die(now, self._backoff, how or f"{worker_id} ended.")
            elif slot.state is _State.UP and slot.deaths and now - slot.up_since >= self._backoff.healthy:
                slot.deaths, slot.problem = 0, ""
        stops = [(one, kill) for one in seen if (kill := self._kills(one, now)) is not None]
        for role, wanted in self._wanted.items():
            self._fit(role, wanted, now)
        due = [slot for slot in self._slots.values() if slot.state is _State.DUE and slot.due_at <= now]
        starts = [WorkerInfo(slot.role, slot.index, slot.incarnation) for slot in due]
        return sorted(starts, key=lambda worker: (worker.role, worker.index)), stops

    def next_due(self) -> float | None:
        """When there is something to start, if nothing changes until then."""
        return min((slot.due_at for slot in self._slots.values() if slot.state is _State.DUE), default=None)

    def _slot(self, role: Role, index: int) -> _Slot:
        return self._slots.setdefault(worker_id_of(role, index), _Slot(role, index))

    def _take_in(self, seen: list[WorkerInfo], now: float) -> dict[str, set[int]]:
        """Adopts what is newer than what is known; returns the live incarnations by worker_id."""
        live: dict[str, set[int]] = {}
        for slot in self._slots.values():
            slot.is_present = False
        for one in seen:
            slot = self._slot(one.role, one.index)
            slot.is_present |= not one.has_ended
            incarnation = one.incarnation
            if not one.has_ended and incarnation > slot.ended_upto:
                live.setdefault(one.worker_id, set()).add(incarnation)
                is_new = incarnation > slot.incarnation
                if is_new or (incarnation == slot.incarnation and slot.state is not _State.UP):
                    slot.incarnation, slot.state, slot.up_since = incarnation, _State.UP, now
                if incarnation == slot.incarnation:
                    slot.problem = one.problem if one.problem or not slot.deaths else slot.problem
            elif one.has_ended and incarnation >= slot.incarnation and slot.state is _State.DUE:
                slot.state, slot.up_since = _State.UP, now  # it had been started, and is gone again: not twice
            slot.incarnation = max(slot.incarnation, incarnation)
        return live

    def _kills(self, one: WorkerInfo, now: float) -> bool | None:
        """Whether it is to go at once, or by itself (False); None: it may stay."""
        slot = self._slots[one.worker_id]
        if one.has_ended:
            return True
        if one.incarnation <= slot.ended_upto:
            return now >= slot.kill_at or one.incarnation < slot.ended_upto
        # Where its index has a newer one it was given up.
        return True if one.incarnation < slot.incarnation else None

    def _fit(self, role: Role, wanted: int, now: float) -> None:
        """Opens or closes slots until there are as many as wanted; what is up is never closed."""
        slots = sorted((slot for slot in self._slots.values() if slot.role == role), key=lambda slot: slot.index)
        is_open = [slot for slot in slots if slot.state is not _State.CLOSED]
        for slot in reversed(is_open[:]):
            if len(is_open) > wanted and slot.state is _State.DUE:
                # The number was never used, or may have been: either way the next one is above it.
                slot.state, slot.deaths, slot.problem = _State.CLOSED, 0, ""
                is_open.remove(slot)
        index = 0
        while len(is_open) < wanted:
            slot = self._slot(role, index)
            if slot.state is _State.CLOSED and not slot.is_present:  # else an old one has yet to go
                slot.open(now)
                is_open.append(slot)
            index += 1
