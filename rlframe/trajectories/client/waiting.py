"""Calls that ask the service repeatedly until a condition holds."""

from __future__ import annotations

from rlframe.errors import UnavailableError, UsageError
from rlframe.trajectories.client.calls import BaseClient
from rlframe.trajectories.client.exchange import ClientMethod, HttpRequest, pauses
from rlframe.trajectories.messages import EnvStatus, RunStatus


class WaitingClient(BaseClient):
    """All of a client but how it sends: see `TrajectoryClient`."""

    @ClientMethod
    async def wait_for_step(self, step: int, *, wait: float = 600.0, timeout: float | None = None) -> RunStatus:
        """Return once `current_step` is `step` or more: the trainer has pulled batch number `step`.

        `current_step` counts batches from `starting_step` on. In a trainer of several ranks, rank 0 pulls; the others
        wait for the next step, and take part in its broadcast then.

        Args:
            wait: seconds to wait for it.

        Raises:
            UsageError: the run started afresh meanwhile, so the step may never come.
            UnavailableError: the step did not come within `wait` seconds (or as every call).
        """
        looks, last = pauses(wait), 0
        while True:
            status = await self._ask(HttpRequest("GET", "/status"), RunStatus, timeout)
            at = status.current_step
            if at >= step:
                return status
            if at < last:
                raise UsageError(
                    f"{self.url}: the run started afresh while step {step} was waited for: it was at step {last}, and "
                    f"is at step {at}. A registration with other settings does that, and so does /reset_data."
                )
            pause, last = next(looks, None), at
            if pause is None:
                raise UnavailableError(
                    f"{self.url}: step {step} did not come within {wait:g} s; the run is at step {at}, with "
                    f"{status.queue_size} groups in the queue. Does rank 0 pull batches?"
                )
            await self._pause(pause)

    @ClientMethod
    async def wait_until_wanted(
        self, env_id: int, max_queued: int, *, wait: float = 600.0, timeout: float | None = None
    ) -> EnvStatus:
        """Return once the environment should start a new group: at most `max_queued` wait, and it is not to hold.

        Asking is a sign of life, too. `max_queued` is in groups of this environment: so many batches as the policy may
        run ahead of, times batch_size / group_size.

        Raises:
            UnavailableError: it still has to hold after `wait` seconds (or as every call).
        """
        looks = pauses(wait)
        while True:
            status = await self._ask(HttpRequest("GET", "/status-env", {"env_id": env_id}), EnvStatus, timeout)
            if status.queue_size <= max_queued and not status.hold:
                return status
            pause = next(looks, None)
            if pause is None:
                raise UnavailableError(
                    f"{self.url}: environment {env_id} still has to hold after {wait:g} s: {status.queue_size} groups "
                    f"wait, of which it may leave {max_queued}, and hold is {status.hold}. Does the trainer run?"
                )
            await self._pause(pause)
