"""The calls of trainers and of environments, as coroutines (see `exchange`) that either client runs."""

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

_LONGEST_WAIT = 60.0  # seconds that the service holds a request for a batch


class TrainerCalls(BaseClient):
    """The calls of trainers."""

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
        """Say what batches are wanted. The same settings again are confirmed; others start the run afresh.

        Args:
            batch_size: sequences of each batch, exactly.
            max_token_len: of a sequence.
            num_steps: after which environments end.
            max_staleness: policy versions by which a group may be older than the trainer; None: any number.
            stale: "keep" or "discard": what becomes of a group that is older when its turn comes. None: "keep".
            lapse_after: seconds without a sign of life after which no batch waits for an environment. None: 120.
            mix: "arrival": the oldest groups go first; "weight": environments are served in proportion to their
                weights, where they send enough. None: "arrival".
            run_key: names the training run, the same for all its ranks and whenever it is resumed: with it the run
                goes on, whatever its settings; with another it starts afresh. None: by the settings alone.
            timeout: seconds for the call, as in every other; None: the client's.
        """
        settings = {name: value for name, value in locals().items() if name not in ("self", "timeout")}
        optional = ("max_staleness", "stale", "lapse_after", "mix", "run_key")
        sent = {name: value for name, value in settings.items() if name not in optional or value is not None}
        return await self._send_as(post_request("/register", sent), Registered, timeout)

    @client_method
    async def info(self, *, timeout: float | None = None) -> Info:
        """What the trainer registered."""
        return await self._send_as(HttpRequest("GET", "/info"), Info, timeout)

    @client_method
    async def wandb_info(self, *, timeout: float | None = None) -> WandbInfo:
        """Where the trainer logs."""
        return await self._send_as(HttpRequest("GET", "/wandb_info"), WandbInfo, timeout)

    @client_method
    async def status(self, *, timeout: float | None = None) -> RunStatus:
        """How much waits, and for what."""
        return await self._send_as(HttpRequest("GET", "/status"), RunStatus, timeout)

    @client_method
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
        last = 0

        def reached(status: RunStatus) -> bool:
            nonlocal last
            before, last = last, status.current_step
            if last < min(before, step):
                raise UsageError(
                    f"{self.url}: the run started afresh while step {step} was waited for: it was at step {before}, "
                    f"and is at step {last}. A registration with other settings does that, and so does /reset_data."
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
        """The next batch; None while there is not enough. Asked again after a lost reply, it is the same batch.

        Args:
            wait: seconds to wait for one, at most 60.
            lease: seconds for which it is this consumer's, until `ack`; then somebody gets it again. None: it is
                acknowledged as it is given.
            consumer: who asks; None: this client. A consumer asks for one batch at a time: give threads or tasks that
                ask at once a name each.
            policy_version: that the trainer has now.
            request: key of this request; None: a new one. To go on asking after an error for what was perhaps given,
                give the same again.

        Raises:
            UnavailableError: no trainer has registered (or as every call).
        """
        if not 0 <= wait <= _LONGEST_WAIT:
            raise UsageError(f"A client waits from 0 to {_LONGEST_WAIT:g} s for a batch; got wait={wait}.")
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
        """Say that a leased batch is done with. False where it was before, or the run has started afresh."""
        return await self._settle("ack", batch_id, {}, timeout)

    @client_method
    async def nack(self, batch_id: int, *, consumer: str | None = None, timeout: float | None = None) -> bool:
        """Give a leased batch back: it is the next to be given. False where it is not this consumer's."""
        return await self._settle("nack", batch_id, {"consumer": consumer or self.consumer}, timeout)

    @client_method
    async def renew(
        self, batch_id: int, lease: float, *, consumer: str | None = None, timeout: float | None = None
    ) -> bool:
        """Have a leased batch for `lease` seconds from now on. False where it is not this consumer's any more."""
        told = {"consumer": consumer or self.consumer, "lease": lease}
        return await self._settle("renew", batch_id, told, timeout)

    @client_method
    async def set_policy_version(self, version: int, *, timeout: float | None = None) -> None:
        """Say which version of the parameters the trainer has now; `batch` can say it, too."""
        await self._send_accepted(post_request("/policy-version", {"policy_version": version}), timeout)

    @client_method
    async def pause(self, *, timeout: float | None = None) -> None:
        """Have every environment hold, for an evaluation say, until `resume`."""
        await self._send_accepted(post_request("/pause", {}), timeout)

    @client_method
    async def resume(self, *, timeout: float | None = None) -> None:
        """End `pause`."""
        await self._send_accepted(post_request("/resume", {}), timeout)

    async def _settle(self, what: str, batch_id: int, told: dict[str, Any], timeout: float | None) -> bool:
        request = HttpRequest("POST", f"/batch/{batch_id}/{what}", told)
        reply = await self._send_with_retries(request, timeout)
        content = reply.content
        if reply.status == 404 and isinstance(content, dict) and content.get("status") == "failure":
            return False
        self._accepted_content(request, reply)
        return True


class EnvironmentCalls(BaseClient):
    """The calls of environments."""

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
        """Join the run; with the `resume_token` of an earlier answer as the same environment, under the same name.

        Args:
            group_size: sequences of its groups; None: its first group says it.
            max_token_length: of its sequences.
            weight: how much it should count among all, beside the length of its sequences.
            min_batch_allocation: from 0 to 1: the part of each batch that is its own.
            wait: seconds to wait for the trainer's first request for a batch, before which nobody can join.

        Raises:
            UnavailableError: the trainer has not asked for a batch by then (or as every call).
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
            # A key for each look: what is sent again because an answer was lost has the same one.
            return self._send_accepted(post_request("/register-env", settings, {"Idempotency-Key": new_key()}), timeout)

        content = await self._poll(ask, lambda content: content.get("status") == "success", wait)
        if content.get("status") != "success":
            raise UnavailableError(
                f"{self.url}: {desired_name!r} waited {wait:g} s to join, and the service still says "
                f"{content.get('status')!r}. Start the trainer, which has to ask for a batch once, or wait longer."
            )
        return self._convert(content, RegisteredEnv)

    @client_method
    async def disconnect_env(self, env_id: int, *, timeout: float | None = None) -> None:
        """Leave the run; what was sent stays."""
        await self._send_accepted(post_request("/disconnect-env", {"env_id": env_id}), timeout)

    @client_method
    async def heartbeat(self, env_id: int, *, timeout: float | None = None) -> None:
        """A sign of life for an environment that is silent for long; a group is one, and so is `env_status`."""
        await self._send_accepted(post_request("/heartbeat", {"env_id": env_id}), timeout)

    @client_method
    async def env_status(self, env_id: int, *, timeout: float | None = None) -> EnvStatus:
        """How much waits, as the environment should see it."""
        return await self._send_as(HttpRequest("GET", "/status-env", {"env_id": env_id}), EnvStatus, timeout)

    @client_method
    async def wait_until_wanted(
        self, env_id: int, max_queued: int, *, wait: float = 600.0, timeout: float | None = None
    ) -> EnvStatus:
        """Return once the environment should start a new group: at most `max_queued` wait, and it is not to hold.

        Asking is a sign of life, too. `max_queued` is in groups of this environment: so many batches as the policy may
        run ahead of, times batch_size / group_size.

        Raises:
            UnavailableError: it still has to hold after `wait` seconds (or as every call).
        """

        def wanted(status: EnvStatus) -> bool:
            return status.queue_size <= max_queued and not status.hold

        asked = HttpRequest("GET", "/status-env", {"env_id": env_id})
        status = await self._poll(lambda: self._send_as(asked, EnvStatus, timeout), wanted, wait)
        if not wanted(status):
            raise UnavailableError(
                f"{self.url}: environment {env_id} still has to hold after {wait:g} s: {status.queue_size} groups "
                f"wait, of which it may leave {max_queued}, and hold is {status.hold}. Does the trainer run?"
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
        """Send a group, or several in one request. Once it returns, they outlive a crash of the service.

        Args:
            binary: MessagePack with binary arrays; else JSON.
            key: idempotency key; None: a new one. A caller that may repeat the call itself (after its own restart,
                say) gives its own, and the groups are there once.

        Returns:
            What was kept: of several groups, those that are too old already are not.

        Raises:
            StaleGroupError: there is none that the trainer still takes.
            UnavailableError: the service is full, or the groups would be too old by their turn, until the deadline (or
                as every call).
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
                f"A group cannot be sent: {error}. Apart from the arrays, a group holds what JSON has: text, finite "
                "numbers, lists and dicts with text keys."
            ) from error
        headers = {"Content-Type": MSGPACK if binary else JSON, "Idempotency-Key": key or new_key()}
        if self._compress:
            import zstandard  # no client needs it that does not compress

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
                    f"{self.url}: {refused} of {len(listed)} groups were not accepted within {deadline:g} s, the "
                    f"others were; at last: {content.get('error')} Send all again with the same key, or these later."
                )
            await self._pause(pause)  # what was taken is known by its key
        size = content.get("buffer_size", content.get("last_buffer_size"))
        status = "buffered" if content.get("buffered") else str(content.get("status"))
        taken = content.get("groups_processed", 1)
        return PostResult(status, taken, size, reply.headers.get("idempotent-replayed") == "true")
