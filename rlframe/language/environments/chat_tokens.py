"""Chats that only exist as text, as tokens for a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlframe.language.model.chat_messages import plain_messages
from rlframe.trajectories.messages import IGNORED

_PLACEHOLDERS = ("a", "b")  # contents that no content agrees with at both its first and its last token


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Any],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Return a chat as `tokens` and `masks`, which are -100 except in the last turn, or in all turns of the assistant.

    In those turns the mask keeps the content and the token that ends the turn. The other tokens that the chat template
    adds were never sampled, so they are -100 too.

    The content is encoded again, and that may give other tokens than were sampled: new environments take tokens and
    log-probabilities from `self.server.managed_server()`.

    Args:
        chat: dicts, or messages of the `openai` package.
        include_messages: return the chat as `messages`.
        finish_reason: "length" if the last turn was cut off: then the tokens end with its content.
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
            masks[content_end:end] = closing  # the tokenizer does not name the template's end of a turn
    return {"tokens": tokens, "masks": masks, **({"messages": chat} if include_messages else {})}


def _turn(
    tokenizer: Any, chat: list[dict[str, Any]], turn: int, tokens: list[int], stops: set[int]
) -> tuple[int, int, int]:
    """Return where the content of a turn begins, where it ends, and where the tokens that close the turn end.

    The content is what changes in the whole chat's tokens if a placeholder replaces it. Templates may render a turn
    differently if it is the last one, so the tokens of the chat up to this turn need not begin the whole chat's.
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
        # Templates may put an empty thought before a content that has none.
        added = tokenizer.decode(tokens[len(prompt) : start]).strip()
        if not isinstance(content, str) or content.lstrip().startswith(added):
            start = len(prompt)
    if content == "":  # a line end before it may have become another token
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
    """Count the first tokens that two sequences share."""
    count = 0
    for token, its in zip(one, other):
        if token != its:
            break
        count += 1
    return count
