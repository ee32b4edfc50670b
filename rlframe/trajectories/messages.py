"""Messages that the queue, the service and its clients share: registrations, answers, and the field names of a group.

The service's OpenAPI document is generated from these classes. Pydantic reads their `metadata`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlframe.errors import UsageError

IGNORED = -100  # value in `masks` for a token that is not trained on
INT_FIELDS = ("tokens", "masks")  # integer arrays of a group
FLOAT_FIELDS = ("advantages", "ref_logprobs", "inference_logprobs")
OPAQUE_FIELDS = ("messages", "generation_params", "overrides", "group_overrides", "images")  # JSON values
ANY_LENGTH_FIELD = "advantages"  # the rows of this field can have other lengths than the tokens; such rows are ignored
MAX_FLOAT32 = 2.0**128 - 2.0**104  # maximum absolute value in float arrays and scores

MAX_BATCH_SIZE = 1_000_000  # maximum number of sequences; a batch of N sequences is computed with N-bit integers
INT64_LIMITS = {"ge": -(2**63), "lt": 2**63}  # range of the integers that the log can encode
TEXT_LIMITS = {"max_length": 4096}


@dataclass(frozen=True)
class Registration:
    """The trainer's settings. Different settings start a new epoch of the run. Repeated settings change nothing.

    `max_staleness` and the fields after it extend the contract of atroposlib's server. Their defaults are for clients
    that do not send them.
    """

    wandb_group: str = field(metadata=TEXT_LIMITS)
    wandb_project: str = field(metadata=TEXT_LIMITS)
    batch_size: int = field(
        metadata={"ge": 1, "le": MAX_BATCH_SIZE, "description": "Exact number of sequences in each batch."}
    )
    max_token_len: int = field(metadata=INT64_LIMITS)
    checkpoint_dir: str = field(metadata=TEXT_LIMITS)
    save_checkpoint_interval: int = field(metadata=INT64_LIMITS)  # steps
    starting_step: int = field(metadata=INT64_LIMITS)
    num_steps: int = field(metadata=INT64_LIMITS)
    max_staleness: int | None = field(
        default=None,
        metadata={
            "ge": 0,
            "lt": 2**63,
            "description": "Policy versions by which a group may be older than the trainer's policy.",
        },
    )
    stale: Literal["keep", "discard"] = field(
        default="keep", metadata={"description": "Whether a group that is too old at its turn is kept or discarded."}
    )
    lapse_after: float = field(
        default=120.0,
        metadata={
            "gt": 0,
            "allow_inf_nan": False,
            "description": "Seconds without a heartbeat after which no batch waits for an environment.",
        },
    )
    mix: Literal["arrival", "weight"] = field(
        default="arrival",
        metadata={"description": "arrival: oldest groups first. weight: shares in proportion to env_weight."},
    )
    run_key: str | None = field(
        default=None,
        metadata={
            **TEXT_LIMITS,
            "description": "Name of the training run. Another name resets the run.",
        },
    )

    def __post_init__(self) -> None:
        if self.stale == "discard" and self.max_staleness is None:
            raise UsageError("stale='discard' needs max_staleness, the largest allowed number of policy versions.")

    def continues(self, known: Registration) -> bool:
        """Return whether both registrations have the same run key, so that the run continues with these settings."""
        return self.run_key is not None and self.run_key == known.run_key


@dataclass(frozen=True)
class Registered:
    """The answer to a trainer's registration."""

    uuid: int = field(metadata={"description": "128 bits. The same for all trainers that register the same settings."})


@dataclass(frozen=True)
class Info:
    """Sizes that the trainer registered. Before a registration they are -1."""

    batch_size: int = -1  # sequences
    max_token_len: int = -1


@dataclass(frozen=True)
class WandbInfo:
    """Weights & Biases group and project of the registration. Null before a registration."""

    group: str | None = None
    project: str | None = None


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, in groups unless the name says otherwise.

    Fields that only this service sends have defaults, so that clients also work with other services.
    """

    current_step: int = field(metadata={"description": "Delivered batches, counted from starting_step."})
    queue_size: int
    set_aside: int = field(default=0, metadata={"description": "Queued groups that fit into no exact batch."})
    waiting_for: list[str] = field(default_factory=list)
    buffered: int = 0  # number of undersized groups that wait until more groups complete a unit
    leased: int = 0
    epoch: int = 0
    paused: bool = False
    policy_version: int | None = None
    stored_bytes: int = 0
    live_envs: int = 0  # number of environments with a recent heartbeat


@dataclass(frozen=True)
class RegisteredEnv:
    """The answer to an environment's registration."""

    env_id: int
    wandb_name: str  # NAME_0, NAME_1, ...
    checkpoint_dir: str
    starting_step: int = field(metadata={"description": "The current step of the run."})
    checkpoint_interval: int
    num_steps: int
    resume_token: str | None = field(
        default=None, metadata={"description": "Token to register again with the same id and name."}
    )


@dataclass(frozen=True)
class EnvStatus:
    """The state of the run, from which an environment decides whether to start a new group."""

    current_step: int
    queue_size: int = field(
        metadata={"description": "Queue length in groups of the largest size that this environment has sent."}
    )
    env_weight: float
    unallocated_fraction: float = 1.0
    self_queue_size: int = 0
    max_group_size: int = 1
    hold: bool = field(
        default=False, metadata={"description": "Whether this environment should start no new groups now."}
    )
