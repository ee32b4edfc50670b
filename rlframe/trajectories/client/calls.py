"""The calls of trainers and environments. They are coroutines, and base_client.py explains how the clients run them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rlframe import retry
from rlframe.errors import UnavailableError, UsageError
from rlframe.trajectories.client.base_client import (
    JSON,
    LONGEST_POLL,
    MSGPACK,
    BaseClient,
    HttpRequest,
    client_method,
    new_key,
    post_request,
)
from rlframe.trajectories.client.groups import Group, PostResult, ServedBatch
from rlframe.trajectories.messages import EnvStatus, Info, Registered, RegisteredEnv, RunStatus, WandbInfo

_LONGEST_WAIT = 60.0  # maximum seconds that the service waits before it answers a request for a batch


class TrainerCalls(BaseClient):
    """Calls for trainers."""

    @client_method
    async def register(
        self,
        *,
        batch_size: int,
        max_token_len: int,
        num_steps: int,
        starting_step: int = 0,
        checkpoint_dir: str = "",
        save_checkpoint_interval: int = 0,
        wandb_group: str = "",
        wandb_project: str = "",
        max_staleness: int | None = None,
        stale: str | None = None,
        lapse_after: float | None = None,
        mix: str | None = None,
        run_key: str | None = None,
        timeout: float | None = None,
    ) -> Registered:
        """Register the trainer's settings. If they differ from the registered settings, the run is reset.

        Args:
            batch_size: Exact number of sequences in each batch.
            max_token_len: Maximum number of tokens in a sequence.
            num_steps: Number of training steps after which environments stop.
            max_staleness: Maximum age of a group: the number of policy versions between its policy and the trainer's.
                None means no limit.
            stale: "keep" or "discard" groups that are older than `max_staleness` when they are served. None means
                "keep".
            lapse_after: If an environment sends no heartbeat for this number of seconds, batches no longer wait for
                its groups. None means 120.
            mix: "arrival" serves the oldest groups first. "weight" serves environments in proportion to their weights
                if they send enough groups. None means "arrival".
            run_key: Name of the training run. All its ranks send this name, also after a resume. The same name
                continues the run, even with different settings. Another name resets the run. None means that only the
                settings are compared.
            timeout: Seconds for this call, including retries. None means the client's timeout.
        """
        settings = {name: value for name, value in locals().items() if name not in ("self", "timeout")}
        optional = ("max_staleness", "stale", "lapse_after", "mix", "run_key")
        sent = {name: value for name, value in settings.items() if name not in optional or value is not None}
        return await self._send_as(post_request("/register", sent), Registered, timeout)

    @client_method
    async def info(self, *, timeout: float | None = None) -> Info:
        """Return the sizes that the trainer registered."""
        return await self._send_as(HttpRequest("GET", "/info"), Info, timeout)

    @client_method
    async def wandb_info(self, *, timeout: float | None = None) -> WandbInfo:
        """Return the trainer's Weights & Biases group and project."""
        return await self._send_as(HttpRequest("GET", "/wandb_info"), WandbInfo, timeout)

    @client_method
    async def status(self, *, timeout: float | None = None) -> RunStatus:
        """Return the run's step, queue counts, and the reasons why groups or batches wait."""
        return await self._send_as(HttpRequest("GET", "/status"), RunStatus, timeout)

    @client_method
    async def wait_for_step(self, step: int, *, wait: float = 600.0, timeout: float | None = None) -> RunStatus:
        """Wait until the trainer has pulled batch number `step`, so that `current_step` is at least `step`.

        `current_step` is `starting_step` plus the number of batches that the trainer has pulled. In a trainer with
        several ranks, only rank 0 pulls batches. The other ranks call this method to wait for the next step, and then
        receive the batch from rank 0.

        Args:
            wait: Maximum seconds to wait.

        Raises:
            UsageError: The run was reset during the wait, so the step may never be reached.
            UnavailableError: The step was not reached within `wait` seconds. `TrajectoryClient` lists other causes.
        """
        last = 0

        def reached(status: RunStatus) -> bool:
            nonlocal last
            before, last = last, status.current_step
            if last < min(before, step):
                raise UsageError(
                    f"{self.url}: the run was reset during the wait for step {step}: it was at step {before}, "
                    f"and is at step {last}. A registration with other settings resets a run, and so does /reset_data."
                )
            return last >= step

        status = await self._poll(
            lambda: self._send_as(HttpRequest("GET", "/status"), RunStatus, timeout), reached, wait
        )
        if status.current_step < step:
            raise UnavailableError(
                f"{self.url}: step {step} did not come within {wait:g} s; the run is at step {last}, with "
                f"{status.queue_size} groups in the queue. Does rank 0 pull batches?"
            )
        return status

    @client_method
    async def batch(
        self,
        *,
        wait: float = 0.0,
        lease: float | None = None,
        consumer: str | None = None,
        policy_version: int | None = None,
        request: str | None = None,
        timeout: float | None = None,
    ) -> ServedBatch | None:
        """Return the next batch, or None if too few sequences are queued.

        If a reply is lost, a retry returns the same batch.

        Args:
            wait: Seconds to wait for a batch, at most 60.
            lease: Seconds for which this consumer owns the batch. If the consumer sends no `ack` during this time, the
                service delivers the batch again. None means that the batch is acknowledged when it is delivered.
            consumer: Name of the consumer. None means this client's name. A consumer can have only one request at a
                time, so concurrent threads or tasks need different names.
            policy_version: The trainer's current policy version.
            request: Key of this request. None means a new key. To repeat a request after an error, pass the same key.
                If the service has already answered the first request, it returns the same batch.

        Raises:
            UnavailableError: No trainer has registered. `TrajectoryClient` lists other causes.
        """
        if not 0 <= wait <= _LONGEST_WAIT:
            raise UsageError(f"The wait for a batch must be from 0 to {_LONGEST_WAIT:g} s; got wait={wait}.")
        params = {
            "wait": wait or None,
            "lease": lease,
            "consumer": consumer or self.consumer,
            "request": request or new_key(),
            "policy_version": policy_version,
        }
        params = {name: value for name, value in params.items() if value is not None}
        asked = HttpRequest("GET", "/batch", params, {"Accept": MSGPACK}, server_wait=wait)
        content = await self._send_accepted(asked, timeout)
        if content.get("batch") is None:
            return None
        groups = [Group.from_item(item) for item in content["batch"]]
        return ServedBatch(groups, content["batch_id"], content["step"], bool(content["redelivered"]))

    @client_method
    async def ack(self, batch_id: int, *, timeout: float | None = None) -> bool:
        """Acknowledge a leased batch. Return False if it is already acknowledged, or if the run was reset."""
        return await self._update_lease("ack", batch_id, {}, timeout)

    @client_method
    async def nack(self, batch_id: int, *, consumer: str | None = None, timeout: float | None = None) -> bool:
        """Return a leased batch. The next request gets it. Return False if this consumer does not own the batch."""
        return await self._update_lease("nack", batch_id, {"consumer": consumer or self.consumer}, timeout)

    @client_method
    async def renew(
        self, batch_id: int, lease: float, *, consumer: str | None = None, timeout: float | None = None
    ) -> bool:
        """Extend the lease of a batch to `lease` seconds from now. Return False if this consumer no longer owns it."""
        arguments = {"consumer": consumer or self.consumer, "lease": lease}
        return await self._update_lease("renew", batch_id, arguments, timeout)

    @client_method
    async def set_policy_version(self, version: int, *, timeout: float | None = None) -> None:
        """Set the trainer's current policy version. A `batch` call can set it too."""
        await self._send_accepted(post_request("/policy-version", {"policy_version": version}), timeout)

    @client_method
    async def pause(self, *, timeout: float | None = None) -> None:
        """Ask all environments to start no new groups until `resume` is called, for example during an evaluation."""
        await self._send_accepted(post_request("/pause", {}), timeout)

    @client_method
    async def resume(self, *, timeout: float | None = None) -> None:
        """End a pause, so that environments start new groups again."""
        await self._send_accepted(post_request("/resume", {}), timeout)

    async def _update_lease(self, action: str, batch_id: int, arguments: dict[str, Any], timeout: float | None) -> bool:
        request = HttpRequest("POST", f"/batch/{batch_id}/{action}", arguments)
        reply = await self._send_with_retries(request, timeout)
        content = reply.content
        if reply.status == 404 and isinstance(content, dict) and content.get("status") == "failure":
            return False
        self._accepted_content(request, reply)
        return True


class EnvironmentCalls(BaseClient):
    """Calls for environments."""

    @client_method
    async def register_env(
        self,
        *,
        desired_name: str,
        max_token_length: int,
        group_size: int | None = None,
        weight: float = 1.0,
        min_batch_allocation: float | None = None,
        resume_token: str | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> RegisteredEnv:
        """Register an environment. With the `resume_token` of an earlier answer, it keeps its id and name.

        Args:
            group_size: Number of sequences in each group. None means the size of the first group.
            max_token_length: Maximum number of tokens in a sequence.
            weight: Relative weight. The share of an environment is proportional to weight times `max_token_length`.
            min_batch_allocation: Fraction of each batch, from 0 to 1, that is reserved for the environment.
            wait: Seconds to wait until the trainer requests its first batch. Environments cannot register earlier.

        Raises:
            UnavailableError: The trainer requested no batch within `wait` seconds. `TrajectoryClient` lists other
                causes.
        """
        settings = {
            "desired_name": desired_name,
            "group_size": group_size,
            "max_token_length": max_token_length,
            "weight": weight,
            "min_batch_allocation": min_batch_allocation,
        }
        if resume_token is not None:
            settings["resume_token"] = resume_token

        def ask() -> Any:
            # Each poll has a new key. If an answer is lost, the retry has the key of the poll.
            return self._send_accepted(post_request("/register-env", settings, {"Idempotency-Key": new_key()}), timeout)

        content = await self._poll(ask, lambda content: content.get("status") == "success", wait)
        if content.get("status") != "success":
            raise UnavailableError(
                f"{self.url}: {desired_name!r} waited {wait:g} s to register, and the service still answers "
                f"{content.get('status')!r}. Start the trainer, which must request a batch first, or wait longer."
            )
        return self._convert(content, RegisteredEnv)

    @client_method
    async def disconnect_env(self, env_id: int, *, timeout: float | None = None) -> None:
        """Disconnect an environment. Its groups stay in the queue."""
        await self._send_accepted(post_request("/disconnect-env", {"env_id": env_id}), timeout)

    @client_method
    async def heartbeat(self, env_id: int, *, timeout: float | None = None) -> None:
        """Send a heartbeat. Groups and `env_status` requests also count as heartbeats."""
        await self._send_accepted(post_request("/heartbeat", {"env_id": env_id}), timeout)

    @client_method
    async def env_status(self, env_id: int, *, timeout: float | None = None) -> EnvStatus:
        """Return the state of the queue, from which an environment decides whether to start a new group."""
        return await self._send_as(HttpRequest("GET", "/status-env", {"env_id": env_id}), EnvStatus, timeout)

    @client_method
    async def wait_until_wanted(
        self, env_id: int, max_queued: int, *, wait: float = 600.0, timeout: float | None = None
    ) -> EnvStatus:
        """Wait until the environment should start a new group: at most `max_queued` groups wait, and `hold` is False.

        Each poll counts as a heartbeat. The unit of `max_queued` is groups of this environment's size. To allow N
        waiting batches, set it to N * batch_size / group_size.

        Raises:
            UnavailableError: The environment must still wait after `wait` seconds. `TrajectoryClient` lists other
                causes.
        """

        def wanted(status: EnvStatus) -> bool:
            return status.queue_size <= max_queued and not status.hold

        asked = HttpRequest("GET", "/status-env", {"env_id": env_id})
        status = await self._poll(lambda: self._send_as(asked, EnvStatus, timeout), wanted, wait)
        if not wanted(status):
            raise UnavailableError(
                f"{self.url}: environment {env_id} must still wait after {wait:g} s: {status.queue_size} groups "
                f"wait (at most {max_queued} may), and hold is {status.hold}. Is the trainer running?"
            )
        return status

    @client_method
    async def post(
        self,
        groups: Group | Sequence[Group],
        *,
        binary: bool = True,
        key: str | None = None,
        timeout: float | None = None,
    ) -> PostResult:
        """Send one group, or several groups in one request. After this call, the groups survive a service crash.

        Args:
            binary: True means MessagePack with binary arrays, False means JSON.
            key: Idempotency key. None means a new key. If you may repeat the call, for example after a restart, pass
                your own key. Then the groups are added only once.

        Returns:
            The result for the accepted groups. If some groups are too old, the service skips only these.

        Raises:
            StaleGroupError: All groups are too old for the trainer.
            UnavailableError: Until the deadline, the service was full, or the queue was too long: the groups would
                become too old in it. `TrajectoryClient` lists other causes.
        """
        one = isinstance(groups, Group)
        listed = [groups] if isinstance(groups, Group) else list(groups)
        if not listed:
            raise UsageError("There is no group to send: the list is empty.")
        dicts = [group.to_dict(binary=binary) for group in listed]
        try:
            body = (msgspec.msgpack if binary else msgspec.json).encode(dicts[0] if one else dicts)
            for group in listed:
                group.check_json()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UsageError(
                f"A group cannot be sent: {error}. Besides its arrays, a group may hold only JSON values: text, finite "
                "numbers, lists and dicts with text keys."
            ) from error
        headers = {"Content-Type": MSGPACK if binary else JSON, "Idempotency-Key": key or new_key()}
        if self._compress:
            import zstandard  # an optional dependency

            body, headers["Content-Encoding"] = zstandard.ZstdCompressor().compress(body), "zstd"
        request = HttpRequest("POST", "/scored_data" if one else "/scored_data_list", {}, headers, body)
        deadline, began = self._timeout if timeout is None else timeout, time.monotonic()
        pauses = retry.backoff(LONGEST_POLL, LONGEST_POLL, deadline, since=began)
        while True:
            reply = await self._send_with_retries(request, began + deadline - time.monotonic())
            content = self._accepted_content(request, reply)
            if not (refused := content.get("refused", 0)):
                break
            if (pause := next(pauses, None)) is None:
                raise UnavailableError(
                    f"{self.url}: {refused} of {len(listed)} groups were not accepted within {deadline:g} s; the "
                    f"others were. Last error: {content.get('error')} Send all groups again with the same key."
                )
            await self._pause(pause)  # the key prevents that accepted groups are added twice
        size = content.get("buffer_size", content.get("last_buffer_size"))
        status = "buffered" if content.get("buffered") else str(content.get("status"))
        taken = content.get("groups_processed", 1)
        return PostResult(status, taken, size, reply.headers.get("idempotent-replayed") == "true")
