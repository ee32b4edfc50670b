"""Decode a request's answers as text: asyncio on one side, the engine's thread on the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlframe.errors import UnavailableError
from rlframe.language.decoding import Answer, DecodeEngine
from rlframe.language.decoding.sampling import PromptScores
from rlframe.language.model.tokenizers import Tokenizer
from rlframe.language.server.errors import RETRY, RefusedError
from rlframe.language.server.requests import ParsedRequest

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


@dataclasses.dataclass(frozen=True)
class AnswerPiece:
    """The next piece of one of the answers, or all of it."""

    index: int  # of the answer
    text: str
    tokens: list[int]  # with the one that ended it, which is no text
    offsets: list[int]  # of each token the place in the answer's text; empty: not asked for
    log_probs: list[float]
    versions: list[int]
    finish_reason: str | None  # None: more follows
    stop_reason: str | int | None  # the string or the token that ended it
    top_tokens: list[dict[int, float]]  # as `Answer`'s
    prompt_scores: PromptScores | None

    @property
    def version(self) -> int | None:
        """Version of the parameters of the last token, or of the prompt's scores if none was sampled."""
        if self.versions:
            return self.versions[-1]
        return None if self.prompt_scores is None else self.prompt_scores.version


class Generation:
    """The answers to one request, which is sent to the engine at once.

    Args:
        streams: whether they are wanted piece by piece.
        timeout: seconds for all of it.

    Raises:
        UsageError: the engine cannot do that.
        RefusedError: too much waits (429), or is asked for at once.
        UnavailableError: the engine is closed.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        asked: ParsedRequest,
        tokenizer: Tokenizer,
        *,
        streams: bool,
        timeout: float,
    ) -> None:
        wanted, most = len(asked.prompts) * asked.fields.n, engine.config.max_waiting
        if wanted > most:
            raise RefusedError(f"{wanted} answers are asked for at once, of which there may be {most}.", 400)
        self._stop_tokens = asked.sampling.stop_tokens
        self._timeout = timeout
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.fields.n)]
        self._texts = [
            TextDecoder(tokenizer, asked.fields.stops, asked.fields.skip_special_tokens, asked.offsets) for _ in prompts
        ]
        # Without this each answer costs the event loop once, with it each piece does.
        self._arrived: asyncio.Queue[tuple[int, Any]] | None = (
            asyncio.Queue() if streams or asked.fields.stops else None
        )
        self._loop = asyncio.get_running_loop()
        on_tokens = None
        if self._arrived is not None:
            on_tokens = [functools.partial(self._arrive, index) for index in range(len(prompts))]
        try:
            self._handles = engine.submit_many(prompts, asked.sampling, on_tokens)
        except UnavailableError as error:
            if engine.closed:
                raise
            raise RefusedError(str(error), 429, code="queue_full", headers=RETRY) from error

    async def whole(self) -> list[AnswerPiece]:
        """All answers, in their order. Raises as `pieces`."""
        if self._arrived is not None:
            parts: list[list[AnswerPiece]] = [[] for _ in self._handles]
            async for piece in self.pieces():
                parts[piece.index].append(piece)
            return [_joined(of_one) for of_one in parts]
        futures = [asyncio.wrap_future(handle.future) for handle in self._handles]
        try:
            await asyncio.wait(futures, timeout=self._timeout, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.cancel()
        failures = [future.exception() for future in futures if future.done() and not future.cancelled()]
        if any(failures):
            raise next(filter(None, failures))
        if not all(map(asyncio.Future.done, futures)):
            raise self._timeout_error
        return [self._piece(index, future.result()) for index, future in enumerate(futures)]

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        """The answers as they grow; each has a last piece with a `finish_reason`.

        Raises:
            UnavailableError: the engine was closed, or failed.
            RefusedError: it took longer than it may.
        """
        assert self._arrived is not None
        timer = self._loop.call_later(self._timeout, self._arrived.put_nowait, (-1, self._timeout_error))
        for index, handle in enumerate(self._handles):
            handle.future.add_done_callback(functools.partial(self._end, index))
        left = set(range(len(self._handles)))
        try:
            while left:
                index, answer = await self._arrived.get()
                if isinstance(answer, Exception):
                    raise answer
                if index not in left:  # decoded before the engine knew that it has ended
                    continue
                piece = self._piece(index, answer)
                if piece.finish_reason is not None:
                    left.remove(index)
                    self._handles[index].cancel()  # frees its slot, where a string ended it
                yield piece
        finally:
            timer.cancel()
            self.cancel()

    def cancel(self) -> None:
        """Free the slots of what is not done."""
        for handle in self._handles:
            handle.cancel()

    @property
    def _timeout_error(self) -> RefusedError:
        return RefusedError(f"The answer was not complete within {self._timeout:g} s. Ask for less, or later.", 504)

    def _arrive(self, index: int, answer: Answer | Exception) -> None:
        # In the engine's thread.
        assert self._arrived is not None
        with contextlib.suppress(RuntimeError):  # the event loop has ended: nobody waits
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, answer))

    def _end(self, index: int, future: Any) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._arrive(index, error)

    def _piece(self, index: int, answer: Answer) -> AnswerPiece:
        text, tokens = self._texts[index], answer.tokens
        ended_by = tokens[-1] if answer.finish_reason == "stop" and tokens[-1] in self._stop_tokens else None
        begun = len(text.offsets)
        said, count = text.add(tokens if ended_by is None else tokens[:-1], answer.finish_reason is not None)
        offsets = text.offsets[begun:] + [text.length] * (ended_by is not None)
        stopped = text.stopped_by is not None
        count = count if stopped else len(tokens)
        return AnswerPiece(
            index=index,
            text=said,
            tokens=tokens[:count],
            offsets=offsets[:count],
            log_probs=answer.log_probs[:count],
            versions=answer.versions[:count],
            finish_reason="stop" if stopped else answer.finish_reason,
            stop_reason=text.stopped_by if stopped else ended_by,
            top_tokens=answer.top_tokens[:count],
            prompt_scores=answer.prompt_scores,
        )


def _joined(pieces: list[AnswerPiece]) -> AnswerPiece:
    return dataclasses.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        offsets=[offset for piece in pieces for offset in piece.offsets],
        log_probs=[log_prob for piece in pieces for log_prob in piece.log_probs],
        versions=[version for piece in pieces for version in piece.versions],
        top_tokens=[one for piece in pieces for one in piece.top_tokens],
        prompt_scores=pieces[0].prompt_scores,
    )
