"""The queue of one run forms batches of exactly `batch_size` sequences from the groups that environments send.

The queue uses no payloads, no clock and no randomness. Service processes that apply the same commands in the same order
have the same queue and give the same answers. So every change is one method of `COMMANDS`, with arguments that
MessagePack can encode. Times are in seconds. A command whose time is earlier than the latest time gets the latest time.

A unit is a group of its environment's group size, or several undersized groups of the environment with this size in
total. A batch takes the minimum shares first, then the oldest units. It skips units that would make an exact batch
impossible. Units of the same size and environment are never reordered.
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
    """The state of one run. In a new epoch, batch ids continue, and environment ids start again from 0.

    Attributes:
        epoch: The state since the last registration or reset. Callers only read it.
        next_group: The lowest id that a new group may have.
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
        """Apply one command from a log."""
        if command not in self.COMMANDS:
            raise UsageError(
                f"{command!r} is not a command of the queue. Commands: {', '.join(sorted(self.COMMANDS))}."
            )
        return getattr(self, command)(**arguments)

    def register(self, settings: Mapping[str, Any], uuid: str, now: float) -> str:
        """Register the trainer's settings (see `Registration`).

        Repeated settings change nothing. Different settings start a new epoch, unless old and new settings have the
        same run key: then the run continues with the new settings. Groups that were sent before the first registration
        are kept.

        Args:
            uuid: Id of the new settings, chosen by the caller.

        Returns:
            The uuid of the settings in effect.

        Raises:
            UsageError: The settings are invalid.
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
            epoch.apply_registration(registration)
        return epoch.uuid

    def reset(self, now: float) -> None:
        """Start a new epoch without a registration."""
        self._begin(now)
        self._new_epoch()

    def note_trainer(self) -> None:
        """Record that the trainer requested a batch. From now on, environments may register."""
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
        """Register an environment. With the `resume_token` of an earlier registration, it keeps its id and name.

        Args:
            group_size: Sequences of each group. None means 1 until the first group sets the size.
            min_batch_allocation: Fraction of each batch that is reserved for the environment.
            token: Resume token for a new environment, chosen by the caller.

        Returns:
            None if the environment has to wait for the trainer to start.
        """
        epoch = self._begin(now)
        if not epoch.started:
            return None
        known = epoch.envs.find_by_token(resume_token)
        if known is not None:
            epoch.mark_not_live(known)
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
        epoch.record_heartbeat(env, self._now)
        epoch.repack_undersized(env)
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
        """Disconnect an environment. Its groups stay. Return False if there is no such environment."""
        epoch = self._begin()
        env = epoch.envs.get(env_id)
        if env is not None:
            epoch.mark_not_live(env)
            env.connected = False
        return env is not None

    def heartbeat(self, env_id: int, now: float) -> bool:
        """Record a heartbeat. Return False if there is no such environment. `add` also counts as a heartbeat."""
        epoch = self._begin(now)
        env = epoch.envs.get(env_id)
        if env is not None:
            epoch.record_heartbeat(env, self._now)
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
        """Add one group.

        Args:
            group_id: Id from the caller, for example the position of the payload. Each group needs a higher id.
            size_bytes: Size of the payload, for `RunStatus.stored_bytes`.
            policy_version: Policy version that the group was sampled from. If the trainer limits staleness, a group
                with a version is refused if it would be too old by its turn.
            key: Idempotency key. A repeated key gets the result of its first use.

        Raises:
            UsageError: The id is not higher than the previous id.
        """
        if group_id < self.next_group:
            raise UsageError(f"Group ids must rise: expected at least {self.next_group}; got {group_id}.")
        epoch = self._begin(now)
        env = epoch.envs.get(env_id)
        if env is not None:
            epoch.record_heartbeat(env, self._now)
        known = epoch.keys.get(key, self._now) if key is not None else None
        if known is not None:
            epoch.counters.duplicates += 1
            return known
        refusal = reports.refusal(epoch, env_id, sequences, policy_version)
        if refusal is not None:
            epoch.counters.refused += 1
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
        """Return the next batch, or None if too few sequences are queued.

        Args:
            lease_seconds: Seconds for which the consumer owns the batch, until `ack`. None means that delivery
                acknowledges the batch.
            consumer, request: Names of the consumer and of the request. If both are given, a repeated request gets the
                same batch again, until the consumer makes another request or an hour has passed.
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
        """Acknowledge a batch that is leased or waits for redelivery. Return False if there is no such batch."""
        epoch = self._begin()
        batch = epoch.leases.remove(batch_id)
        if batch is not None:
            epoch.release(batch.group_ids, batch.size_bytes)
        return batch is not None

    def nack(self, batch_id: int, consumer: str | None = None) -> bool:
        """Return a leased batch. The next request gets it. Return False if `consumer` does not own the batch."""
        return self._begin().leases.give_back(batch_id, consumer)

    def renew(self, batch_id: int, lease_seconds: float, now: float, consumer: str | None = None) -> bool:
        """Extend a lease to `lease_seconds` from now. Return False if it has ended or `consumer` is not its owner."""
        return self._begin(now).leases.renew(batch_id, consumer, self._now + lease_seconds)

    def expire(self, now: float) -> None:
        """Take back batches whose leases have ended, and end the minimum shares of silent environments.

        Every command with a time does this first. `due` returns whether a call would change anything.
        """
        self._begin(now)

    def pause(self) -> None:
        """Tell all environments to start no new groups until `resume`."""
        self._begin().paused = True

    def resume(self) -> None:
        """End a pause, so that environments start new groups again."""
        self._begin().paused = False

    def set_policy_version(self, version: int) -> None:
        """Set the trainer's current policy version. The staleness of groups is relative to this version."""
        self._begin().policy_version = version

    # Reads. They change nothing. Their cost is O(distinct group sizes), unless the docstring states another cost.

    def due(self, now: float) -> bool:
        """Return True if `expire(now)` would change anything."""
        now = max(self._now, now)
        return self.epoch.leases.due(now) or self.epoch.overdue(now) is not None

    def may_take(self, now: float, consumer: str | None = None, request: str | None = None) -> bool:
        """Return False if `take` would return None. Then the caller does not have to log a command."""
        epoch = self.epoch
        if epoch.registration is None:
            return False
        if consumer is not None and epoch.leases.find_answered(consumer, request) is not None:
            return True
        return bool(epoch.leases.returned) or self.due(now) or (not epoch.barren and reports.can_form_batch(epoch))

    def status(self) -> RunStatus:
        return reports.status(self.epoch)

    def env_status(self, env_id: int, hold: bool = False) -> EnvStatus | None:
        """Return the state of the queue for an environment, or None if the environment is unknown.

        `hold` is True if the environment should start no new group for another reason, such as a full store.
        """
        return reports.env_status(self.epoch, env_id, hold)

    def report(self, now: float, envs: int = 1000) -> reports.Report:
        """Return the data of the live page, with the `envs` environments that have the latest heartbeats.

        The cost is O(all environments).
        """
        return reports.report(self.epoch, max(self._now, now), envs)

    # State.

    def get_state(self) -> dict[str, Any]:
        """Return the whole state as data that MessagePack can encode. Later commands do not change it.

        This is fast, because large parts of the state are immutable objects, which are not copied.
        """
        return {
            "number": self.epoch.number,
            "now": self._now,
            "next_group": self.next_group,
            "next_batch": self._next_batch,
            "epoch": self.epoch.to_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `get_state`."""
        self._now, self.next_group, self._next_batch = state["now"], state["next_group"], state["next_batch"]
        self.epoch = Epoch.from_state(state["number"], state["epoch"])

    def _begin(self, now: float | None = None) -> Epoch:
        """Prepare a command: clear the released groups. If `now` is given, call `Epoch.expire`."""
        epoch = self.epoch
        epoch.released = []
        if now is not None:
            self._now = max(self._now, now)
            epoch.expire(self._now)
        return epoch

    def _new_epoch(self) -> Epoch:
        gone = [*self.epoch.released, *self.epoch.needed_group_ids()]
        self.epoch = Epoch(self.epoch.number + 1)
        self.epoch.released = gone
        return self.epoch
