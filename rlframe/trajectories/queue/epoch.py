"""Everything that starts afresh with a new registration or a reset: settings, environments, what waits, what is out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from rlframe.trajectories.messages import Registration
from rlframe.trajectories.queue import reports
from rlframe.trajectories.queue.batching import StartTimeFairQueue, TakenUnit, form
from rlframe.trajectories.queue.environments import Env, Environments
from rlframe.trajectories.queue.leases import AddResult, IdempotencyKeys, LeasedBatch, Leases
from rlframe.trajectories.queue.unit_queues import QueuedGroup, UndersizedGroups, UnitQueues

_PLAIN = ("uuid", "step", "policy_version", "started", "paused", "stored_bytes", "barren")


class Epoch:
    """Attributes:
    number: rises whenever the run starts afresh.
    uuid: the caller's name for the registration.
    step: batches handed out, counted from the registered starting_step.
    started: the trainer has asked for a batch.
    stored_bytes: of all groups whose payload is needed.
    odd: by environment, groups of odd sizes.
    barren: the last attempt to form a batch failed, and nothing that it depends on has changed since.
    forgotten: groups whose payloads are no longer needed, for the caller to take out.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.registration: Registration | None = None
        self.uuid = ""
        self.step = 0
        self.policy_version: int | None = None
        self.started = False
        self.paused = False
        self.stored_bytes = 0
        self.barren = False
        self.forgotten: list[int] = []
        self.envs = Environments()
        self.lanes = UnitQueues()
        self.odd: dict[int, UndersizedGroups] = {}
        self.leases = Leases()
        self.keys = IdempotencyKeys()
        self.tally = reports.Tally()
        self.weights = StartTimeFairQueue(lambda env_id: self.envs.weight_of(self.envs.get(env_id)))

    @property
    def settings(self) -> Registration:
        """The registration, for callers that know that there is one."""
        assert self.registration is not None
        return self.registration

    def settle(self, registration: Registration) -> None:
        """Go by these settings, with all that is here."""
        self.registration = registration
        for env_id in self.envs.sharing:
            self._reserve(self.envs.all[env_id])
        self.barren = False

    # Environments.

    def hear(self, env: Env, now: float) -> None:
        """Note a sign of life."""
        if self.envs.hear(env, now):
            self._reserve(env)

    def leave(self, env: Env) -> None:
        """Have no batch wait for this environment any more."""
        self.envs.leave(env)
        self._reserve(env)

    def lapse(self, now: float) -> None:
        """End what has run out of time: leases, remembered answers, and the liveness of environments."""
        while (env := self.overdue(now)) is not None:
            self.leave(env)
        for batch in self.leases.expire(now):
            self.forget(batch.group_ids, batch.size_bytes)

    def overdue(self, now: float) -> Env | None:
        """A live environment that has been silent for too long."""
        return self.envs.overdue(now - self.registration.lapse_after) if self.registration else None

    def regroup(self, env: Env) -> None:
        """Pack the odd groups of an environment again, whose group size may be another now."""
        odd = self.odd.pop(env.env_id, None)
        for group in odd.oldest_first() if odd else ():
            self.enqueue(env.env_id, group)

    def _reserve(self, env: Env) -> None:
        self.barren = False
        if env.min_batch_allocation:
            self.lanes.reserve(env.env_id, env.group_size, reports.share_of(self, env) if env.live else 0)

    # Groups.

    def add(self, group: QueuedGroup, env_id: int | None, tokens: int) -> AddResult:
        """A group that is not refused."""
        self.stored_bytes += group.size_bytes
        self.tally.groups_added += 1
        self.tally.sequences_added += group.sequences
        self.tally.tokens_added += tokens
        env = self.envs.get(env_id)
        if env is not None:
            env.count_added(group.sequences, tokens)
            if not env.size_known:
                self.leave(env)  # the sums have it with another size
                env.group_size, env.size_known = group.sequences, True
                self.hear(env, env.last_heard)
        self.enqueue(env_id, group)
        if env is None or group.sequences == env.group_size:
            return AddResult("received", group.id)
        odd = self.odd.get(env.env_id)
        return AddResult("buffered", group.id, odd.sequences if odd else 0)

    def enqueue(self, env_id: int | None, group: QueuedGroup) -> None:
        """Put a group into its lane, or to the odd ones of its environment where it is no unit by itself."""
        self.barren = False
        env = self.envs.get(env_id)
        # Nothing sums to a unit smaller than the group itself, and for one that no batch can hold it need not wait.
        if (
            env is None
            or self.registration is None
            or group.sequences >= env.group_size
            or env.group_size > self.registration.batch_size
        ):
            self.lanes.push(env_id, group.sequences, group)
            return
        unit = self.odd.setdefault(env.env_id, UndersizedGroups()).add(group, env.group_size)
        if unit is not None:
            self.lanes.push(env_id, env.group_size, unit)

    def take(
        self, batch_id: int, now: float, until: float | None, consumer: str | None, request: str | None
    ) -> LeasedBatch | None:
        """The batch for a request: the one it got before, one that came back, or a new one of this `batch_id`."""
        batch = None
        if consumer is not None:
            batch = self.leases.recall(consumer, request)
            if batch is not None and batch.batch_id not in self.leases.returned:
                return batch
            for answered in self.leases.drop_answers(consumer):
                self.forget(answered.group_ids, answered.size_bytes)
        batch = batch or next(iter(self.leases.returned.values()), None)
        if batch is not None:
            self.tally.redelivered += 1
        else:
            batch = self._form(batch_id)
        if batch is None:
            return None
        batch = self.leases.hand_out(batch, consumer, until)
        if consumer is not None and request is not None:
            self.leases.answer(consumer, request, batch, now)
        elif until is None:
            self.forget(batch.group_ids, batch.size_bytes)
        return batch

    def _form(self, batch_id: int) -> LeasedBatch | None:
        """The next batch, counted as served, or None."""
        units: list[TakenUnit] | None = None
        while not self.barren and units is None:
            self.barren = True  # unless a group that shared a unit with one too old is queued again
            weights = self.weights if self.settings.mix == "weight" else None
            shares = reports.shares(self)
            units, dropped = form(self.settings.batch_size, self.lanes, shares, self._too_old, weights)
            for env_id, _, unit in dropped:
                self._discard(env_id, unit)
        if units is None:
            return None
        self.barren = False
        return self._served(batch_id, units)

    def forget(self, group_ids: Sequence[int], size_bytes: int) -> None:
        """The payloads of these are no longer needed."""
        self.forgotten.extend(group_ids)
        self.stored_bytes -= size_bytes

    def _too_old(self, group: QueuedGroup) -> bool:
        registration = self.registration
        if registration is None or registration.max_staleness is None or registration.stale == "keep":
            return False
        age = reports.age(self, group)
        return age is not None and age > registration.max_staleness

    def _discard(self, env_id: int | None, unit: QueuedGroup) -> None:
        for group in unit.groups:
            if self._too_old(group):
                self.tally.discarded += 1
                self.forget([group.id], group.size_bytes)
            else:
                self.enqueue(env_id, group)

    def _served(self, batch_id: int, units: list[TakenUnit]) -> LeasedBatch:
        for env_id, size, unit in units:
            env = self.envs.get(env_id)
            if env is not None:
                env.served_groups += len(unit.groups)
                env.served_sequences += size
        groups = [group for taken in units for group in taken.unit.groups]
        batch = LeasedBatch(
            batch_id=batch_id,
            group_ids=tuple(group.id for group in groups),
            step=self.step,
            sequences=sum(taken.size for taken in units),
            size_bytes=sum(group.size_bytes for group in groups),
            staleness=tuple(reports.age(self, group) for group in groups),
        )
        self.step += 1
        self.tally.count_served(batch.sequences, batch.staleness)
        return batch

    def held(self) -> Iterator[int]:
        """Every group whose payload somebody may ask for."""
        yield from self.lanes.ids()
        for odd in self.odd.values():
            yield from (group.id for group in odd.oldest_first())
        yield from self.leases.held()

    # State.

    def to_state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "registration": self.registration,
            "envs": self.envs.to_state(),
            "lanes": self.lanes.to_state(),
            "odd": [[env_id, odd.oldest_first()] for env_id, odd in sorted(self.odd.items())],
            "leases": self.leases.to_state(),
            "keys": self.keys.to_state(),
            "tally": asdict(self.tally),
            "weights": self.weights.to_state(),
        }

    @classmethod
    def from_state(cls, number: int, state: Mapping[str, Any]) -> Epoch:
        epoch = cls(number)
        for name in _PLAIN:
            setattr(epoch, name, state[name])
        epoch.registration = msgspec.convert(state["registration"], Registration | None)
        epoch.envs = Environments.from_state(state["envs"])
        epoch.lanes = UnitQueues.from_state(state["lanes"])
        odd = msgspec.convert(state["odd"], list[tuple[int, list[QueuedGroup]]])
        epoch.odd = {env_id: UndersizedGroups.of(groups) for env_id, groups in odd}
        epoch.leases = Leases.from_state(state["leases"])
        epoch.keys = IdempotencyKeys.from_state(state["keys"])
        epoch.tally = reports.Tally(**state["tally"])
        if "weights" in state:  # not in a snapshot of before there were any
            epoch.weights.set_state(state["weights"])
        for env_id in epoch.envs.sharing:
            epoch._reserve(epoch.envs.all[env_id])
        epoch.barren = state["barren"]
        return epoch
