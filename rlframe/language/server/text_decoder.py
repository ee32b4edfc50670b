"""Text of an answer whose tokens come piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlframe.language.model.tokenizers import Tokenizer

_UNKNOWN = "\ufffd"  # an unfinished character is decoded as this
_WINDOW = 16  # tokens that are decoded again with each new token; more while they do not end a character
_DISTINCT = 3  # characters: a character has at most four bytes, so a window with more begins where a character may


class TextDecoder:
    """Decodes one answer. Its pieces together are the text of all its tokens, however they are cut.

    Args:
        tokenizer: of the tokens.
        stops: strings that end the answer, which are no part of its text.
        skip_special_tokens: leave them out of the text.
        with_offsets: fill `offsets`.

    Attributes:
        stopped_by: the string that ended it.
        offsets: of each token the place in the text (before any stop string is cut off) where it begins. The tokens of
            one character have the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
        with_offsets: bool = False,
    ) -> None:
        self._tokenizer, self._stops, self._skip = tokenizer, stops, skip_special_tokens
        self._with_offsets = with_offsets
        self.stopped_by: str | None = None
        self.offsets: list[int] = []
        # Tokenizers treat the first token of a text in their own way (they strip its space), and a character may have
        # several tokens: so each token is decoded behind those that came last.
        self._window: list[int] = []
        self._text = ""  # of the window
        self._certain = 0  # characters of `_text` that no later token changes; they were handed on
        self._before = 0  # characters of the text before the window's
        self._held = ""  # may be the beginning of a stop string

    @property
    def length(self) -> int:
        """Characters of the text so far, with an unfinished one."""
        return self._before + len(self._text)

    def add(self, tokens: Sequence[int], last: bool) -> tuple[str, int]:
        """Take tokens that follow.

        Args:
            last: there are no more.

        Returns:
            (text that is certain now, tokens that are of the answer: all, or those up to the end of a stop string).
        """
        if not (last and not self._stops and self._take_all(tokens)):
            for count, token in enumerate(tokens, start=1):
                self._held += self._take(token)
                if (found := self._find()) is not None:
                    return found, count
        if last:
            self._held += self._text[self._certain :]
            self._certain = len(self._text)
        if (found := self._find()) is not None:
            return found, len(tokens)
        free = len(self._held) - (0 if last else self._begun())
        text, self._held = self._held[:free], self._held[free:]
        return text, len(tokens)

    def _take_all(self, tokens: Sequence[int]) -> bool:
        """Take the rest of an answer at once. False if that does not give the offsets."""
        text = self._decode([*self._window, *tokens])
        if self._with_offsets:
            parts = [self._decode([token]) for token in tokens]
            if "".join(parts) != text[len(self._text) :] or not text.startswith(self._text):
                return False  # a character of several tokens, or a space that is stripped
            places = itertools.accumulate(map(len, parts), initial=self.length)
            self.offsets += itertools.islice(places, len(tokens))
        self._window += tokens
        self._text = text
        return True

    def _take(self, token: int) -> str:
        """Return the text that is certain with this token."""
        before, text = self._text, self._decode([*self._window, token])
        if self._with_offsets:
            self.offsets.append(self.length - self._continues(token, text))
        if text == before and not self._decode([token, token]):
            return ""  # a special token, say, which need not be decoded again with those that follow
        self._window.append(token)
        certain, self._text = self._certain, text
        # Bytes that begin a character are decoded as one U+FFFD, as is what can be none.
        self._certain = max(certain, len(text) - text.endswith(_UNKNOWN))
        new = text[certain : self._certain]
        if len(self._window) % _WINDOW == 0:
            self._shorten()
        return new

    def _continues(self, token: int, text: str) -> bool:
        """Return if a token continues the unfinished character at the end. `text` includes the token."""
        if self._certain == len(self._text):
            return False
        # A character in two parts is shorter than its parts, each of which would be a U+FFFD.
        return len(text) < len(self._text) + max(1, len(self._decode([token])))

    def _shorten(self) -> None:
        """Forget about half of the window, up to where a character ends."""
        for start in range(len(self._window) // 2, 0, -1):
            text = self._decode(self._window[start:])
            forgotten = len(self._text) - len(text)
            if self._certain - forgotten >= _DISTINCT and self._text.endswith(text):
                self._window = self._window[start:]
                self._text, self._certain, self._before = text, self._certain - forgotten, self._before + forgotten
                return

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)

    def _find(self) -> str | None:
        """The text before the first stop string, where there is one."""
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if not places:
            return None
        place, self.stopped_by = min(places)
        return self._held[:place]

    def _begun(self) -> int:
        """Count the characters at the end that may be the beginning of a stop string."""
        held = self._held
        sizes = [
            size
            for stop in self._stops
            for size in range(1, min(len(stop), len(held) + 1))
            if held.endswith(stop[:size])
        ]
        return max(sizes, default=0)
