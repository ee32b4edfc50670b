"""What environments hand around. The names are those that published environments import."""

from __future__ import annotations

from typing import Any, TypedDict, Union

Item = Any  # what a group starts from: whatever `get_next_item` returns
number = Union[int, float]


class Message(TypedDict, total=False):
    """One turn of a chat, as the OpenAI API has it."""

    role: str  # system, user, assistant or tool
    content: Any  # text, or a list of parts
    reward: float | None


class ScoredDataGroup(TypedDict, total=False):
    """S sequences that answer one item, scored: see `rlframe.trajectories.Group` for shapes and meaning.

    `tokens`, `masks` (the token where it is trained on, -100 where not) and `scores` have to be there.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    inference_logprobs: list[list[float]] | None
    messages: list[list[Message]] | None
    generation_params: dict[str, Any] | None
    group_overrides: dict[str, Any] | None
    overrides: list[dict[str, Any]] | None
    images: Any
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None
    policy_version: int | None  # where not given: the oldest that answered while the group was collected


class ScoredDataItem(TypedDict, total=False):
    """One sequence of a group."""

    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    inference_logprobs: list[float] | None
    messages: list[Message] | None
    group_overrides: dict[str, Any] | None
    overrides: dict[str, Any] | None
    images: Any
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None
