"""Types of scored groups. Functions that convert groups for the trajectory service, and chats to tokens and masks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Union

from rlframe.language.model.published_tokenizer import plain_messages
from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.messages import IGNORED

if TYPE_CHECKING:
    from rlframe.language.environments.env import BaseEnv

_ROWS = (
    *("advantages", "ref_logprobs", "inference_logprobs", "messages", "images"),
    *("distill_token_ids", "distill_logprobs"),
)

Item = Any  # the task that a group answers, as returned by `get_next_item`
number = Union[int, float]


class Message(TypedDict, total=False):
    """One turn of a chat, in the format of the OpenAI API."""

    role: str  # system, user, assistant or tool
    content: Any  # text, or a list of parts
    reward: float | None


class ScoredDataGroup(TypedDict, total=False):
    """Several scored sequences that answer one item. `rlframe.trajectories.Group` describes the fields.

    `tokens`, `masks` and `scores` are required. A mask is the token itself if the token is trained on, otherwise -100.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]  # booleans are converted to 1 and 0
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    inference_logprobs: list[list[float]] | None
    messages: list[list[Message]] | None
    generation_params: dict[str, Any] | None
    group_overrides: dict[str, Any] | None
    overrides: list[dict[str, Any]] | None  # for each sequence a dict, such as {"set_advantage_to_zero": True} or {}
    images: Any
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None
    policy_version: int | None  # default: the oldest version of the parameters that answered a request for this group


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


def group_from_items(items: list[ScoredDataItem]) -> ScoredDataGroup:
    """Make a group from sequences. Drop optional fields that any sequence lacks, except the overrides."""
    rows: list[Mapping[str, Any]] = list(items)
    group: dict[str, Any] = {name: [row[name] for row in rows] for name in ("tokens", "masks", "scores")}
    for name in _ROWS:
        if all(row.get(name) is not None for row in rows):
            group[name] = [row[name] for row in rows]
    if any(row.get("overrides") for row in rows):
        group["overrides"] = [row.get("overrides") or {} for row in rows]
    group_overrides: dict[str, Any] = {}
    for row in rows:
        group_overrides |= row.get("group_overrides") or {}
    if group_overrides:
        group["group_overrides"] = group_overrides
    return ScoredDataGroup(**group)  # type: ignore[typeddict-item]


def rejection_reason(env: BaseEnv, group: ScoredDataGroup, check_length: bool) -> str | None:
    """Return the reason why the group must not be sent; None if the group can be sent."""
    config = env.config
    tokens: Any = () if group.get("tokens") is None else group["tokens"]  # a list of rows, or an array
    wanted = (group.get("group_overrides") or {}).get("group_size", config.group_size)
    if len(tokens) != wanted:
        return f"it has {len(tokens)} sequences, expected {wanted}"
    scores = group["scores"]
    if config.ensure_scores_are_not_same and len(scores) > 1 and len(set(map(float, scores))) == 1:
        return f"all its scores are {float(scores[0]):g}"
    longest = max(map(len, tokens))
    if check_length and 0 < env.max_token_len < longest:
        return f"a sequence has {longest} tokens, but the trainer accepts at most {env.max_token_len}"
    return None


def with_messages(tokenizer: Any, group: ScoredDataGroup) -> ScoredDataGroup:
    """Return the group with `messages`. If the group has none, decode each sequence to one message."""
    if group.get("messages"):
        return group
    messages = [[{"role": "user", "content": tokenizer.decode(list(row))}] for row in group["tokens"]]
    return ScoredDataGroup(**{**group, "messages": messages})  # type: ignore[typeddict-item]


def completion_lengths(group: ScoredDataGroup) -> list[int]:
    """Return, for each sequence, the number of tokens that are trained on."""
    return [sum(mask != -100 for mask in row) for row in group["masks"]]


def to_trajectory_group(group: ScoredDataGroup, env_id: int | None, policy_version: int | None) -> Group:
    """Convert a group to a `Group` of the trajectory service. Raise `UsageError` if its rows differ in length."""
    version = group.get("policy_version")
    metadata = {"env_id": env_id, "policy_version": policy_version if version is None else version}
    empty = {name: None for name in ("group_overrides", "overrides", "images") if not group.get(name)}
    rows: Any = group.get("messages")
    messages = {"messages": [plain_messages(row) if isinstance(row, list) else row for row in rows]} if rows else {}
    return Group.from_item({**group, **empty, **messages, **metadata})


_PLACEHOLDERS = ("a", "b")  # any content differs from one of these at its start, and from one of these at its end


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Any],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Convert a chat to `tokens` and `masks`, to train on the last turn, or on all turns of the assistant.

    In these turns, the content and the token that ends the turn are trained on. The model did not sample the other
    tokens, so their mask is -100.

    The tokens can differ from the sampled tokens, because the content is encoded from text. New environments should use
    the tokens and log-probabilities of `self.server.managed_server()`.

    Args:
        tokenizer: Tokenizer with a chat template.
        chat: List of messages: dicts, or messages of the `openai` package.
        include_messages: True also returns the chat as `messages`.
        train_on_all_assistant_turns: True trains on all turns of the assistant, False only on the last turn.
        finish_reason: "length" if the last turn was cut off. The tokens then end with the content of this turn.
    """
    chat = plain_messages(chat)
    tokens = list(tokenizer.apply_chat_template(chat))
    masks = [IGNORED] * len(tokens)
    if train_on_all_assistant_turns:
        turns = [index for index, message in enumerate(chat) if message["role"] in ("assistant", "agent")]
    else:
        turns = list(range(len(chat)))[-1:]
    stops = set(getattr(tokenizer, "stop_token_ids", None) or (tokenizer.eos_token_id,))
    for turn in turns:
        start, content_end, end = _turn(tokenizer, chat, turn, tokens, stops)
        masks[start:content_end] = tokens[start:content_end]
        closing = tokens[content_end:end]
        ending = next((i for i, token in enumerate(closing) if token in stops), None)
        if finish_reason == "length" and turn == len(chat) - 1:
            del tokens[content_end:], masks[content_end:]
        elif ending is not None:
            masks[content_end + ending] = closing[ending]
        else:
            masks[content_end:end] = closing  # it is unknown which token ends a turn
    return {"tokens": tokens, "masks": masks, **({"messages": chat} if include_messages else {})}


def _turn(
    tokenizer: Any, chat: list[dict[str, Any]], turn: int, tokens: list[int], stops: set[int]
) -> tuple[int, int, int]:
    """Return (start of a turn's content, end of the content, end of the tokens that close the turn).

    To find them, replace the content by placeholders, and compare the tokens. Always tokenize the whole chat, because a
    template can render the last turn differently.
    """
    message, before, after = chat[turn], chat[:turn], chat[turn + 1 :]
    calls: dict[str, Any] = {"tool_calls": []} if message.get("tool_calls") else {}
    replaced = [{**message, "content": content, **calls} for content in _PLACEHOLDERS]
    others = [list(tokenizer.apply_chat_template([*before, other, *after])) for other in replaced]
    start = min(_common(tokens, other) for other in others)
    content_end = max(start, len(tokens) - min(_common(reversed(tokens), reversed(other)) for other in others))
    content = None if calls else message.get("content")
    prompt = list(tokenizer.apply_chat_template(before, add_generation_prompt=True)) if before else []
    if prompt and tokens[: len(prompt)] == prompt:
        # Some templates add an empty thought in front of the content.
        added = tokenizer.decode(tokens[len(prompt) : start]).strip()
        if not isinstance(content, str) or content.lstrip().startswith(added):
            start = len(prompt)
    if content == "":  # without content between them, line ends may be merged into other tokens
        start = content_end
    if not isinstance(content, str):
        content_end = next((i for i in range(start, len(tokens)) if tokens[i] in stops), content_end)
        return start, content_end, content_end + 1
    if not after:
        return start, content_end, len(tokens)
    one, other = (list(tokenizer.apply_chat_template([*before, other])) for other in replaced)
    closing = one[len(one) - _common(reversed(one), reversed(other)) :]
    return start, content_end, content_end + _common(tokens[content_end:], closing)


def _common(one: Iterable[int], other: Iterable[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return sum(itertools.takewhile(bool, map(operator.eq, one, other)))
