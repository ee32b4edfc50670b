"""What an environment says to the service, as flows (see `exchange`) that either client runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from rlframe.errors import UnavailableError, UsageError
from rlframe.trajectories.client import exchange
from rlframe.trajectories.client.caller import JSON, LONGEST_POLL, Caller, new_key, pauses, post_request
from rlframe.trajectories.client.exchange import MSGPACK, Flow, Request
from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.client.replies import EnvStatus, Posted, RegisteredEnv


class EnvCalls(Caller):
    """Calls of an environment."""

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
        looks = pauses(wait)
        while True:
            # A key for each look: what is sent again because an answer was lost has the same one.
            request = post_request("/register-env", settings, {"Idempotency-Key": new_key()})
            content = exchange.accepted(self.base, request, (yield from self.exchange(request, timeout)))
            if content.get("status") == "success":
                return exchange.convert(self.base, content, RegisteredEnv)
            pause = next(looks, None)
            if pause is None:
                raise UnavailableError(
                    f"{self.base}: {desired_name!r} waited {wait:g} s to join, and the service still says "
                    f"{content.get('status')!r}. Start the trainer, which has to ask for a batch once, or wait longer."
                )
            yield pause

    def disconnect_env(self, env_id: int, *, timeout: float | None = None) -> Flow[None]:
        """Leaves the run; what was sent stays."""
        yield from self.tell(post_request("/disconnect-env", {"env_id": env_id}), timeout)

    def heartbeat(self, env_id: int, *, timeout: float | None = None) -> Flow[None]:
        """A sign of life for an environment that is silent for long; a group is one, and so is `env_status`."""
        yield from self.tell(post_request("/heartbeat", {"env_id": env_id}), timeout)

    def env_status(self, env_id: int, *, timeout: float | None = None) -> Flow[EnvStatus]:
        """How much waits, as the environment should see it."""
        return (yield from self.ask(Request("GET", "/status-env", {"env_id": env_id}), EnvStatus, timeout))

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
        body = (msgspec.msgpack if binary else msgspec.json).encode(dicts[0] if one else dicts)
        headers = {"Content-Type": MSGPACK if binary else JSON, "Idempotency-Key": key or new_key()}
        if self.compress:
            body, headers["Content-Encoding"] = _compressed(body), "zstd"
        request = Request("POST", "/scored_data" if one else "/scored_data_list", {}, headers, body)
        began, deadline = time.monotonic(), self.deadline(timeout)
        while True:
            left = began + deadline - time.monotonic()
            reply = yield from self.exchange(request, left)
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
            yield min(LONGEST_POLL, left)  # what was taken is known by its key
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
        looks = pauses(wait)
        while True:
            status = yield from self.env_status(env_id, timeout=timeout)
            if status.queue_size <= max_queued and not status.hold:
                return status
            pause = next(looks, None)
            if pause is None:
                raise UnavailableError(
                    f"{self.base}: environment {env_id} still has to hold after {wait:g} s: {status.queue_size} groups "
                    f"wait, of which it may leave {max_queued}, and hold is {status.hold}. Does the trainer run?"
                )
            yield pause


def _compressed(body: bytes) -> bytes:
    import zstandard  # no client needs it that does not compress

    return zstandard.ZstdCompressor().compress(body)
