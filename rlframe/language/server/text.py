"""Text of tokens that come piece by piece, up to a string that ends it."""

from __future__ import annotations

from collections.abc import Sequence

from rlframe.language.model.tokenizers import Tokenizer

_UNKNOWN = "\ufffd"  # what an unfinished character is decoded as
_LONGEST = 16  # tokens that may be one unfinished character; more are none


class Text:
    """Decodes one answer.

    Args:
        tokenizer: of the tokens.
        stops: strings that end the answer, which are no part of its text.
        skip_special_tokens: leave them out of the text.

    Attributes:
        stopped_by: the string that ended it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._stops, self._skip = tokenizer, stops, skip_special_tokens
        self.stopped_by: str | None = None
        self._tokens: list[int] = []
        # Tokenizers treat the first token of a text in their own way (they strip its space): so what is new is decoded
        # behind what came last, `_tokens[_context:_read]`.
        self._context = self._read = 0
        self._held = ""  # may be the beginning of a stop string

    def add(self, tokens: Sequence[int], last: bool) -> tuple[str, int]:
        """Takes tokens that follow.

        Args:
            last: there are no more.

        Returns:
            (text that is certain now, tokens that are of the answer: all, or those up to the end of a stop string).
        """
        step = 1 if self._stops else max(1, len(tokens))
        for start in range(0, len(tokens), step):
            self._tokens += tokens[start : start + step]
            self._held += self._decode(whole=False)
            if (found := self._find()) is not None:
                return found, start + step
        if last:
            self._held += self._decode(whole=True)
        if (found := self._find()) is not None:
            return found, len(tokens)
        certain = len(self._held) - (0 if last else self._begun())
        text, self._held = self._held[:certain], self._held[certain:]
        return text, len(tokens)

    def _decode(self, whole: bool) -> str:
        """The text of what was not read; nothing while that ends within a character, unless `whole`."""
        if self._read == len(self._tokens):
            return ""
        before = self._tokenizer.decode(self._tokens[self._context : self._read], skip_special_tokens=self._skip)
        text = self._tokenizer.decode(self._tokens[self._context :], skip_special_tokens=self._skip)
        if text.endswith(_UNKNOWN) and not whole and len(self._tokens) - self._read < _LONGEST:
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _find(self) -> str | None:
        """The text before the first stop string, where there is one."""
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if not places:
            return None
        place, self.stopped_by = min(places)
        return self._held[:place]

    def _begun(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        held = self._held
        sizes = [
            size
            for stop in self._stops
            for size in range(1, min(len(stop), len(held) + 1))
            if held.endswith(stop[:size])
        ]
        return max(sizes, default=0)
