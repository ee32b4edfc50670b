"""What the queue is told at registration, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from rlframe.errors import UsageError, suggest

MAX_BATCH_SIZE = 1_000_000  # packing works with integers of so many bits


@dataclass(frozen=True)
class Registration:
    """What a trainer registers. The last three are this service's own; their defaults are what old clients expect."""

    wandb_group: str
    wandb_project: str
    batch_size: int  # sequences
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int  # steps
    starting_step: int
    num_steps: int
    max_staleness: int | None = None  # policy versions; None: unbounded
    stale: str = "keep"  # or "discard": what happens to a group that is older than max_staleness when its turn comes
    lapse_after: float = 120.0  # seconds without a sign of life after which no batch waits for an environment

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            raise UsageError(f"batch_size is from 1 to {MAX_BATCH_SIZE:,} sequences; got {self.batch_size}.")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise UsageError(f"max_staleness is 0 or more policy versions, or null; got {self.max_staleness}.")
        if self.stale not in ("keep", "discard"):
            raise UsageError(f"stale is 'keep' or 'discard'; got {self.stale!r}.")
        if self.stale == "discard" and self.max_staleness is None:
            raise UsageError("stale='discard' needs max_staleness: the number of policy versions that is still kept.")
        if not (math.isfinite(self.lapse_after) and self.lapse_after > 0):
            raise UsageError(f"lapse_after is a finite number of seconds above 0; got {self.lapse_after}.")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Registration:
        """Raises `UsageError` for a setting that is unknown, missing or cannot be."""
        names = [f.name for f in fields(cls)]
        for name in settings:
            if name not in names:
                raise UsageError(f"There is no setting {name!r} in a registration.{suggest(name, names)}")
        missing = [name for name in names[:8] if name not in settings]
        if missing:
            raise UsageError(f"A registration has to say {', '.join(missing)}.")
        return cls(**settings)


@dataclass(frozen=True)
class Registered:
    uuid: str
    epoch: int  # rises whenever queue, environments and step start afresh


@dataclass(frozen=True)
class RegisteredEnv:
    env_id: int
    wandb_name: str
    starting_step: int  # the current one
    resume_token: str | None


class Added(NamedTuple):
    """`status` is "received", "buffered" (not of its environment's group size) or "refused" (nothing was kept).

    A repeated idempotency key gets the first answer again, with `duplicate` set and without the id.
    """

    status: str
    group_id: int | None = None
    buffer_size: int | None = None  # sequences left in the buffer, where buffered
    duplicate: bool = False
    reason: str | None = None  # a sentence, where refused
    too_large: bool = False  # refused because no batch can hold it: no retry will do better
    too_old: bool = False  # refused, and it gets no younger


@dataclass(frozen=True)
class Status:
    """Groups unless it says otherwise. `queue_size` includes what is set aside, as (unit size, groups)."""

    epoch: int
    current_step: int
    queue_size: int
    set_aside: tuple[tuple[int, int], ...]
    buffered: int  # odd groups that complete no unit yet
    leased: int  # in batches that are out, or came back and wait for the next consumer
    stored_bytes: int  # as told with `add`, of everything whose payload is needed
    live_envs: int
    policy_version: int | None
    started: bool  # the trainer has asked for a batch
    paused: bool


@dataclass(frozen=True)
class EnvStatus:
    """The published server's numbers; `hold` says in one bit that this environment should not start new groups now."""

    current_step: int
    queue_size: int
    env_weight: float
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    hold: bool


@dataclass(frozen=True)
class EnvReport:
    env_id: int
    wandb_name: str
    connected: bool
    live: bool
    weight: float  # its part, as in EnvStatus
    group_size: int
    min_batch_allocation: float | None
    added_groups: int
    added_sequences: int
    added_tokens: int
    served_groups: int
    served_sequences: int
    served_share: float  # of all sequences served in this epoch
    queued_groups: int
    queued_sequences: int
    buffered_groups: int
    oldest_age: float | None  # seconds that its oldest queued unit has waited
    unheard: float  # seconds


@dataclass(frozen=True)
class Waiting:
    """Something that waits, and for what, as a sentence. `env_id` None: of senders that did not say who they are."""

    env_id: int | None
    size: int
    groups: int
    why: str


@dataclass(frozen=True)
class Staleness:
    """Over the groups served in this epoch whose version and the trainer's were known."""

    groups: int = 0
    mean: float = 0.0
    largest: int = 0


@dataclass(frozen=True)
class Report:
    """`oldest_age` is in seconds, of what waits longest; None where nothing waits."""

    envs: list[EnvReport]  # of `registered_envs`, as many as were asked for, by id
    registered_envs: int
    oldest_age: float | None
    waiting: list[Waiting]
    groups_added: int
    sequences_added: int
    tokens_added: int
    queued_sequences: int
    batches_served: int
    groups_served: int
    sequences_served: int
    batches_out: int
    batches_returned: int
    batches_kept: int  # without a lease, for the same request again
    redelivered: int
    discarded: int  # groups that were too old
    refused: int
    duplicates: int
    staleness: Staleness
