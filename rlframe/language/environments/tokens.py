"""Chats as the tokens that a trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlframe.trajectories.client.groups import IGNORED


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Any],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """A chat as `tokens` and `masks`, which are -100 but for the last turn, or for all turns of the assistant.

    It encodes again what the model wrote, and that may give other tokens than were sampled: new environments take
    tokens and log-probabilities from `self.server.managed_server()`.

    Args:
        include_messages: give the chat back as `messages`.
        finish_reason: "length" where the last turn was cut off: the end of turn that the template adds is no token of
            the model's.
    """
    chat = list(chat)
    tokens = list(tokenizer.apply_chat_template(chat))
    masks = [IGNORED] * len(tokens)
    if train_on_all_assistant_turns:
        turns = [index for index, message in enumerate(chat) if message["role"] in ("assistant", "agent")]
    else:
        turns = [len(chat) - 1]
    for turn in turns:
        start = len(tokenizer.apply_chat_template(chat[:turn], add_generation_prompt=True))
        end = len(tokenizer.apply_chat_template(chat[: turn + 1])) if turn + 1 < len(chat) else len(tokens)
        masks[start:end] = tokens[start:end]
    if finish_reason == "length" and tokens[-1] == tokenizer.eos_token_id:
        del tokens[-1], masks[-1]
    return {"tokens": tokens, "masks": masks, **({"messages": chat} if include_messages else {})}
