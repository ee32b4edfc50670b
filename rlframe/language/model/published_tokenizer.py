"""Tokenizers in the format of Hugging Face: `tokenizer.json`, and files with special tokens and a chat template.

The messages of a chat can be dicts, or objects of the `openai` package.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlframe import extras
from rlframe.errors import UsageError


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert messages to dicts. Drop fields of objects that are None, except `content`.

    If a message with tool calls has no `content`, its `content` becomes None.

    Raises:
        UsageError: A message has another type, or no role.
    """
    return [_plain(i, message) for i, message in enumerate(messages)]


def _plain(index: int, message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping):
        fields = {name: _parts(value) for name, value in message.items()}
        if fields.get("tool_calls"):
            fields = {**fields, "content": fields.get("content")}
    elif hasattr(message, "model_dump"):
        fields = {"content": None, **message.model_dump(exclude_none=True)}
    else:
        raise UsageError(
            f"messages[{index}] must be a dict with role and content, or a message of the openai package, such as "
            f"answer.choices[0].message; got {type(message).__name__}."
        )
    if "role" not in fields:
        raise UsageError(f"messages[{index}] has no role. Its fields: {', '.join(fields) or 'none'}.")
    return fields


def _parts(value: Any) -> Any:
    """Convert the objects in a list, such as tool_calls, to dicts. Return other values unchanged."""
    if not isinstance(value, list):
        return value
    return [one.model_dump(exclude_none=True) if hasattr(one, "model_dump") else one for one in value]


def join_text_parts(content: Any) -> Any:
    """Join a list of text parts to one text. Return other values unchanged."""
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return content
    return "".join(part["text"] for part in content)


_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]

# GPT-2's alphabet: a visible byte is written as its own character. Other bytes are written as characters from 256 on.
BYTE_LEVEL = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}


class TokenBytes:
    """Computes the bytes of each token of a published tokenizer.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()  # as JSON
        self._byte_level = b'"ByteLevel"' in decoder
        ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        falls_back = b'"ByteFallback"' in decoder and None not in ids
        self._ids = ids if falls_back else []  # byte -> id of its token
        self._single = {token: byte for byte, token in enumerate(self._ids)}
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, content in added.items() if content.special}
        self.of = functools.lru_cache(maxsize=1 << 16)(self._bytes_of)

    def repair_bytes(self, tokens: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Replace invalid UTF-8 in consecutive single-byte tokens by U+FFFD.

        The decoder of the `tokenizers` package would replace all bytes of such a run of tokens, even those of valid
        characters. So text that was already streamed would change later.
        """
        if self._single.keys().isdisjoint(tokens):
            return list(tokens)
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._special]
        repaired: list[int] = []
        for is_single, run in itertools.groupby(tokens, key=self._single.__contains__):
            if is_single:
                text = bytes(self._single[token] for token in run).decode(errors="replace")
                repaired += [self._ids[byte] for byte in text.encode()]
            else:
                repaired += run
        return repaired

    def _bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._single:
            return bytes([self._single[token]])
        if self._byte_level and all(character in BYTE_LEVEL for character in name):
            return bytes(BYTE_LEVEL[character] for character in name)
        # A tokenizer can strip the space in front of a text. So decode two copies of the token, and use the second.
        once, twice = (self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :].encode()


with extras.explain_import_error("A published tokenizer", "lm"):
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    import tokenizers

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PublishedTokenizer:
    """A tokenizer that is read from a folder. See `rlframe.language.model.tokenizers.Tokenizer`.

    The folder must contain `tokenizer.json`. Other files are optional: `tokenizer_config.json` (special tokens and a
    chat template), `chat_template.jinja` (replaces this template) and `generation_config.json` (more stop tokens).
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the `tokenizers` package raises plain `Exception`
            raise UsageError(f"The file {folder / 'tokenizer.json'} cannot be read: {error}.") from error
        self._tokenizer.no_truncation()  # ignore truncation and padding in the file, as transformers does
        self._tokenizer.no_padding()
        self._bytes = TokenBytes(self._tokenizer)
        config = _read(folder / "tokenizer_config.json")
        self._folder = folder
        named = {name: config[name] for name in SPECIAL if config.get(name)}
        self._special = {name: one["content"] if isinstance(one, dict) else one for name, one in named.items()}
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max(ids, default=-1)  # some ids may be unused
        self.bos_token_id, self.eos_token_id, self.pad_token_id = map(self._id, ("bos_token", "eos_token", "pad_token"))
        more = _read(folder / "generation_config.json").get("eos_token_id")
        ends = (self.eos_token_id, *(more if isinstance(more, list) else [more]))
        self.stop_token_ids = tuple(dict.fromkeys(token for token in ends if token is not None))
        self._template = _compile(_template(folder, config), folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`."""
        text = text.encode(errors="replace").decode()
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """See `Tokenizer`. Malformed bytes become U+FFFD and do not affect adjacent characters."""
        known = [token for token in tokens if 0 <= token < self.vocab_size]
        repaired = self._bytes.repair_bytes(known, skip_special_tokens)
        return self._tokenizer.decode(repaired, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer`."""
        return self._bytes.of(token) if 0 <= token < self.vocab_size else b""

    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        """See `Tokenizer`. The text is the same as in transformers."""
        if self._template is None:
            raise UsageError(f"The tokenizer in {self._folder} has no chat template, so it accepts only plain text.")
        plain = plain_messages(messages)
        render = functools.partial(self._render, add_generation_prompt=add_generation_prompt)
        text = render(plain)
        if omitted := _omitted_fields(plain, text, render):
            raise UsageError(
                f"The chat template in {self._folder} does not write all of the messages as text{_hint(omitted)}"
            )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        assert self._template is not None
        try:
            return self._template.render(
                messages=messages,
                tools=None,  # templates test whether `tools` and `documents` are None
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, AttributeError) as error:
            plain_text = isinstance(error, (jinja2.UndefinedError, TypeError, AttributeError))
            hint = _hint(_not_text(messages)) if plain_text else ""
            raise UsageError(
                f"The chat template in {self._folder} cannot render the messages: {error}{hint}"
            ) from error

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(self._special[name]) if name in self._special else None


class _Generation(jinja2.ext.Extension):
    """Accepts the tag `{% generation %}`, which marks the assistant's text in templates. The text does not change."""

    tags = {"generation"}  # noqa: RUF012  as in jinja2

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _hint(fields: Collection[str]) -> str:
    if not fields:
        return ""
    return f". The template is for plain text, so write {', '.join(fields)} as text in the content."


def _not_text(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of the messages that are not plain text, as a dict: name -> value."""
    fields = {}
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            fields[f"messages[{i}].tool_calls"] = message["tool_calls"]
        if not isinstance(message.get("content"), str):
            fields[f"messages[{i}].content"] = message.get("content")
    return fields


def _omitted_fields(messages: Sequence[dict[str, Any]], text: str, render: Callable[[Any], str]) -> list[str]:
    """Return the names of non-text fields that `text` omits, or shows as Python objects (for example `None`)."""
    fields = _not_text(messages)
    if not fields:
        return []
    no_content = [one if isinstance(one.get("content"), str) else {**one, "content": ""} for one in messages]
    no_calls = [{**one, "tool_calls": []} if one.get("tool_calls") else one for one in no_content]
    try:
        without_content, without_calls = render(no_content), render(no_calls)
    except UsageError:  # the template itself refuses some messages, so it handles them on purpose
        return []
    omitted = []
    for name, value in fields.items():
        pair = (without_content, without_calls) if name.endswith("tool_calls") else (text, without_content)
        written = [str(one) for one in (value, *(value if isinstance(value, list) else ())) if not isinstance(one, str)]
        missing = join_text_parts(value) and pair[0] == pair[1]
        if missing or any(pair[0].count(words) > pair[1].count(words) for words in written):
            omitted.append(name)
    return omitted


def _compile(text: str | None, folder: Path) -> jinja2.Template | None:
    """Compile the template in a sandbox, because it is untrusted code. Add the same functions as transformers."""
    if text is None:
        return None

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:  # replaces jinja2's `tojson`, which escapes characters for HTML
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise UsageError(f"The chat template in {folder} cannot be read: {error}") from error


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # a list of templates with names
        return {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError(f"The file {file} cannot be read: {error}") from error


def save_bytes(folder: Path, marks: Sequence[str], special: dict[str, str], chat_template: str) -> None:
    """Write a tokenizer whose tokens are the 256 bytes and then `marks`. `special` maps names to special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=BYTE_LEVEL, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(marks))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
