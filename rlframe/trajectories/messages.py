"""What trainers and environments are told, the trainer's registration, and the names in a group: as the queue, the
service and its clients have them. The service's OpenAPI document is made from these: `metadata` is for pydantic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlframe.errors import UsageError

IGNORED = -100  # in the masks of a group, of a token that nothing is learned from
INT_FIELDS = ("tokens", "masks")  # arrays of a group
FLOAT_FIELDS = ("advantages", "ref_logprobs", "inference_logprobs")
ANY_LENGTH_FIELD = (
    "advantages"  # of them: as lists it need not be as long as the tokens, and then nobody learns from it
)
MAX_FLOAT32 = 2.0**128 - 2.0**104  # number in them, and of scores: larger ones would be infinite as float32

MAX_BATCH_SIZE = 1_000_000  # sequences: packing works with integers of so many bits
INT64_LIMITS = {"ge": -(2**63), "lt": 2**63}  # what the log can carry
TEXT_LIMITS = {"max_length": 4096}


@dataclass(frozen=True)
class Registration:
    """What a trainer tells first. The same again is confirmed; anything else starts a new epoch.

    From `max_staleness` on they are this service's own; their defaults are what old clients expect.
    """

    wandb_group: str = field(metadata=TEXT_LIMITS)
    wandb_project: str = field(metadata=TEXT_LIMITS)
    batch_size: int = field(
        metadata={"ge": 1, "le": MAX_BATCH_SIZE, "description": "Sequences in every batch, exactly."}
    )
    max_token_len: int = field(metadata=INT64_LIMITS)
    checkpoint_dir: str = field(metadata=TEXT_LIMITS)
    save_checkpoint_interval: int = field(metadata=INT64_LIMITS)  # steps
    starting_step: int = field(metadata=INT64_LIMITS)
    num_steps: int = field(metadata=INT64_LIMITS)
    max_staleness: int | None = field(
        default=None, metadata={"ge": 0, "lt": 2**63, "description": "Policy versions by which a group may be older."}
    )
    stale: Literal["keep", "discard"] = field(
        default="keep", metadata={"description": "What becomes of a group that is too old at its turn."}
    )
    lapse_after: float = field(
        default=120.0,
        metadata={
            "gt": 0,
            "allow_inf_nan": False,
            "description": "Seconds of silence after which no batch waits for an environment.",
        },
    )
    mix: Literal["arrival", "weight"] = field(
        default="arrival",
        metadata={"description": "weight: environments are served in proportion to env_weight where they send enough."},
    )
    run_key: str | None = field(
        default=None,
        metadata={
            **TEXT_LIMITS,
            "description": "Names the training run: the same goes on with it, another starts afresh.",
        },
    )

    def __post_init__(self) -> None:
        if self.stale == "discard" and self.max_staleness is None:
            raise UsageError("stale='discard' needs max_staleness: the number of policy versions that is still kept.")

    def continues(self, known: Registration) -> bool:
        """Whether it goes on with the run of another registration, whatever its settings are."""
        return self.run_key is not None and self.run_key == known.run_key


@dataclass(frozen=True)
class Registered:
    """To a trainer's `register`."""

    uuid: int = field(metadata={"description": "128 bits; the same for all who register the same settings."})


@dataclass(frozen=True)
class Info:
    """What the trainer registered; -1 before."""

    batch_size: int = -1  # sequences
    max_token_len: int = -1


@dataclass(frozen=True)
class WandbInfo:
    """Of the registration; null before."""

    group: str | None = None
    project: str | None = None


@dataclass(frozen=True)
class RunStatus:
    """Groups, unless it says otherwise. What only this service tells has a default, for clients of others."""

    current_step: int = field(metadata={"description": "Batches handed out, from starting_step on."})
    queue_size: int
    set_aside: int = field(default=0, metadata={"description": "Of the queue: what can be in no exact batch."})
    waiting_for: list[str] = field(default_factory=list)
    buffered: int = 0  # of odd sizes, until others complete them
    leased: int = 0
    epoch: int = 0
    paused: bool = False
    policy_version: int | None = None
    stored_bytes: int = 0
    live_envs: int = 0  # heard of lately


@dataclass(frozen=True)
class RegisteredEnv:
    """To an environment's `register_env`."""

    env_id: int
    wandb_name: str  # NAME_0, NAME_1, ...
    checkpoint_dir: str
    starting_step: int = field(metadata={"description": "The current one."})
    checkpoint_interval: int
    num_steps: int
    resume_token: str | None = field(
        default=None, metadata={"description": "Registers again as the same environment, under the same name."}
    )


@dataclass(frozen=True)
class EnvStatus:
    """What an environment should know before it starts a group."""

    current_step: int
    queue_size: int = field(metadata={"description": "Groups, of the largest size that this environment has sent."})
    env_weight: float
    unallocated_fraction: float = 1.0
    self_queue_size: int = 0
    max_group_size: int = 1
    hold: bool = field(
        default=False, metadata={"description": "Whether this environment should not start new groups now."}
    )
