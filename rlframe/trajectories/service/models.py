"""Requests and answers of the HTTP API. The module `messages` has the classes that clients use too.

The live page shows previews of groups: shortened text in which masked tokens are marked.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, Union

import msgspec
from pydantic import BaseModel, Field, WithJsonSchema

from rlframe import extras
from rlframe.errors import UsageError
from rlframe.trajectories.messages import IGNORED, INT64_LIMITS, TEXT_LIMITS, RegisteredEnv, Registration, RunStatus
from rlframe.trajectories.queue.reports import Report
from rlframe.trajectories.service.wire import JsonGroup, as_json

Decode = Callable[[Sequence[int]], str]  # function from token ids to text

MAX_BYTES = 4 << 20  # maximum size of a payload; to decode a larger one would delay other requests
MAX_SEQUENCES = 16
MAX_TOKENS = 1000  # number of tokens that are shown from each end of a sequence
MAX_CHARACTERS = 20_000  # maximum number of characters that are shown of a message


@dataclass(frozen=True)
class ShownTokens:
    """Consecutive tokens that are all masked, or all not masked."""

    text: str
    masked: bool


@dataclass(frozen=True)
class ShownMessage:
    role: str
    content: str


@dataclass(frozen=True)
class SequencePreview:
    """A shortened sequence. After the first `before_gap` pieces, `left_out` tokens are missing."""

    score: float
    tokens: int
    trained_tokens: int  # number of tokens that are not masked
    pieces: list[ShownTokens]
    before_gap: int
    left_out: int
    messages: list[ShownMessage] | None


@dataclass(frozen=True)
class GroupPreview:
    """A shortened group: its first `MAX_SEQUENCES` sequences. If it is larger than `MAX_BYTES`, none is shown."""

    env_id: int | None
    policy_version: int | None
    size: int | None  # number of sequences, or None if the group is too large to decode
    stored_bytes: int
    sequences: list[SequencePreview]


def preview(payload: bytes, decode: Decode | None) -> GroupPreview:
    """Return the preview of a stored group (see `wire`).

    Args:
        decode: Function from token ids to text. None shows the ids.
    """
    if len(payload) > MAX_BYTES:
        return GroupPreview(None, None, None, len(payload), [])
    group = msgspec.json.decode(as_json(payload))
    messages = group.get("messages") or []
    sequences = [
        _sequence(score, tokens, masks, messages[i] if i < len(messages) else None, decode or ids_as_text)
        for i, (tokens, masks, score) in enumerate(zip(group["tokens"], group["masks"], group["scores"]))
        if i < MAX_SEQUENCES
    ]
    return GroupPreview(group.get("env_id"), group.get("policy_version"), len(group["tokens"]), len(payload), sequences)


def _sequence(
    score: float, tokens: list[int], masks: list[int], messages: list[dict[str, Any]] | None, decode: Decode
) -> SequencePreview:
    left_out = max(0, len(tokens) - 2 * MAX_TOKENS)
    head = len(tokens) if not left_out else MAX_TOKENS
    pieces = list(_pieces(tokens[:head], masks[:head], decode))
    before_gap = len(pieces)
    if left_out:
        pieces += _pieces(tokens[-MAX_TOKENS:], masks[-MAX_TOKENS:], decode)
    return SequencePreview(
        score=score,
        tokens=len(tokens),
        trained_tokens=len(tokens) - masks.count(IGNORED),
        pieces=pieces,
        before_gap=before_gap,
        left_out=left_out,
        messages=None if messages is None else [_message(message) for message in messages],
    )


def _pieces(tokens: Sequence[int], masks: Sequence[int], decode: Decode) -> Iterator[ShownTokens]:
    before: Sequence[int] = ()
    for masked, members in groupby(range(len(tokens)), lambda i: masks[i] == IGNORED):
        indices = list(members)
        ids = tokens[indices[0] : indices[-1] + 1]
        yield ShownTokens(_text_after(before, ids, decode), masked)
        before = ids


def _text_after(before: Sequence[int], ids: Sequence[int], decode: Decode) -> str:
    """Return the text that `ids` add after `before`. If `ids` are decoded alone, a leading space is often lost."""
    if before:
        prefix, text = decode(before), decode([*before, *ids])
        if text.startswith(prefix):
            return text[len(prefix) :]
    return decode(ids)


def _message(message: dict[str, Any]) -> ShownMessage:
    content = message["content"]
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}… ({len(text) - MAX_CHARACTERS:,} more characters)"
    return ShownMessage(str(message["role"]), text)


def load_decode(name: str | None) -> Decode | None:
    """Return the decoder of a tokenizer: `byte`, a `tokenizer.json` file, or the folder of this file. None for None.

    The decoded text includes special tokens. If the tokenizer lacks an id, all ids are shown as numbers.

    Raises:
        UsageError: The package tokenizers is missing, or the file cannot be read.
    """
    if name is None:
        return None
    if name == "byte":
        from rlframe.language.model.tokenizers import ByteTokenizer

        return _of_known_ids(ByteTokenizer().decode, ByteTokenizer.vocab_size)
    path = f"{name}/tokenizer.json" if os.path.isdir(name) else name
    with extras.explain_import_error("--tokenizer", "tokenizers"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package tokenizers raises plain `Exception`s
        raise UsageError(f"The tokenizer file {path} cannot be read: {error}.") from error
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    return _of_known_ids(decode, tokenizer.get_vocab_size(with_added_tokens=True))


def _of_known_ids(text_of: Callable[[list[int]], str], size: int) -> Decode:
    def decode(ids: Sequence[int]) -> str:
        return text_of(list(ids)) if all(0 <= token < size for token in ids) else ids_as_text(ids)

    return decode


def ids_as_text(ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in ids)


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
