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
        turns = [len(chat) - 1]
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
    """Return where the content of a turn begins, where it ends, and where the next turn begins."""
    start = len(tokenizer.apply_chat_template(chat[:turn], add_generation_prompt=True))
    end = len(tokenizer.apply_chat_template(chat[: turn + 1])) if turn + 1 < len(chat) else len(tokens)
    message, part = chat[turn], tokens[start:end]
    if not isinstance(message.get("content"), str) or message.get("tool_calls"):
        ends = [position for position, token in enumerate(part, start=start) if token in stops]
        return start, ends[-1] if ends else end, end
    others = [
        list(tokenizer.apply_chat_template([*chat[:turn], {**message, "content": content}]))[start:]
        for content in _PLACEHOLDERS
    ]
    opening = min(_common(part, other) for other in others)
    closing = min(_common(reversed(part), reversed(other)) for other in others)
    # Templates may put an empty thought before a content that has none.
    if message["content"].lstrip().startswith(tokenizer.decode(part[:opening]).strip()):
        opening = 0
    return start + opening, max(start + opening, end - closing), end


def _common(one: Iterable[int], other: Iterable[int]) -> int:
    """Count the first tokens that two sequences share."""
    count = 0
    for token, its in zip(one, other):
        if token != its:
            break
        count += 1
    return count
