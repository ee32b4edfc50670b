"""What can be asked of a queue. Nothing here changes an answer."""

from __future__ import annotations

from collections.abc import Iterator

from rlframe.trajectories.queue import views
from rlframe.trajectories.queue.answers import EnvStatus, Registration, Report, Status, Waiting
from rlframe.trajectories.queue.epoch import Epoch


class QueueReads:
    """The reads of `Queue`: O(distinct group sizes), where nothing else is said."""

    def __init__(self) -> None:
        self._epoch = Epoch()
        self._epoch_number = 0
        self._now = 0.0
        self._next_group = 0

    @property
    def registration(self) -> Registration | None:
        return self._epoch.registration

    @property
    def epoch(self) -> int:
        """Rises whenever the run starts afresh."""
        return self._epoch_number

    @property
    def next_group(self) -> int:
        """The lowest id that a new group may have."""
        return self._next_group

    @property
    def forgotten(self) -> list[int]:
        """Groups whose payloads nobody will ask for any more since the last command."""
        return self._epoch.forgotten

    def held(self) -> Iterator[int]:
        """Every group whose payload somebody may ask for; O(groups)."""
        return self._epoch.held()

    def due(self, now: float) -> bool:
        """Whether `expire(now)` would change anything."""
        now = max(self._now, now)
        return self._epoch.leases.due(now) or self._epoch.overdue(now) is not None

    def may_take(self, now: float) -> bool:
        """Whether `take` is worth a command: False where a new request would be given None."""
        epoch = self._epoch
        if epoch.registration is None:
            return False
        return bool(epoch.leases.returned) or self.due(now) or (not epoch.barren and views.formable(epoch))

    @property
    def started(self) -> bool:
        """The trainer has asked for a batch."""
        return self._epoch.started

    @property
    def stored_bytes(self) -> int:
        """Of all groups whose payloads are needed, as told with `add`."""
        return self._epoch.stored_bytes

    def knows(self, resume_token: str | None) -> bool:
        """Whether an environment would come back with this token."""
        return self._epoch.envs.known(resume_token) is not None

    def silence(self, env_id: int, now: float) -> float | None:
        """Seconds since the environment was heard of, None where it is unknown or has left."""
        env = self._epoch.envs.get(env_id)
        return now - env.last_heard if env is not None and env.connected else None

    @property
    def policy_version(self) -> int | None:
        return self._epoch.policy_version

    def recalls(self, consumer: str | None, request: str | None) -> bool:
        """Whether `take` would give this request the batch that it was given before."""
        return consumer is not None and self._epoch.leases.recall(consumer, request) is not None

    def waiting(self) -> list[Waiting]:
        """What waits, and for what: the first `views.MAX_WAITING`; O(what cannot flow)."""
        return views.waiting(self._epoch)

    def status(self) -> Status:
        return views.status(self._epoch, self._epoch_number)

    def env_status(self, env_id: int, hold: bool = False) -> EnvStatus | None:
        """What an environment should know; None where it is unknown. `hold`: the caller has a reason (a full store) to
        make it hold."""
        return views.env_status(self._epoch, env_id, hold)

    def report(self, now: float, envs: int = 1000) -> Report:
        """All that the live page shows, of at most so many environments, those that were heard of last; O(`envs`)."""
        return views.report(self._epoch, max(self._now, now), envs)
