"""Everything that starts afresh with a new registration or a reset: settings, environments, what waits, what is out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlframe.trajectories.queue import views
from rlframe.trajectories.queue.answers import Added, Registration
from rlframe.trajectories.queue.buffers import Buffer
from rlframe.trajectories.queue.envs import Env, Envs
from rlframe.trajectories.queue.forming import Taken, form
from rlframe.trajectories.queue.idempotency import Answers
from rlframe.trajectories.queue.lanes import Group, Lanes
from rlframe.trajectories.queue.leases import Batch, Leases
from rlframe.trajectories.queue.tally import Tally

_PLAIN = ("uuid", "step", "policy_version", "started", "paused", "stored_bytes", "buffered", "barren")


class Epoch:
    """Attributes:
    uuid: the caller's name for the registration.
    step: batches handed out, counted from the registered starting_step.
    started: the trainer has asked for a batch.
    stored_bytes: of all groups whose payload is needed.
    buffered: groups in `buffers`.
    barren: the last attempt to form a batch failed, and nothing that it depends on has changed since.
    forgotten: groups whose payloads are no longer needed, for the caller to take out.
    """

    def __init__(self) -> None:
        self.registration: Registration | None = None
        self.uuid = ""
        self.step = 0
        self.policy_version: int | None = None
        self.started = False
        self.paused = False
        self.stored_bytes = 0
        self.buffered = 0
        self.barren = False
        self.forgotten: list[int] = []
        self.envs = Envs()
        self.lanes = Lanes()
        self.buffers: dict[int, Buffer] = {}
        self.leases = Leases()
        self.answers = Answers()
        self.tally = Tally()

    # Environments.

    def hear(self, env: Env, now: float) -> None:
        """Notes a sign of life."""
        if self.envs.hear(env, now):
            self._reserve(env)

    def leave(self, env: Env) -> None:
        """No batch waits for this environment any more."""
        self.envs.leave(env)
        self._reserve(env)

    def lapse(self, now: float) -> None:
        """Ends what has run out of time: leases, remembered answers, and the liveness of environments."""
        while (env := self.overdue(now)) is not None:
            self.leave(env)
        for batch in self.leases.expire(now):
            self.forget(batch.group_ids, batch.size_bytes)

    def overdue(self, now: float) -> Env | None:
        """A live environment that has been silent for too long."""
        return self.envs.overdue(now - self.registration.lapse_after) if self.registration else None

    def rebuffer(self, env: Env) -> None:
        """Packs the odd groups of an environment again, whose group size may be another now."""
        buffer = self.buffers.pop(env.env_id, None)
        for group in buffer.drain() if buffer else ():
            self.buffered -= 1
            self.enqueue(env.env_id, group)

    def _reserve(self, env: Env) -> None:
        self.barren = False
        if env.min_batch_allocation:
            self.lanes.reserve(env.env_id, env.group_size, views.share_of(self, env) if env.live else 0)

    # Groups.

    def add(self, group: Group, env_id: int | None, tokens: int) -> Added:
        """A group that is not refused."""
        self.stored_bytes += group.size_bytes
        self.tally.add(group.sequences, tokens)
        env = self.envs.get(env_id)
        if env is not None:
            env.count_added(group.sequences, tokens)
        self.enqueue(env_id, group)
        if env is None or group.sequences == env.group_size:
            return Added("received", group.id)
        buffer = self.buffers.get(env.env_id)
        return Added("buffered", group.id, buffer.sequences if buffer else 0)

    def enqueue(self, env_id: int | None, group: Group) -> None:
        """Puts a group into its lane, or into the buffer of its environment where it is no unit by itself."""
        self.barren = False
        env = self.envs.get(env_id)
        if env is None or self.registration is None:
            self.lanes.push(env_id, group.sequences, group)
            return
        unit_size = env.group_size
        # Nothing sums to a unit smaller than the group itself, and for one that no batch can hold it need not wait.
        if group.sequences >= unit_size or unit_size > self.registration.batch_size:
            self.lanes.push(env_id, group.sequences, group)
            return
        self.buffered += 1
        unit = self.buffers.setdefault(env.env_id, Buffer()).add(group, unit_size)
        if unit is not None:
            self.buffered -= len(unit.groups)
            self.lanes.push(env_id, unit_size, unit)

    def take(
        self, batch_id: int, now: float, until: float | None, consumer: str | None, request: str | None
    ) -> Batch | None:
        """The batch for a request: the one it got before, one that came back, or a new one of this `batch_id`."""
        batch = None
        if consumer is not None:
            batch = self.leases.recall(consumer, request)
            if batch is not None and not self.leases.came_back(batch.batch_id):
                return batch
            for answered in self.leases.forget_answers(consumer):
                self.forget(answered.group_ids, answered.size_bytes)
        batch = batch or self.leases.oldest_returned()
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

    def _form(self, batch_id: int) -> Batch | None:
        """The next batch, counted as served, or None."""
        assert self.registration is not None
        units: list[Taken] | None = None
        while not self.barren and units is None:
            self.barren = True  # unless a group that shared a unit with one too old is queued again
            units, dropped = form(self.registration.batch_size, self.lanes, views.shares(self), self._too_old)
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

    def _too_old(self, group: Group) -> bool:
        registration = self.registration
        if registration is None or registration.max_staleness is None or registration.stale == "keep":
            return False
        staleness = views.staleness(self, group)
        return staleness is not None and staleness > registration.max_staleness

    def _discard(self, env_id: int | None, unit: Group) -> None:
        for group in unit.groups:
            if self._too_old(group):
                self.tally.discarded += 1
                self.forget([group.id], group.size_bytes)
            else:
                self.enqueue(env_id, group)

    def _served(self, batch_id: int, units: list[Taken]) -> Batch:
        for env_id, size, unit in units:
            env = self.envs.get(env_id)
            if env is not None:
                env.served_groups += len(unit.groups)
                env.served_sequences += size
        groups = [group for taken in units for group in taken.unit.groups]
        batch = Batch(
            batch_id=batch_id,
            group_ids=tuple(group.id for group in groups),
            step=self.step,
            sequences=sum(taken.size for taken in units),
            size_bytes=sum(group.size_bytes for group in groups),
            staleness=tuple(views.staleness(self, group) for group in groups),
        )
        self.step += 1
        self.tally.serve(batch.sequences, batch.staleness)
        return batch

    def held(self) -> Iterator[int]:
        """Every group whose payload somebody may ask for."""
        yield from self.lanes.ids()
        for buffer in self.buffers.values():
            yield from (group.id for group in buffer.all_groups())
        yield from self.leases.held()

    # State.

    def to_state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "registration": None if self.registration is None else asdict(self.registration),
            "envs": self.envs.to_state(),
            "lanes": self.lanes.to_state(),
            "buffers": [[env_id, buffer.to_state()] for env_id, buffer in sorted(self.buffers.items())],
            "leases": self.leases.to_state(),
            "answers": self.answers.to_state(),
            "tally": asdict(self.tally),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Epoch:
        epoch = cls()
        for name in _PLAIN:
            setattr(epoch, name, state[name])
        epoch.registration = None if state["registration"] is None else Registration(**state["registration"])
        epoch.envs = Envs.from_state(state["envs"])
        epoch.lanes = Lanes.from_state(state["lanes"])
        epoch.buffers = {env_id: Buffer.from_state(groups) for env_id, groups in state["buffers"]}
        epoch.leases = Leases.from_state(state["leases"])
        epoch.answers = Answers.from_state(state["answers"])
        epoch.tally = Tally(**state["tally"])
        for env_id in epoch.envs.sharing:
            epoch._reserve(epoch.envs.all[env_id])
        epoch.barren = state["barren"]
        return epoch
