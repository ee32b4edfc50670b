"""Tokenizers convert text to token ids: `ByteTokenizer`, or a `tokenizer.json` in the format of Hugging Face."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlframe.errors import UsageError
from rlframe.language.model.published_tokenizer import join_text_parts, plain_messages

Message = Any  # a dict with "role" and "content", or a message of the `openai` package


class Tokenizer(Protocol):
    """A tokenizer for the policy server and environments. Names and defaults are the same as in transformers."""

    @property
    def vocab_size(self) -> int:
        """Highest token id plus 1. The model's vocab_size may be larger."""

    @property
    def bos_token_id(self) -> int | None:
        """Token at the beginning of a text."""

    @property
    def eos_token_id(self) -> int | None:
        """Token at the end of a text or of a turn."""

    @property
    def pad_token_id(self) -> int | None:
        """Token for padding."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text. If `add_special_tokens` is True, add special tokens around the text, for example bos.

        If the text contains the name of a special token, it becomes this token. Half a surrogate pair (invalid Unicode)
        becomes a question mark.
        """

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode tokens. Unknown ids are dropped. Malformed bytes become U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text. They can be an incomplete character."""

    def apply_chat_template(
        self, messages: Sequence[Message], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """Convert a conversation to tokens, or to text if `tokenize` is False.

        Args:
            messages: Dicts, or objects of the `openai` package.
            add_generation_prompt: True appends the beginning of the assistant's next turn.

        Raises:
            UsageError: The template cannot render the messages, or there is no template.
        """


ROLES = ("system", "user", "assistant", "tool")
_MARKS = ("<|pad|>", "<|bos|>", "<|eos|>", *(f"<|{role}|>" for role in ROLES))
_BYTES = [*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in _MARKS)]  # the bytes of each token
_MARK = re.compile("(" + "|".join(map(re.escape, _MARKS)) + ")")
_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in " + str(ROLES) + " %}"
    "{{ raise_exception('The role must be one of " + ", ".join(ROLES) + ", got ' + message.role) }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class ByteTokenizer:
    """A tokenizer whose tokens are the 256 bytes of UTF-8 text, and special tokens.

    A message is encoded as the role's token, the text and `<|eos|>`. `encode` adds no special tokens. `<|bos|>` exists
    for callers that need a first token.
    """

    vocab_size = 256 + len(_MARKS)
    pad_token_id, bos_token_id, eos_token_id = range(256, 259)
    stop_token_ids = (eos_token_id,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`."""
        tokens: list[int] = []
        for part in _MARK.split(text):
            tokens += [256 + _MARKS.index(part)] if part in _MARKS else part.encode(errors="replace")
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """See `Tokenizer`. Invalid UTF-8 bytes become U+FFFD."""
        end = 256 if skip_special_tokens else self.vocab_size
        return b"".join(_BYTES[token] for token in tokens if 0 <= token < end).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer`."""
        return _BYTES[token] if 0 <= token < self.vocab_size else b""

    def apply_chat_template(
        self, messages: Sequence[Message], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """See `Tokenizer`."""
        text = ""
        for i, message in enumerate(plain_messages(messages)):
            role, content = message["role"], join_text_parts(message.get("content"))
            if role not in ROLES:
                raise UsageError(f"The role must be one of {', '.join(ROLES)}, got {role!r}.")
            if message.get("tool_calls"):
                raise UsageError(
                    f"messages[{i}].tool_calls is not supported by the byte tokenizer. Write the calls as text."
                )
            if not isinstance(content, str):
                raise UsageError(
                    f"messages[{i}].content must be text or a list of text parts, got {content!r}. Write it as text."
                )
            text += f"<|{role}|>{content}<|eos|>"
        text += "<|assistant|>" * add_generation_prompt
        return self.encode(text) if tokenize else text

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this tokenizer in the format of Hugging Face, for example next to a model's weights."""
        from rlframe.language.model.published_tokenizer import save_bytes

        special = dict(pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|eos|>")
        save_bytes(Path(folder), _MARKS, special, _TEMPLATE)


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """Return a `ByteTokenizer` for the name `byte`; otherwise read the tokenizer from a path.

    The path is that of a `tokenizer.json`, or of its folder.

    Raises:
        UsageError: The tokenizer does not exist or cannot be read, or the packages tokenizers or jinja2 are missing.
    """
    if name == "byte":
        return ByteTokenizer()
    folder = Path(name)
    if folder.name == "tokenizer.json":
        folder = folder.parent
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(
            f"There is no tokenizer {str(name)!r}. Give 'byte' or a folder with a tokenizer.json. "
            "Nothing is downloaded."
        )
    from rlframe.language.model.published_tokenizer import PublishedTokenizer

    return PublishedTokenizer(folder)
