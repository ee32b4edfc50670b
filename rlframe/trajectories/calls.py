"""What the clients say: each call once, as a flow (see `exchange`) that either client runs."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.parse
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from rlframe.errors import UnavailableError, UsageError
from rlframe.trajectories import exchange
from rlframe.trajectories.exchange import MSGPACK, Flow, Reply, Request
from rlframe.trajectories.groups import Group
from rlframe.trajectories.replies import (
    EnvStatus,
    Info,
    Posted,
    Registered,
    RegisteredEnv,
    RunStatus,
    ServedBatch,
    WandbInfo,
)

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JSON = "application/json"
_LONGEST_WAIT = 60.0  # seconds that the service holds a request for a batch
_POLL, _LONGEST_POLL = 0.1, 1.0  # seconds between two looks at whether to go on


class Calls:
    """The calls of a client, which repeats this class's arguments and documents them."""

    def __init__(
        self,
        url: str,
        token: str | None,
        run: str | None,
        timeout: float,
        attempt_timeout: float,
        consumer: str | None,
        compress: bool,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"The URL of a trajectory service is like http://HOST:PORT; got {url!r}.")
        if run is not None and not _RUN.fullmatch(run):
            raise UsageError(f"A run's name is 1 to 64 letters, digits, dots, dashes or underscores; got {run!r}.")
        for name, seconds in (("timeout", timeout), ("attempt_timeout", attempt_timeout)):
            if seconds <= 0:
                raise UsageError(f"A client's {name} is more than 0 s; got {seconds}.")
        self.base = url.rstrip("/") + (f"/runs/{run}" if run is not None else "")
        self.headers = {"Accept": _JSON, "Accept-Encoding": "gzip" if compress else "identity"}
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._timeout, self._attempt_timeout, self._compress = timeout, attempt_timeout, compress

    # The trainer.

    def register(
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
        timeout: float | None = None,
    ) -> Flow[Registered]:
        """Says what batches are wanted. The same settings again are confirmed; others start the run afresh.

        Args:
            batch_size: sequences of each batch, exactly.
            max_token_len: of a sequence.
            num_steps: after which environments end.
            max_staleness: policy versions by which a group may be older than the trainer; None: any number.
            stale: "keep" or "discard": what becomes of a group that is older when its turn comes. None: "keep".
            lapse_after: seconds without a sign of life after which no batch waits for an environment. None: 120.
            timeout: seconds for the call, as in every other; None: the client's.
        """
        settings = {name: value for name, value in locals().items() if name not in ("self", "timeout")}
        optional = ("max_staleness", "stale", "lapse_after")
        sent = {name: value for name, value in settings.items() if name not in optional or value is not None}
        return (yield from self._ask(_post("/register", sent), Registered, timeout))

    def info(self, *, timeout: float | None = None) -> Flow[Info]:
        """What the trainer registered."""
        return (yield from self._ask(Request("GET", "/info"), Info, timeout))

    def wandb_info(self, *, timeout: float | None = None) -> Flow[WandbInfo]:
        """Where the trainer logs."""
        return (yield from self._ask(Request("GET", "/wandb_info"), WandbInfo, timeout))

    def status(self, *, timeout: float | None = None) -> Flow[RunStatus]:
        """How much waits, and for what."""
        return (yield from self._ask(Request("GET", "/status"), RunStatus, timeout))

    def batch(
        self,
        *,
        wait: float = 0.0,
        lease: float | None = None,
        consumer: str | None = None,
        policy_version: int | None = None,
        request: str | None = None,
        timeout: float | None = None,
    ) -> Flow[ServedBatch | None]:
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
            "request": request or _key(),
            "policy_version": policy_version,
        }
        params = {name: value for name, value in params.items() if value is not None}
        asked = Request("GET", "/batch", params, {"Accept": MSGPACK}, patience=wait)
        reply = yield from self._exchange(asked, (self._timeout if timeout is None else timeout) + wait)
        content = exchange.accepted(self.base, asked, reply)
        if content.get("batch") is None:
            return None
        groups = [Group.from_item(item) for item in content["batch"]]
        return ServedBatch(groups, content["batch_id"], content["step"], bool(content["redelivered"]))

    def ack(self, batch_id: int, *, consumer: str | None = None, timeout: float | None = None) -> Flow[bool]:
        """Says that a leased batch is done with. False where it was before, or the run has started afresh."""
        return (yield from self._settle("ack", batch_id, consumer, timeout))

    def nack(self, batch_id: int, *, consumer: str | None = None, timeout: float | None = None) -> Flow[bool]:
        """Gives a leased batch back: it is the next to be given. False where it is not this consumer's."""
        return (yield from self._settle("nack", batch_id, consumer, timeout))

    def set_policy_version(self, version: int, *, timeout: float | None = None) -> Flow[None]:
        """Says which version of the parameters the trainer has now; `batch` can say it, too."""
        yield from self._tell(_post("/policy-version", {"policy_version": version}), timeout)

    def pause(self, *, timeout: float | None = None) -> Flow[None]:
        """Has every environment hold, for an evaluation say, until `resume`."""
        yield from self._tell(_post("/pause", {}), timeout)

    def resume(self, *, timeout: float | None = None) -> Flow[None]:
        """Ends `pause`."""
        yield from self._tell(_post("/resume", {}), timeout)

    # Environments.

    def register_env(
        self,
        *,
        desired_name: str,
        group_size: int,
        max_token_length: int,
        weight: float = 1.0,
        min_batch_allocation: float | None = None,
        resume_token: str | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> Flow[RegisteredEnv]:
        """Joins the run; with the `resume_token` of an earlier answer as the same environment, under the same name.

        Args:
            group_size: sequences of its groups.
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
        began, pause = time.monotonic(), _POLL
        while True:
            # A key of its own for each look: the same one would be answered with the first answer again.
            request = _post("/register-env", settings, {"Idempotency-Key": _key()})
            content = exchange.accepted(self.base, request, (yield from self._exchange(request, timeout)))
            if content.get("status") == "success":
                return exchange.convert(self.base, content, RegisteredEnv)
            left = began + wait - time.monotonic()
            if left <= 0:
                raise UnavailableError(
                    f"{self.base}: {desired_name!r} waited {wait:g} s to join, and the service still says "
                    f"{content.get('status')!r}. Start the trainer, which has to ask for a batch once, or wait longer."
                )
            yield min(pause, left)
            pause = min(2 * pause, _LONGEST_POLL)

    def disconnect_env(self, env_id: int, *, timeout: float | None = None) -> Flow[None]:
        """Leaves the run; what was sent stays."""
        yield from self._tell(_post("/disconnect-env", {"env_id": env_id}), timeout)

    def heartbeat(self, env_id: int, *, timeout: float | None = None) -> Flow[None]:
        """A sign of life for an environment that is silent for long; a group is one, and so is `env_status`."""
        yield from self._tell(_post("/heartbeat", {"env_id": env_id}), timeout)

    def env_status(self, env_id: int, *, timeout: float | None = None) -> Flow[EnvStatus]:
        """How much waits, as the environment should see it."""
        return (yield from self._ask(Request("GET", "/status-env", {"env_id": env_id}), EnvStatus, timeout))

    def post(
        self,
        groups: Group | Sequence[Group],
        *,
        binary: bool = True,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Flow[Posted]:
        """Sends a group, or several in one request. Once it returns, they outlive a crash of the service.

        Args:
            binary: MessagePack with binary arrays; else JSON.
            key: idempotency key; None: a new one. A caller that may repeat the call itself (after its own restart,
                say) gives its own, and the groups are there once.

        Raises:
            UnavailableError: the service is full, or the groups would be too old by their turn, until the deadline (or
                as every call).
        """
        one = isinstance(groups, Group)
        listed = [groups] if isinstance(groups, Group) else list(groups)
        if not listed:
            raise UsageError("There is no group to send: the list is empty.")
        dicts = [group.to_dict(binary=binary) for group in listed]
        body = (msgspec.msgpack if binary else msgspec.json).encode(dicts[0] if one else dicts)
        headers = {"Content-Type": MSGPACK if binary else _JSON, "Idempotency-Key": key or _key()}
        if self._compress:
            body, headers["Content-Encoding"] = _compressed(body), "zstd"
        request = Request("POST", "/scored_data" if one else "/scored_data_list", {}, headers, body)
        began, deadline = time.monotonic(), self._timeout if timeout is None else timeout
        while True:
            left = began + deadline - time.monotonic()
            reply = yield from self._exchange(request, left)
            content = exchange.accepted(self.base, request, reply)
            refused, taken = content.get("refused", 0), content.get("groups_processed", 1)
            if not refused:
                break
            left = began + deadline - time.monotonic()
            if left <= 0:
                raise UnavailableError(
                    f"{self.base}: {refused} of {len(listed)} groups were not accepted within {deadline:g} s, the "
                    f"others were; at last: {content.get('error')} Send all again with the same key, or these later."
                )
            yield min(_LONGEST_POLL, left)  # what was taken is known by its key
        size = content.get("buffer_size", content.get("last_buffer_size"))
        status = "buffered" if content.get("buffered") else str(content.get("status"))
        return Posted(status, taken, size, reply.headers.get("idempotent-replayed") == "true")

    def wait_until_wanted(
        self, env_id: int, max_queued: int, *, wait: float = 600.0, timeout: float | None = None
    ) -> Flow[EnvStatus]:
        """Returns once the environment should start a new group: at most `max_queued` wait, and it is not to hold.

        Asking is a sign of life, too. `max_queued` is in groups of this environment: so many batches as the policy may
        run ahead of, times batch_size / group_size.

        Raises:
            UnavailableError: it still has to hold after `wait` seconds (or as every call).
        """
        began, pause = time.monotonic(), _POLL
        while True:
            status = yield from self.env_status(env_id, timeout=timeout)
            if status.queue_size <= max_queued and not status.hold:
                return status
            left = began + wait - time.monotonic()
            if left <= 0:
                raise UnavailableError(
                    f"{self.base}: environment {env_id} still has to hold after {wait:g} s: {status.queue_size} groups "
                    f"wait, of which it may leave {max_queued}, and hold is {status.hold}. Does the trainer run?"
                )
            yield min(pause, left)
            pause = min(2 * pause, _LONGEST_POLL)

    # Shared.

    def _exchange(self, request: Request, timeout: float | None) -> Flow[Reply]:
        deadline = self._timeout if timeout is None else timeout
        return (yield from exchange.exchange(self.base, request, deadline, self._attempt_timeout))

    def _ask(self, request: Request, reply_type: type[Any], timeout: float | None) -> Flow[Any]:
        content = yield from self._tell(request, timeout)
        return exchange.convert(self.base, content, reply_type)

    def _tell(self, request: Request, timeout: float | None) -> Flow[dict[str, Any]]:
        reply = yield from self._exchange(request, timeout)
        return exchange.accepted(self.base, request, reply)

    def _settle(self, what: str, batch_id: int, consumer: str | None, timeout: float | None) -> Flow[bool]:
        request = Request("POST", f"/batch/{batch_id}/{what}", {"consumer": consumer or self.consumer})
        reply = yield from self._exchange(request, timeout)
        content = reply.content
        if reply.status == 404 and isinstance(content, dict) and content.get("status") == "failure":
            return False
        exchange.accepted(self.base, request, reply)
        return True


def _post(path: str, content: dict[str, Any], headers: dict[str, str] | None = None) -> Request:
    return Request("POST", path, {}, {"Content-Type": _JSON, **(headers or {})}, msgspec.json.encode(content))


def _key() -> str:
    return uuid.uuid4().hex


def _compressed(body: bytes) -> bytes:
    import zstandard  # no client needs it that does not compress

    return zstandard.ZstdCompressor().compress(body)
