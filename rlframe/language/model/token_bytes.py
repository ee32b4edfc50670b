"""Bytes of tokens: a token may be a part of a character, which no text can show."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]

# GPT-2's alphabet: a visible byte stands for itself, the others for characters from 256 on.
BYTE_LEVEL = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}


class TokenBytes:
    """Bytes of each token of a published tokenizer.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()  # JSON
        self._byte_level = b'"ByteLevel"' in decoder
        ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        falls_back = b'"ByteFallback"' in decoder and None not in ids
        self._ids = ids if falls_back else []  # of single bytes
        self._single = {token: byte for byte, token in enumerate(self._ids)}
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, content in added.items() if content.special}
        self.of = functools.lru_cache(maxsize=1 << 16)(self._bytes_of)

    def repaired(self, tokens: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Replace only the malformed bytes of a run of single bytes by U+FFFD.

        The package's decoder replaces every byte of such a run, valid characters too, so that a text would change long
        after it was streamed.
        """
        if self._single.keys().isdisjoint(tokens):
            return list(tokens)
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._special]
        return [token for run in self._runs(tokens) for token in self._repaired(run)]

    def _runs(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """Parts of `tokens`: runs of single bytes, and other tokens one by one."""
        run: list[int] = []
        for token in tokens:
            if token in self._single:
                run.append(token)
                continue
            yield run
            yield [token]
            run = []
        yield run

    def _repaired(self, run: list[int]) -> list[int]:
        if not run or run[0] not in self._single:
            return run
        text = bytes(self._single[token] for token in run).decode(errors="replace")
        return [self._ids[byte] for byte in text.encode()]

    def _bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._single:
            return bytes([self._single[token]])
        if self._byte_level and all(character in BYTE_LEVEL for character in name):
            return bytes(BYTE_LEVEL[character] for character in name)
        # A tokenizer may strip the space of a text's first token, so look at the second.
        once, twice = (self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :].encode()
