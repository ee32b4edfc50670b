"""Text as token ids: bytes, or a published `tokenizer.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlframe.errors import UsageError

Message = Mapping[str, Any]  # "role" and "content"


class Tokenizer(Protocol):
    """What the policy server and environments ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Tokens that there are; a model may have room for more."""

    @property
    def bos_id(self) -> int | None:
        """The token that texts begin with."""

    @property
    def eos_id(self) -> int | None:
        """The token that texts end with."""

    @property
    def pad_id(self) -> int | None:
        """The token that fills rows."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; with what a prompt begins with (and ends with, in some), if so asked."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Ids that the tokenizer does not have are none."""

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The tokens of a conversation and, if so asked, of what an answer of the assistant begins with.

        Raises `UsageError` where the template refuses the messages, or there is none.
        """


ROLES = ("system", "user", "assistant", "tool")
_MARKS = ("<|pad|>", "<|bos|>", "<|eos|>", *(f"<|{role}|>" for role in ROLES), "<|end|>")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in " + str(ROLES) + " %}"
    "{{ raise_exception('The role must be one of " + ", ".join(ROLES) + ", got ' + message.role) }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class ByteTokenizer:
    """UTF-8 bytes, and the marks of a conversation: each message is its role's mark, its text, and `<|end|>`.

    Marks are no text: nothing that a user writes becomes one.
    """

    vocab_size = 256 + len(_MARKS)
    pad_id, bos_id, eos_id, *_role_ids, end_id = range(256, vocab_size)
    stop_ids = (eos_id, end_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`."""
        return [self.bos_id] * add_special_tokens + list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer`. Bytes that are no UTF-8 become U+FFFD."""
        parts = []
        for token in tokens:
            if 0 <= token < 256:
                parts.append(bytes([token]))
            elif token < self.vocab_size and not skip_special_tokens:
                parts.append(_MARKS[token - 256].encode())
        return b"".join(parts).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """See `Tokenizer`."""
        marks = dict(zip(ROLES, self._role_ids))
        tokens = [self.bos_id]
        for message in messages:
            if message["role"] not in marks:
                raise UsageError(f"The role must be one of {', '.join(ROLES)}, got {message['role']!r}.")
            tokens += [marks[message["role"]], *message["content"].encode(), self.end_id]
        return tokens + [marks["assistant"]] * add_generation_prompt

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` with the same tokens, beside a model's weights.

        There, as in every published tokenizer, a mark within a text is that mark.
        """
        from rlframe.lm.published_tokenizer import save_bytes

        special = dict(pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|eos|>")
        save_bytes(Path(folder), _MARKS, special, _TEMPLATE, self.stop_ids)


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer called `byte`, or that of a folder with a published `tokenizer.json`.

    Raises:
        UsageError: there is none, it cannot be read, or the packages tokenizers or jinja2 are missing.
    """
    if name == "byte":
        return ByteTokenizer()
    folder = Path(name)
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(
            f"There is no tokenizer {str(name)!r}: it is 'byte', or a folder with a tokenizer.json. "
            "Nothing is downloaded."
        )
    from rlframe.lm.published_tokenizer import PublishedTokenizer

    return PublishedTokenizer(folder)
