"""What trainers and environments say to the service, as coroutines (see `exchange`) that either client runs."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from rlframe import retry
from rlframe.errors import StoppedError, UnavailableError, UsageError
from rlframe.trajectories.client import exchange
from rlframe.trajectories.client.exchange import (
    JSON,
    LONGEST_POLL,
    MSGPACK,
    POLL,
    HttpReply,
    HttpRequest,
    Lost,
    client_method,
    new_key,
    post_request,
)
from rlframe.trajectories.client.groups import Group, Posted, ServedBatch
from rlframe.trajectories.messages import EnvStatus, Info, Registered, RegisteredEnv, RunStatus, WandbInfo

_LONGEST_WAIT = 60.0  # seconds that the service holds a request for a batch

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class BaseClient:
    """All of a client but how it sends: see `TrajectoryClient`.

    Attributes:
        url: of the service and the run.
        consumer: whose the leased batches are.
    """

    _transport: Callable[..., Any]
    _send: Callable[[HttpRequest, float], Awaitable[HttpReply | Lost]]  # makes one attempt, of so many seconds
    _pause: Callable[[float], Awaitable[None]]  # for so many seconds

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        run: str | None = None,
        timeout: float = 60.0,
        attempt_timeout: float = 30.0,
        consumer: str | None = None,
        compress: bool = False,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise UsageError(f"The URL of a trajectory service is like http://HOST:PORT; got {url!r}.")
        if run is not None and not _RUN.fullmatch(run):
            raise UsageError(f"A run's name is 1 to 64 letters, digits, dots, dashes or underscores; got {run!r}.")
        for name, seconds in (("timeout", timeout), ("attempt_timeout", attempt_timeout)):
            if seconds <= 0:
                raise UsageError(f"A client's {name} is more than 0 s; got {seconds}.")
        self.url = url.rstrip("/") + (f"/runs/{run}" if run is not None else "")
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{new_key()[:8]}"
        headers = {"Accept": JSON, "Accept-Encoding": "gzip" if compress else "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._compress = compress
        self._timeout, self._attempt_timeout = timeout, attempt_timeout
        self._stopped = threading.Event()
        self._http = self._transport(headers=headers)

    def stop(self) -> None:
        """Nothing is sent from now on: a call ends with the answer to what was sent, or StoppedError."""
        self._stopped.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError(f"The client of {self.url} was stopped or closed.")

    def _deadline(self, timeout: float | None) -> float:
        """Seconds for a call that was given this `timeout`."""
        return self._timeout if timeout is None else timeout

    async def _exchange(self, request: HttpRequest, timeout: float | None) -> HttpReply:
        """Send a request until it is answered."""
        deadline = self._deadline(timeout)
        return await exchange.exchange(self.url, request, deadline, self._attempt_timeout, self._send, self._pause)

    async def _ask(self, request: HttpRequest, reply_type: type[Any], timeout: float | None) -> Any:
        """As `_tell`; the answer as a `reply_type`."""
        content = await self._tell(request, timeout)
        return exchange.convert(self.url, content, reply_type)

    async def _tell(self, request: HttpRequest, timeout: float | None) -> dict[str, Any]:
        """Send a request until it is accepted."""
        reply = await self._exchange(request, timeout)
        return exchange.accepted(self.url, request, reply)

    # A trainer

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
        return await self._ask(post_request("/register", sent), Registered, timeout)

    @client_method
    async def info(self, *, timeout: float | None = None) -> Info:
        """What the trainer registered."""
        return await self._ask(HttpRequest("GET", "/info"), Info, timeout)

    @client_method
    async def wandb_info(self, *, timeout: float | None = None) -> WandbInfo:
        """Where the trainer logs."""
        return await self._ask(HttpRequest("GET", "/wandb_info"), WandbInfo, timeout)

    @client_method
    async def status(self, *, timeout: float | None = None) -> RunStatus:
        """How much waits, and for what."""
        return await self._ask(HttpRequest("GET", "/status"), RunStatus, timeout)

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
        asked = HttpRequest("GET", "/batch", params, {"Accept": MSGPACK}, patience=wait)
        reply = await self._exchange(asked, self._deadline(timeout) + wait)
        content = exchange.accepted(self.url, asked, reply)
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
        await self._tell(post_request("/policy-version", {"policy_version": version}), timeout)

    @client_method
    async def pause(self, *, timeout: float | None = None) -> None:
        """Have every environment hold, for an evaluation say, until `resume`."""
        await self._tell(post_request("/pause", {}), timeout)

    @client_method
    async def resume(self, *, timeout: float | None = None) -> None:
        """End `pause`."""
        await self._tell(post_request("/resume", {}), timeout)

    async def _settle(self, what: str, batch_id: int, told: dict[str, Any], timeout: float | None) -> bool:
        request = HttpRequest("POST", f"/batch/{batch_id}/{what}", told)
        reply = await self._exchange(request, timeout)
        content = reply.content
        if reply.status == 404 and isinstance(content, dict) and content.get("status") == "failure":
            return False
        exchange.accepted(self.url, request, reply)
        return True

    # An environment

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
        looks = retry.pauses(POLL, LONGEST_POLL, wait)
        while True:
            # A key for each look: what is sent again because an answer was lost has the same one.
            request = post_request("/register-env", settings, {"Idempotency-Key": new_key()})
            content = exchange.accepted(self.url, request, await self._exchange(request, timeout))
            if content.get("status") == "success":
                return exchange.convert(self.url, content, RegisteredEnv)
            pause = next(looks, None)
            if pause is None:
                raise UnavailableError(
                    f"{self.url}: {desired_name!r} waited {wait:g} s to join, and the service still says "
                    f"{content.get('status')!r}. Start the trainer, which has to ask for a batch once, or wait longer."
                )
            await self._pause(pause)

    @client_method
    async def disconnect_env(self, env_id: int, *, timeout: float | None = None) -> None:
        """Leave the run; what was sent stays."""
        await self._tell(post_request("/disconnect-env", {"env_id": env_id}), timeout)

    @client_method
    async def heartbeat(self, env_id: int, *, timeout: float | None = None) -> None:
        """A sign of life for an environment that is silent for long; a group is one, and so is `env_status`."""
        await self._tell(post_request("/heartbeat", {"env_id": env_id}), timeout)

    @client_method
    async def env_status(self, env_id: int, *, timeout: float | None = None) -> EnvStatus:
        """How much waits, as the environment should see it."""
        return await self._ask(HttpRequest("GET", "/status-env", {"env_id": env_id}), EnvStatus, timeout)

    @client_method
    async def post(
        self,
        groups: Group | Sequence[Group],
        *,
        binary: bool = True,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Posted:
        """Send a group, or several in one request. Once it returns, they outlive a crash of the service.

        Args:
            binary: MessagePack with binary arrays; else JSON.
            key: idempotency key; None: a new one. A caller that may repeat the call itself (after its own restart,
                say) gives its own, and the groups are there once.

        Returns:
            What was kept: of several groups, those that are too old already are not.

        Raises:
            TooOldError: there is none that the trainer still takes.
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
            body, headers["Content-Encoding"] = _compressed(body), "zstd"
        request = HttpRequest("POST", "/scored_data" if one else "/scored_data_list", {}, headers, body)
        began, deadline = time.monotonic(), self._deadline(timeout)
        while True:
            left = began + deadline - time.monotonic()
            reply = await self._exchange(request, left)
            content = exchange.accepted(self.url, request, reply)
            refused, taken = content.get("refused", 0), content.get("groups_processed", 1)
            if not refused:
                break
            left = began + deadline - time.monotonic()
            if left <= 0:
                raise UnavailableError(
                    f"{self.url}: {refused} of {len(listed)} groups were not accepted within {deadline:g} s, the "
                    f"others were; at last: {content.get('error')} Send all again with the same key, or these later."
                )
            await self._pause(min(LONGEST_POLL, left))  # what was taken is known by its key
        size = content.get("buffer_size", content.get("last_buffer_size"))
        status = "buffered" if content.get("buffered") else str(content.get("status"))
        return Posted(status, taken, size, reply.headers.get("idempotent-replayed") == "true")


def _compressed(body: bytes) -> bytes:
    import zstandard  # no client needs it that does not compress

    return zstandard.ZstdCompressor().compress(body)
