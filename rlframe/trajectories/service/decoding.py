"""Token ids as text, where the service was told a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlframe import extras
from rlframe.errors import UsageError

Decode = Callable[[Sequence[int]], str]


def load_decode(path: str | None) -> Decode | None:
    """The decoder of a `tokenizer.json` (the format of the `tokenizers` package), None for None.

    Special tokens are part of the text, and so are, as numbers, ids that the tokenizer does not have.
    Raises `UsageError` where the package is missing or the file cannot be read.
    """
    if path is None:
        return None
    with extras.needed("--tokenizer", "tokenizers"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises bare Exceptions
        raise UsageError(f"The tokenizer file {path} cannot be read: {error}.") from error
    size = tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(ids: Sequence[int]) -> str:
        if all(0 <= token < size for token in ids):
            return tokenizer.decode(list(ids), skip_special_tokens=False)
        return ids_as_text(ids)

    return decode


def ids_as_text(ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in ids)
