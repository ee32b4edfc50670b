"""The state of one epoch of a run: settings, environments, queued groups, and leased batches.

A new registration or a reset starts a new epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from rlframe.trajectories.messages import Registration
from rlframe.trajectories.queue import reports
from rlframe.trajectories.queue.batching import StartTimeFairQueue, TakenUnit, form_batch
from rlframe.trajectories.queue.environments import Env, Environments
from rlframe.trajectories.queue.leases import AddResult, IdempotencyKeys, LeasedBatch, Leases
from rlframe.trajectories.queue.unit_queues import QueuedGroup, UndersizedGroups, UnitQueues

_PLAIN = ("uuid", "step", "policy_version", "started", "paused", "stored_bytes", "barren")


class Epoch:
    """The state of a run since its last registration or reset.

    Attributes:
        number: Number of the epoch. It increases with each reset of the run.
        uuid: Id of the registration, chosen by the caller.
        step: The registered starting_step plus the number of delivered batches.
        started: True if the trainer has requested a batch.
        stored_bytes: Size in bytes of all groups whose payloads are still needed.
        undersized: Undersized groups, by environment id.
        barren: True if the last attempt to form a batch failed, and another attempt would also fail.
        released: Ids of groups whose payloads are no longer needed. The caller may delete these payloads.
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
        self.released: list[int] = []
        self.envs = Environments()
        self.unit_queues = UnitQueues()
        self.undersized: dict[int, UndersizedGroups] = {}
        self.leases = Leases()
        self.keys = IdempotencyKeys()
        self.counters = reports.EpochCounters()
        self.weights = StartTimeFairQueue(lambda env_id: self.envs.weight_of(self.envs.get(env_id)))

    @property
    def settings(self) -> Registration:
        """The registration. Use this property only after a trainer has registered."""
        assert self.registration is not None
        return self.registration

    def apply_registration(self, registration: Registration) -> None:
        """Replace the settings. If the batch size changes, form units from undersized groups again.

        All other state stays unchanged: a batch that is leased keeps its size.
        """
        before, self.registration = self.registration, registration
        if before is not None and before.batch_size != registration.batch_size:
            for env in self.envs.all:
                self.repack_undersized(env)
        for env_id in self.envs.with_minimum_share:
            self._reserve(self.envs.all[env_id])
        self.barren = False

    # Environments.

    def record_heartbeat(self, env: Env, now: float) -> None:
        if self.envs.record_heartbeat(env, now):
            self._reserve(env)

    def mark_not_live(self, env: Env) -> None:
        """Mark an environment as not live, so that no batch waits for its minimum share."""
        self.envs.mark_not_live(env)
        self._reserve(env)

    def expire(self, now: float) -> None:
        """End expired leases, drop expired answers, and mark silent environments as not live."""
        while (env := self.overdue(now)) is not None:
            self.mark_not_live(env)
        for batch in self.leases.expire(now):
            self.release(batch.group_ids, batch.size_bytes)

    def overdue(self, now: float) -> Env | None:
        """Return a live environment that has been silent for longer than `lapse_after`, or None."""
        return self.envs.overdue(now - self.registration.lapse_after) if self.registration else None

    def repack_undersized(self, env: Env) -> None:
        """Form units from an environment's undersized groups again, because its group size may have changed."""
        undersized = self.undersized.pop(env.env_id, None)
        for group in undersized.oldest_first() if undersized else ():
            self.enqueue(env.env_id, group)

    def _reserve(self, env: Env) -> None:
        self.barren = False
        if env.min_batch_allocation:
            self.unit_queues.reserve(env.env_id, env.group_size, reports.minimum_share(self, env) if env.live else 0)

    # Groups.

    def add(self, group: QueuedGroup, env_id: int | None, tokens: int) -> AddResult:
        """Count and queue a group. Callers must first check that the group is not refused."""
        self.stored_bytes += group.size_bytes
        self.counters.groups_added += 1
        self.counters.sequences_added += group.sequences
        self.counters.tokens_added += tokens
        env = self.envs.get(env_id)
        if env is not None:
            env.count_added(group.sequences, tokens)
            if not env.size_known:
                self.mark_not_live(env)  # removes the old size from the sums over live environments
                env.group_size, env.size_known = group.sequences, True
                self.record_heartbeat(env, env.last_heard)
        self.enqueue(env_id, group)
        if env is None or group.sequences == env.group_size:
            return AddResult("received", group.id)
        undersized = self.undersized.get(env.env_id)
        return AddResult("buffered", group.id, undersized.sequences if undersized else 0)

    def enqueue(self, env_id: int | None, group: QueuedGroup) -> None:
        """Queue a group as a unit, or add it to its environment's undersized groups."""
        self.barren = False
        env = self.envs.get(env_id)
        # A group that is not undersized becomes a unit. So does every group if a unit of the group size fits no batch.
        if (
            env is None
            or self.registration is None
            or group.sequences >= env.group_size
            or env.group_size > self.registration.batch_size
        ):
            self.unit_queues.push(env_id, group.sequences, group)
            return
        unit = self.undersized.setdefault(env.env_id, UndersizedGroups()).add(group, env.group_size)
        if unit is not None:
            self.unit_queues.push(env_id, env.group_size, unit)

    def take(
        self, batch_id: int, now: float, until: float | None, consumer: str | None, request: str | None
    ) -> LeasedBatch | None:
        """Return a batch for a request. A repeated request gets the same batch again.

        Other requests get a returned batch. If there is none, form a new batch with the id `batch_id`.
        """
        batch = None
        if consumer is not None:
            batch = self.leases.find_answered(consumer, request)
            if batch is not None and batch.batch_id not in self.leases.returned:
                return batch
            for answered in self.leases.drop_answers(consumer):
                self.release(answered.group_ids, answered.size_bytes)
        batch = batch or next(iter(self.leases.returned.values()), None)
        if batch is not None:
            self.counters.redelivered += 1
        else:
            batch = self._form(batch_id)
        if batch is None:
            return None
        batch = self.leases.hand_out(batch, consumer, until)
        if consumer is not None and request is not None:
            self.leases.record_answer(consumer, request, batch, now)
        elif until is None:
            self.release(batch.group_ids, batch.size_bytes)
        return batch

    def _form(self, batch_id: int) -> LeasedBatch | None:
        """Form the next batch and count it as served. Return None if no batch can be formed."""
        units: list[TakenUnit] | None = None
        while not self.barren and units is None:
            self.barren = True  # `_discard` can set it to False
            weights = self.weights if self.settings.mix == "weight" else None
            shares = reports.minimum_shares(self)
            units, dropped = form_batch(self.settings.batch_size, self.unit_queues, shares, self._too_old, weights)
            for env_id, _, unit in dropped:
                self._discard(env_id, unit)
        if units is None:
            return None
        self.barren = False
        return self._served(batch_id, units)

    def release(self, group_ids: Sequence[int], size_bytes: int) -> None:
        """Record that the payloads of these groups are no longer needed."""
        self.released.extend(group_ids)
        self.stored_bytes -= size_bytes

    def _too_old(self, group: QueuedGroup) -> bool:
        registration = self.registration
        if registration is None or registration.max_staleness is None or registration.stale == "keep":
            return False
        age = reports.staleness_of(self, group)
        return age is not None and age > registration.max_staleness

    def _discard(self, env_id: int | None, unit: QueuedGroup) -> None:
        for group in unit.groups:
            if self._too_old(group):
                self.counters.discarded += 1
                self.release([group.id], group.size_bytes)
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
            staleness=tuple(reports.staleness_of(self, group) for group in groups),
        )
        self.step += 1
        self.counters.count_served(batch.sequences, batch.staleness)
        return batch

    def needed_group_ids(self) -> Iterator[int]:
        """Yield the ids of all groups whose payloads are still needed."""
        yield from self.unit_queues.ids()
        for undersized in self.undersized.values():
            yield from (group.id for group in undersized.oldest_first())
        yield from self.leases.needed_group_ids()

    # State.

    def to_state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "registration": self.registration,
            "envs": self.envs.to_state(),
            "lanes": self.unit_queues.to_state(),
            "odd": [[env_id, undersized.oldest_first()] for env_id, undersized in sorted(self.undersized.items())],
            "leases": self.leases.to_state(),
            "keys": self.keys.to_state(),
            "tally": asdict(self.counters),
            "weights": self.weights.to_state(),
        }

    @classmethod
    def from_state(cls, number: int, state: Mapping[str, Any]) -> Epoch:
        epoch = cls(number)
        epoch.registration = msgspec.convert(state["registration"], Registration | None)
        epoch.envs = Environments.from_state(state["envs"])
        epoch.unit_queues = UnitQueues.from_state(state["lanes"])
        undersized = msgspec.convert(state["odd"], list[tuple[int, list[QueuedGroup]]])
        epoch.undersized = {env_id: UndersizedGroups(groups) for env_id, groups in undersized}
        epoch.leases = Leases.from_state(state["leases"])
        epoch.keys = IdempotencyKeys.from_state(state["keys"])
        epoch.counters = reports.EpochCounters(**state["tally"])
        if "weights" in state:  # older snapshots do not have this key
            epoch.weights.set_state(state["weights"])
        for env_id in epoch.envs.with_minimum_share:
            epoch._reserve(epoch.envs.all[env_id])
        for name in _PLAIN:  # set last, because `_reserve` changes `barren`
            setattr(epoch, name, state[name])
        return epoch
