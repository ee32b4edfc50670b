"""Tokenizers, and chats as the tokens that a trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlframe.lm import tokenizers
from rlframe.lm.tokenizers import Tokenizer
from rlframe.trajectories.groups import IGNORED


class EnvTokenizer:
    """A tokenizer under the names, and with the defaults, that environments know from transformers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.bos_token_id, self.eos_token_id, self.pad_token_id = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
        self.bos_token, self.eos_token, self.pad_token = (
            None if token is None else self.decode([token])
            for token in (self.bos_token_id, self.eos_token_id, self.pad_token_id)
        )
        self.stop_ids = tokenizer.stop_ids  # the tokens that end an answer

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; with what a prompt begins with, if so asked."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens, with that of special ones unless told otherwise."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Any], tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """A conversation as tokens, or as text; with what an answer of the assistant begins with, if so asked."""
        tokens = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt)
        return tokens if tokenize else self.decode(tokens)


def load_tokenizer(name: str) -> EnvTokenizer:
    """The tokenizer that a config names: see `rlframe.lm.tokenizers.load_tokenizer`."""
    return EnvTokenizer(tokenizers.load_tokenizer(name))


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
