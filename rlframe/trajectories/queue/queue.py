"""The queue of one run: what environments send becomes batches of exactly `batch_size` sequences.

Plain data in, plain data out: no payloads, no clock, no randomness. Service processes that apply the same commands in
the same order hold the same queue and give the same answers, so every change is one method of `COMMANDS`, with
arguments that MessagePack can carry. Times are seconds and never run backwards here, whosever clock they come from.

A unit is a group of its environment's group size, or several odd ones of that environment which sum to it. A batch
takes the minimum shares first, then the oldest units, passing over those after which it could not be filled exactly.
Units of one size from one environment are never reordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlframe.errors import UsageError
from rlframe.trajectories.messages import EnvStatus, RegisteredEnv, Registration, RunStatus
from rlframe.trajectories.queue import reports
from rlframe.trajectories.queue.epoch import Epoch
from rlframe.trajectories.queue.leases import AddResult, LeasedBatch
from rlframe.trajectories.queue.unit_queues import QueuedGroup


class Queue:
    """The state of one run. Ids of batches count on through all epochs, those of environments do not.

    Attributes:
        epoch: everything that starts afresh with a new registration or a reset; to be read.
        next_group: the lowest id that a new group may have.
    """

    COMMANDS = (
        *("register", "reset", "note_trainer", "register_env", "disconnect_env", "heartbeat", "add", "take"),
        *("ack", "nack", "renew", "expire", "pause", "resume", "set_policy_version"),
    )

    def __init__(self) -> None:
        self.epoch = Epoch()
        self.next_group = 0
        self._now = 0.0
        self._next_batch = 0

    # Commands.

    def apply(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """One command of a log."""
        if command not in self.COMMANDS:
            raise UsageError(f"{command!r} is no command of the queue; these are: {', '.join(sorted(self.COMMANDS))}.")
        return getattr(self, command)(**arguments)

    def register(self, settings: Mapping[str, Any], uuid: str, now: float) -> str:
        """The trainer's settings (see `Registration`). The same again are confirmed; others start a new epoch, unless
        both have the same run key: then the run goes on by the new settings.

        What was sent before the first register, or since a reset, is kept. `uuid` is the caller's name for the
        settings; returned is that of the settings that hold. Raises `UsageError` for settings that cannot be.
        """
        registration = Registration(**settings)
        epoch = self._begin(now)
        known = epoch.registration
        if known not in (None, registration) and not registration.continues(known):
            epoch, known = self._new_epoch(), None
        if known is None:
            epoch.uuid = uuid
            epoch.step = registration.starting_step
        if known != registration:
            epoch.settle(registration)
        return epoch.uuid

    def reset(self, now: float) -> None:
        """Start a new epoch without a registration."""
        self._begin(now)
        self._new_epoch()

    def note_trainer(self) -> None:
        """The trainer asked for a batch: environments may register from now on."""
        epoch = self._begin()
        epoch.started = epoch.registration is not None

    def register_env(
        self,
        desired_name: str,
        max_token_length: int,
        weight: float,
        group_size: int | None,
        min_batch_allocation: float | None,
        resume_token: str | None,
        token: str | None,
        now: float,
    ) -> RegisteredEnv | None:
        """An environment joins, or comes back with the `resume_token` it was given: with the same id and name.

        `group_size` is in sequences (None: 1 until its first group says it), `min_batch_allocation` the part of each
        batch that is its own, `token` what a new environment can come back with, made by the caller.
        None: it has to wait for the trainer to start.
        """
        epoch = self._begin(now)
        if not epoch.started:
            return None
        known = epoch.envs.known(resume_token)
        if known is not None:
            epoch.leave(known)
        env = epoch.envs.register(
            known,
            token,
            desired_name=desired_name,
            max_token_length=max_token_length,
            weight=weight,
            group_size=group_size,
            min_batch_allocation=min_batch_allocation,
            last_heard=self._now,
        )
        epoch.hear(env, self._now)
        epoch.regroup(env)
        return RegisteredEnv(
            env_id=env.env_id,
            wandb_name=env.wandb_name,
            checkpoint_dir=epoch.settings.checkpoint_dir,
            starting_step=epoch.step,
            checkpoint_interval=epoch.settings.save_checkpoint_interval,
            num_steps=epoch.settings.num_steps,
            resume_token=env.resume_token,
        )

    def disconnect_env(self, env_id: int) -> bool:
        """The environment leaves; what it sent stays. False where there is no such environment."""
        epoch = self._begin()
        env = epoch.envs.get(env_id)
        if env is not None:
            epoch.leave(env)
            env.connected = False
        return env is not None

    def heartbeat(self, env_id: int, now: float) -> bool:
        """A sign of life; `add` is one too. False where there is no such environment."""
        epoch = self._begin(now)
        env = epoch.envs.get(env_id)
        if env is not None:
            epoch.hear(env, self._now)
        return env is not None

    def add(
        self,
        group_id: int,
        sequences: int,
        tokens: int,
        size_bytes: int,
        env_id: int | None,
        policy_version: int | None,
        key: str | None,
        now: float,
    ) -> AddResult:
        """One group.

        Args:
            group_id: the caller's, such as where its payload lies; it rises from one group to the next.
            size_bytes: of the payload, for `Status.stored_bytes`.
            policy_version: that the group was sampled from. Where the trainer bounds staleness, giving it asks for
                pacing: a group that would be too old by its turn is refused.
            key: idempotency key; one that was used before gets the answer that it got then.

        Raises `UsageError` for an id that does not rise.
        """
        if group_id < self.next_group:
            raise UsageError(f"Ids of groups rise: from {self.next_group} on; got {group_id}.")
        epoch = self._begin(now)
        env = epoch.envs.get(env_id)
        if env is not None:
            epoch.hear(env, self._now)
        known = epoch.keys.get(key, self._now) if key is not None else None
        if known is not None:
            epoch.tally.duplicates += 1
            return known
        refusal = reports.refusal(epoch, env_id, sequences, policy_version)
        if refusal is not None:
            epoch.tally.refused += 1
            return refusal
        answer = epoch.add(QueuedGroup(group_id, sequences, size_bytes, policy_version, self._now), env_id, tokens)
        self.next_group = group_id + 1
        if key is not None:
            epoch.keys.put(key, answer, self._now)
        return answer

    def take(
        self,
        now: float,
        lease_seconds: float | None = None,
        consumer: str | None = None,
        request: str | None = None,
    ) -> LeasedBatch | None:
        """The next batch, or None while there is not enough.

        Args:
            lease_seconds: for how long it is the consumer's, until `ack`; None: it is acknowledged at once.
            consumer, request: with both, the same request again gets the same batch again, until the consumer's next,
                for an hour.
        """
        epoch = self._begin(now)
        if epoch.registration is None:
            return None
        epoch.started = True
        until = None if lease_seconds is None else self._now + lease_seconds
        batch = epoch.take(self._next_batch, self._now, until, consumer, request)
        if batch is not None:
            self._next_batch = max(self._next_batch, batch.batch_id + 1)
        return batch

    def ack(self, batch_id: int) -> bool:
        """The batch is done with. False where it is not leased, nor waits to be delivered again."""
        epoch = self._begin()
        batch = epoch.leases.settle(batch_id)
        if batch is not None:
            epoch.forget(batch.group_ids, batch.size_bytes)
        return batch is not None

    def nack(self, batch_id: int, consumer: str | None = None) -> bool:
        """A leased batch goes to the next who asks; with `consumer`, only where it is (still) his."""
        return self._begin().leases.give_back(batch_id, consumer)

    def renew(self, batch_id: int, lease_seconds: float, now: float, consumer: str | None = None) -> bool:
        """A leased batch is its consumer's for so many seconds from now on. False where it is not (his) any more."""
        return self._begin(now).leases.renew(batch_id, consumer, self._now + lease_seconds)

    def expire(self, now: float) -> None:
        """Take back batches whose leases have ended, and shares of environments that are silent, as every command with
        a time does; `due` says whether there is a need."""
        self._begin(now)

    def pause(self) -> None:
        """Every environment is told to hold, until `resume`."""
        self._begin().paused = True

    def resume(self) -> None:
        """End `pause`."""
        self._begin().paused = False

    def set_policy_version(self, version: int) -> None:
        """The version that the trainer has now; staleness counts from it."""
        self._begin().policy_version = version

    # Reads, which change no answer: O(distinct group sizes), where nothing else is said.

    def due(self, now: float) -> bool:
        """Whether `expire(now)` would change anything."""
        now = max(self._now, now)
        return self.epoch.leases.due(now) or self.epoch.overdue(now) is not None

    def may_take(self, now: float, consumer: str | None = None, request: str | None = None) -> bool:
        """Whether `take` is worth a command: False where it would give None."""
        epoch = self.epoch
        if epoch.registration is None:
            return False
        if consumer is not None and epoch.leases.recall(consumer, request) is not None:
            return True
        return bool(epoch.leases.returned) or self.due(now) or (not epoch.barren and reports.can_form_batch(epoch))

    def status(self) -> RunStatus:
        return reports.status(self.epoch)

    def env_status(self, env_id: int, hold: bool = False) -> EnvStatus | None:
        """What an environment should know; None where it is unknown. `hold`: the caller has a reason (a full store) to
        make it hold."""
        return reports.env_status(self.epoch, env_id, hold)

    def report(self, now: float, envs: int = 1000) -> reports.Report:
        """All that the live page shows, of at most so many environments, those that were heard of last; O(all envs)."""
        return reports.report(self.epoch, max(self._now, now), envs)

    # State.

    def get_state(self) -> dict[str, Any]:
        """Everything, as data that MessagePack can carry; no later command changes anything in it. Quick: what is long
        is a list of what does not change."""
        numbers = {"number": self.epoch.number, "now": self._now, "next_group": self.next_group}
        return {**numbers, "next_batch": self._next_batch, "epoch": self.epoch.to_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Become the queue that `get_state` was called on."""
        self._now, self.next_group, self._next_batch = state["now"], state["next_group"], state["next_batch"]
        self.epoch = Epoch.from_state(state["number"], state["epoch"])

    def _begin(self, now: float | None = None) -> Epoch:
        """What every command does first."""
        epoch = self.epoch
        epoch.forgotten = []
        if now is not None:
            self._now = max(self._now, now)
            epoch.lapse(self._now)
        return epoch

    def _new_epoch(self) -> Epoch:
        gone = [*self.epoch.forgotten, *self.epoch.held()]
        self.epoch = Epoch(self.epoch.number + 1)
        self.epoch.forgotten = gone
        return self.epoch
