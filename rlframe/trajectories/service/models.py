"""Requests and answers of the HTTP API. The module `messages` has the classes that clients use too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import msgspec
from pydantic import BaseModel, Field, WithJsonSchema

from rlframe.trajectories.messages import INT64_LIMITS, TEXT_LIMITS, RegisteredEnv, Registration, RunStatus
from rlframe.trajectories.queue.reports import Report
from rlframe.trajectories.service.previews import GroupPreview
from rlframe.trajectories.service.wire import JsonGroup

Int64 = Annotated[int, Field(**INT64_LIMITS)]
# Every JSON parser reads integers in this range exactly. The difference of two such integers fits into 64 bits.
Version = Annotated[int, Field(ge=-(2**53), le=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(**TEXT_LIMITS)]


class RegisterEnv(BaseModel):
    max_token_length: Count
    desired_name: Text
    weight: float = Field(allow_inf_nan=False)
    group_size: int | None = Field(
        None, ge=1, lt=2**63, description="Sequences in each group. If absent: 1 until the first group."
    )
    min_batch_allocation: float | None = Field(None, ge=0, le=1, description="Fraction of each batch that is reserved.")
    resume_token: Text | None = Field(None, description="Token from an earlier answer, to keep the id and name.")


class EnvIdentifier(BaseModel):
    env_id: Int64


class PolicyVersion(BaseModel):
    policy_version: Version


@dataclass(frozen=True, kw_only=True)
class EnvRegistered(RegisteredEnv):
    """The environment is registered."""

    status: Literal["success"]


class Wait(BaseModel):
    status: Literal["wait for trainer to start"]


class Success(BaseModel):
    status: Literal["success"]


class Failure(BaseModel):
    """The request failed. A retry can succeed only after status 503."""

    status: Literal["failure", "full", "too early", "too old"]
    error: str


class Versioned(Success):
    policy_version: int


class Received(BaseModel):
    status: Literal["received", "buffered"]
    buffer_size: int = Field(0, description="If buffered: sequences that wait for others to complete a group.")


class ListReceived(BaseModel):
    status: Literal["received"]
    groups_processed: int
    buffered: int = 0
    last_buffer_size: int = 0
    too_old: int = 0


# The schema of a group that `wire` decodes. All other fields of a group are dropped.
ITEM: dict[str, Any] = {
    **next(iter(msgspec.json.schema_components([JsonGroup])[1].values())),
    "title": "Item",
    "additionalProperties": True,
}
Item = Annotated[Any, WithJsonSchema(ITEM)]


class BatchAnswer(BaseModel):
    batch: list[Item] | None
    batch_id: int | None = Field(None, description="With lease or consumer only.")
    step: int | None = Field(None, description="With lease or consumer only.")
    redelivered: bool | None = Field(None, description="With lease or consumer only.")


class NotRegistered(BaseModel):
    status: Literal["error"]
    message: str
    batch: None


class Refusal(BaseModel):
    detail: str


class FieldProblem(BaseModel):
    loc: list[Union[str, int]]
    msg: str
    type: str


class Invalid(BaseModel):
    detail: list[FieldProblem]


@dataclass(frozen=True)
class ServiceReport:
    """The part of a report that is the same for all runs. `failed` is the store's error, or null."""

    version: str
    durability: str
    stored_bytes: int  # bytes of all groups, including groups that are being written
    writing_bytes: int
    max_bytes: int
    nearly_full: bool
    failed: str | None


@dataclass(kw_only=True)
class LiveReport(Report):
    """The report for the live page. It covers the current epoch. Times and ages are in seconds, and `now` is the time
    of the service's clock.
    """

    registration: Registration | None
    status: RunStatus
    run: str
    runs: list[str]
    now: float
    service: ServiceReport


@dataclass(frozen=True)
class Previews:
    decoded: bool  # True if tokens are shown as text, False if they are shown as ids
    groups: list[GroupPreview]
