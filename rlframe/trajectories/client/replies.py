"""What the service answers, as a client sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlframe.trajectories.client.groups import Group


@dataclass(frozen=True)
class Registered:
    """To a trainer's `register`."""

    uuid: int  # 128 bits; the same for every rank that registers the same settings


@dataclass(frozen=True)
class Info:
    """What the trainer registered; -1 before."""

    batch_size: int  # sequences
    max_token_len: int


@dataclass(frozen=True)
class WandbInfo:
    """None before the trainer has registered."""

    group: str | None
    project: str | None


@dataclass(frozen=True)
class RunStatus:
    """Groups, unless it says otherwise. What only this service tells is at its default with another."""

    current_step: int  # batches handed out, counted from the registered starting_step
    queue_size: int
    set_aside: int = 0  # of the queue: what can be in no batch; `waiting_for` says why
    waiting_for: list[str] = field(default_factory=list)
    buffered: int = 0  # of odd sizes, until others complete them
    leased: int = 0
    epoch: int = 0
    paused: bool = False
    policy_version: int | None = None
    stored_bytes: int = 0


@dataclass(frozen=True)
class RegisteredEnv:
    """To an environment's `register_env`."""

    env_id: int
    wandb_name: str  # NAME_0, NAME_1, ...
    checkpoint_dir: str
    starting_step: int  # the current one
    checkpoint_interval: int
    num_steps: int
    resume_token: str | None = None  # give it to `register_env` to come back as the same environment


@dataclass(frozen=True)
class EnvStatus:
    """What an environment should know before it starts a group."""

    current_step: int
    queue_size: int  # in groups of the largest size that it has sent
    env_weight: float
    unallocated_fraction: float = 1.0
    self_queue_size: int = 0
    max_group_size: int = 1
    hold: bool = False  # start no group now: all are paused, or the service is full


@dataclass(frozen=True)
class Posted:
    """To groups: `status` is "received", or "buffered" where one is not of its environment's group size."""

    status: str
    groups: int
    buffer_size: int | None  # sequences that wait in the environment's buffer, where buffered
    replayed: bool  # the service had them already: this is its first answer again


@dataclass(frozen=True)
class ServedBatch:
    """A batch: groups of `batch_size` sequences together."""

    groups: list[Group]
    batch_id: int
    step: int  # the training step that it is for
    redelivered: bool  # somebody was given it before, and did not acknowledge it
