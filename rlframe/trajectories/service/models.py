"""The small requests and all answers, as the service's OpenAPI document describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Field

from rlframe.trajectories.queue import answers

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what the log can carry
Version = Annotated[int, Field(ge=-(2**53), le=2**53)]  # what JSON carries everywhere; differences have 64 bits too
Count = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=4096)]


class Registration(BaseModel):
    """What a trainer tells first. The same again is confirmed; anything else starts a new epoch."""

    wandb_group: Text
    wandb_project: Text
    batch_size: int = Field(ge=1, le=answers.MAX_BATCH_SIZE, description="Sequences in every batch, exactly.")
    max_token_len: Int64
    checkpoint_dir: Text
    save_checkpoint_interval: Int64
    starting_step: Int64
    num_steps: Int64
    max_staleness: Count | None = Field(None, description="Policy versions by which a group may be older.")
    stale: Literal["keep", "discard"] = Field(
        "keep", description="What becomes of a group that is too old at its turn."
    )
    lapse_after: float = Field(
        120.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds of silence after which no batch waits for an environment.",
    )


class RegisterEnv(BaseModel):
    max_token_length: Count
    desired_name: Text
    weight: float = Field(allow_inf_nan=False)
    group_size: int = Field(ge=1, lt=2**63, description="Sequences in each of its groups.")
    min_batch_allocation: float | None = Field(None, ge=0, le=1, description="The part of each batch that is its own.")
    resume_token: Text | None = Field(None, description="From an earlier answer: the same id and name again.")


class EnvIdentifier(BaseModel):
    env_id: Int64


class PolicyVersion(BaseModel):
    policy_version: Version


class Root(BaseModel):
    message: str


class Runs(BaseModel):
    runs: list[str]


class Registered(BaseModel):
    uuid: int = Field(description="128 bits.")


class WandbInfo(BaseModel):
    group: str | None
    project: str | None


class Info(BaseModel):
    batch_size: int
    max_token_len: int


class Status(BaseModel):
    current_step: int = Field(description="Batches handed out, from starting_step on.")
    queue_size: int = Field(description="Groups.")
    set_aside: int = Field(description="Groups that cannot be part of an exact batch, with the sizes that are sent.")
    waiting_for: list[str]
    buffered: int
    leased: int
    epoch: int
    paused: bool
    policy_version: int | None
    stored_bytes: int


class EnvRegistered(BaseModel):
    status: Literal["success"]
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int
    resume_token: str | None


class Wait(BaseModel):
    status: Literal["wait for trainer to start"]


class Success(BaseModel):
    status: Literal["success"]


class Failure(BaseModel):
    status: Literal["failure"]
    error: str


class Versioned(Success):
    policy_version: int


class EnvStatus(BaseModel):
    current_step: int
    queue_size: int = Field(description="Groups, of this environment's size.")
    env_weight: float
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    hold: bool = Field(description="Whether this environment should not start new groups now.")


class Received(BaseModel):
    status: Literal["received", "buffered"]
    buffer_size: int = Field(0, description="Only where buffered: sequences that wait for others to complete a group.")


class ListReceived(BaseModel):
    status: Literal["received"]
    groups_processed: int
    buffered: int = 0
    last_buffer_size: int = 0
    too_old: int = 0


class Item(BaseModel):
    """A group: `[sequence][token]`, but for scores."""

    tokens: list[list[int]]
    masks: list[list[int]] = Field(description="-100 where there is no loss.")
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = Field(None, description="Each has a role and content.")
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = Field(None, description="1.0 where there is no loss.")
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    distill_token_ids: list[list[list[int]]] | None = Field(None, description="[sequence][position][k]")
    distill_logprobs: list[list[list[float]]] | None = Field(None, description="[sequence][position][k]")
    policy_version: Version | None = Field(None, description="That the group was sampled from.")


class NoItem(BaseModel):
    """The keys of a group, where there is none."""

    tokens: list[Any]
    masks: list[Any]
    scores: list[Any]
    advantages: list[Any]
    ref_logprobs: list[Any]
    generation_params: list[Any]
    inference_logprobs: list[Any]
    messages: list[Any]
    images: list[Any]


class Batch(BaseModel):
    batch: list[Item] | None
    batch_id: int | None = Field(None, description="With lease or consumer only.")
    step: int | None = Field(None, description="With lease or consumer only.")
    redelivered: bool | None = Field(None, description="With lease or consumer only.")


class Latest(BaseModel):
    groups: list[Item]


class NotRegistered(BaseModel):
    status: Literal["error"]
    message: str
    batch: list[Item]


class Refused(BaseModel):
    status: Literal["full", "too early", "failure"]
    error: str


class TooOld(BaseModel):
    status: Literal["too old"]
    error: str


class Refusal(BaseModel):
    detail: str


class Problem(BaseModel):
    loc: list[Union[str, int]]
    msg: str
    type: str


class Invalid(BaseModel):
    detail: list[Problem]
