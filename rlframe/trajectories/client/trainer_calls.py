"""What a trainer says to the service, as flows (see `exchange`) that either client runs."""

from __future__ import annotations

from typing import Any

from rlframe.errors import UsageError
from rlframe.trajectories.client import exchange
from rlframe.trajectories.client.caller import Caller, new_key, post_request
from rlframe.trajectories.client.exchange import MSGPACK, Flow, Request
from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.client.replies import Info, Registered, RunStatus, ServedBatch, WandbInfo

_LONGEST_WAIT = 60.0  # seconds that the service holds a request for a batch


class TrainerCalls(Caller):
    """Calls of a trainer."""

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
        return (yield from self.ask(post_request("/register", sent), Registered, timeout))

    def info(self, *, timeout: float | None = None) -> Flow[Info]:
        """What the trainer registered."""
        return (yield from self.ask(Request("GET", "/info"), Info, timeout))

    def wandb_info(self, *, timeout: float | None = None) -> Flow[WandbInfo]:
        """Where the trainer logs."""
        return (yield from self.ask(Request("GET", "/wandb_info"), WandbInfo, timeout))

    def status(self, *, timeout: float | None = None) -> Flow[RunStatus]:
        """How much waits, and for what."""
        return (yield from self.ask(Request("GET", "/status"), RunStatus, timeout))

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
            "request": request or new_key(),
            "policy_version": policy_version,
        }
        params = {name: value for name, value in params.items() if value is not None}
        asked = Request("GET", "/batch", params, {"Accept": MSGPACK}, patience=wait)
        reply = yield from self.exchange(asked, (self.deadline(timeout)) + wait)
        content = exchange.accepted(self.base, asked, reply)
        if content.get("batch") is None:
            return None
        groups = [Group.from_item(item) for item in content["batch"]]
        return ServedBatch(groups, content["batch_id"], content["step"], bool(content["redelivered"]))

    def ack(self, batch_id: int, *, timeout: float | None = None) -> Flow[bool]:
        """Says that a leased batch is done with. False where it was before, or the run has started afresh."""
        return (yield from self._settle("ack", batch_id, {}, timeout))

    def nack(self, batch_id: int, *, consumer: str | None = None, timeout: float | None = None) -> Flow[bool]:
        """Gives a leased batch back: it is the next to be given. False where it is not this consumer's."""
        return (yield from self._settle("nack", batch_id, {"consumer": consumer or self.consumer}, timeout))

    def renew(
        self, batch_id: int, lease: float, *, consumer: str | None = None, timeout: float | None = None
    ) -> Flow[bool]:
        """Has a leased batch for `lease` seconds from now on. False where it is not this consumer's any more."""
        told = {"consumer": consumer or self.consumer, "lease": lease}
        return (yield from self._settle("renew", batch_id, told, timeout))

    def set_policy_version(self, version: int, *, timeout: float | None = None) -> Flow[None]:
        """Says which version of the parameters the trainer has now; `batch` can say it, too."""
        yield from self.tell(post_request("/policy-version", {"policy_version": version}), timeout)

    def pause(self, *, timeout: float | None = None) -> Flow[None]:
        """Has every environment hold, for an evaluation say, until `resume`."""
        yield from self.tell(post_request("/pause", {}), timeout)

    def resume(self, *, timeout: float | None = None) -> Flow[None]:
        """Ends `pause`."""
        yield from self.tell(post_request("/resume", {}), timeout)

    def _settle(self, what: str, batch_id: int, told: dict[str, Any], timeout: float | None) -> Flow[bool]:
        request = Request("POST", f"/batch/{batch_id}/{what}", told)
        reply = yield from self.exchange(request, timeout)
        content = reply.content
        if reply.status == 404 and isinstance(content, dict) and content.get("status") == "failure":
            return False
        exchange.accepted(self.base, request, reply)
        return True
