"""Text as token ids: bytes, or a published `tokenizer.json`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlframe.errors import UsageError
from rlframe.language.model.chat_messages import join_text_parts, plain_messages

Message = Any  # a dict with "role" and "content", or a message of the `openai` package


class Tokenizer(Protocol):
    """Tokenizer as the policy server and environments use it. Names and defaults are those of transformers."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token; a model may have room for more."""

    @property
    def bos_token_id(self) -> int | None:
        """The token that texts begin with."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that texts, or turns of a conversation, end with."""

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills rows."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; if so asked with those that this tokenizer puts around a text, bos say.

        A special token within the text is that token; what is no Unicode (half a surrogate pair) is a question mark.
        """

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens. Ids that the tokenizer does not have are none, malformed bytes are U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """Return what a token adds to a text, as UTF-8; it may be a part of a character. Marks are their text."""

    def apply_chat_template(
        self, messages: Sequence[Message], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """A conversation as tokens (else as text), if so asked with what an answer of the assistant begins with.

        Messages are dicts, or objects of the `openai` package.

        Raises `UsageError` where the template refuses the messages, or there is none.
        """


ROLES = ("system", "user", "assistant", "tool")
_MARKS = ("<|pad|>", "<|bos|>", "<|eos|>", *(f"<|{role}|>" for role in ROLES))
_BYTES = [*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in _MARKS)]  # of each token
_MARK = re.compile("(" + "|".join(map(re.escape, _MARKS)) + ")")
_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in " + str(ROLES) + " %}"
    "{{ raise_exception('The role must be one of " + ", ".join(ROLES) + ", got ' + message.role) }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class ByteTokenizer:
    """UTF-8 bytes, and marks: each message of a conversation is its role's mark, its text, and `<|eos|>`.

    A text begins with no mark of its own accord; `<|bos|>` is there for whoever has nothing else to begin with.
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
        """See `Tokenizer`. Bytes that are no UTF-8 become U+FFFD."""
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
                raise UsageError(f"messages[{i}].tool_calls has no form in bytes: write the calls into its content.")
            if not isinstance(content, str):
                raise UsageError(
                    f"messages[{i}].content must be text, or a list of text parts, got {content!r}: write it as text."
                )
            text += f"<|{role}|>{content}<|eos|>"
        text += "<|assistant|>" * add_generation_prompt
        return self.encode(text) if tokenize else text

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the same tokenizer in the published format, beside a model's weights, say."""
        from rlframe.language.model.published_tokenizer import save_bytes

        special = dict(pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|eos|>")
        save_bytes(Path(folder), _MARKS, special, _TEMPLATE)


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer called `byte`, or that of a folder with a published `tokenizer.json` (or the file itself).

    Raises:
        UsageError: there is none, it cannot be read, or the packages tokenizers or jinja2 are missing.
    """
    if name == "byte":
        return ByteTokenizer()
    folder = Path(name)
    if folder.name == "tokenizer.json":
        folder = folder.parent
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(
            f"There is no tokenizer {str(name)!r}: it is 'byte', or a folder with a tokenizer.json. "
            "Nothing is downloaded."
        )
    from rlframe.language.model.published_tokenizer import PublishedTokenizer

    return PublishedTokenizer(folder)
