"""Decode the answers to a request to text. The engine's thread delivers the tokens, and asyncio code reads the text."""

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

_UNKNOWN = "\ufffd"  # an incomplete character is decoded to this text
_WINDOW = 16  # tokens that are decoded again with each new token; more if a character is incomplete
# Minimum number of final characters in a shortened window. They prove that it does not begin within a character.
_DISTINCT = 3


class TextDecoder:
    """Decodes one answer, piece by piece. The joined pieces equal the complete text, however the tokens are split.

    Args:
        tokenizer: Tokenizer of the model.
        stops: Strings that end the answer. They are not part of its text.
        skip_special_tokens: True omits special tokens from the text.
        with_offsets: True fills `offsets`.

    Attributes:
        stopped_by: Stop string that ended the answer, or None.
        offsets: For each token, the position in the text at which it starts, in characters. The text here includes the
            stop string. All tokens of one character have the same position.
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
        # The latest tokens. Decode a new token together with them, because a tokenizer can decode the first token of a
        # text differently (strip its space), and a character can consist of several tokens.
        self._window: list[int] = []
        self._text = ""  # text of the window
        self._certain = 0  # number of characters of `_text` that are final: later tokens cannot change them
        self._before = 0  # number of characters before the window
        self._held = ""  # text that is not returned yet, because it can be the beginning of a stop string

    @property
    def length(self) -> int:
        """Number of characters of the text so far. An incomplete character at the end counts."""
        return self._before + len(self._text)

    def add(self, tokens: Sequence[int], last: bool) -> tuple[str, int]:
        """Decode the next tokens of the answer. Return the new text.

        Args:
            tokens: The next tokens of the answer.
            last: True if these are the last tokens.

        Returns:
            (new text that later tokens cannot change, number of tokens of `tokens` that belong to the answer). Tokens
            after a stop string do not belong to the answer.
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
        free = len(self._held) - (0 if last else self._stop_prefix_length())
        text, self._held = self._held[:free], self._held[free:]
        return text, len(tokens)

    def _take_all(self, tokens: Sequence[int]) -> bool:
        """Decode the rest of an answer at once. Return False if the offsets cannot be computed this way."""
        text = self._decode([*self._window, *tokens])
        if self._with_offsets:
            parts = [self._decode([token]) for token in tokens]
            if "".join(parts) != text[len(self._text) :] or not text.startswith(self._text):
                return False  # a character consists of several tokens, or a space was stripped
            starts = itertools.accumulate(map(len, parts), initial=self.length)
            self.offsets += itertools.islice(starts, len(tokens))
        self._window += tokens
        self._text = text
        return True

    def _take(self, token: int) -> str:
        """Decode one more token. Return the new text that later tokens cannot change."""
        before, text = self._text, self._decode([*self._window, token])
        if self._with_offsets:
            self.offsets.append(self.length - self._continues(token, text))
        if text == before and not self._decode([token, token]):
            return ""  # a token without text, such as a special token, does not affect later tokens
        self._window.append(token)
        certain, self._text = self._certain, text
        # U+FFFD at the end can be an incomplete character, which the next token completes.
        self._certain = max(certain, len(text) - text.endswith(_UNKNOWN))
        new = text[certain : self._certain]
        if len(self._window) % _WINDOW == 0:
            self._shorten()
        return new

    def _continues(self, token: int, text: str) -> bool:
        """Return True if a token continues an incomplete character. `text` is the window's text with this token."""
        if self._certain == len(self._text):
            return False
        # Separate parts of a character are decoded as one U+FFFD each. So the joined text is shorter.
        return len(text) < len(self._text) + max(1, len(self._decode([token])))

    def _shorten(self) -> None:
        """Delete about the first half of the window, but do not split a character."""
        for start in range(len(self._window) // 2, 0, -1):
            text = self._decode(self._window[start:])
            dropped = len(self._text) - len(text)
            if self._certain - dropped >= _DISTINCT and self._text.endswith(text):
                self._window = self._window[start:]
                self._text, self._certain, self._before = text, self._certain - dropped, self._before + dropped
                return

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)

    def _find(self) -> str | None:
        """Return the text before the first stop string in `_held`; None if there is no stop string."""
        matches = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if not matches:
            return None
        position, self.stopped_by = min(matches)
        return self._held[:position]

    def _stop_prefix_length(self) -> int:
        """Return the number of characters at the end of `_held` that can be the beginning of a stop string."""
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
    """A piece of an answer, or a complete answer."""

    index: int  # index of the answer
    text: str
    tokens: list[int]  # includes the stop token, which has no text
    offsets: list[int]  # start of each token in the answer's text; empty if not requested
    log_probs: list[float]
    versions: list[int]
    finish_reason: str | None  # None if more pieces follow
    stop_reason: str | int | None  # stop string or stop token that ended the answer
    top_tokens: list[dict[int, float]]  # see `Answer`
    prompt_scores: PromptScores | None

    @property
    def version(self) -> int | None:
        """Version of the parameters that sampled the last token; without tokens, the version of the prompt's scores."""
        if self.versions:
            return self.versions[-1]
        return None if self.prompt_scores is None else self.prompt_scores.version


class Generation:
    """Delivers the answers to one request as text. The constructor submits the request to the engine.

    Args:
        engine: The decode engine.
        parsed: The request.
        tokenizer: Tokenizer of the model.
        streams: True if the caller reads the answers with `pieces`, False if it calls `whole`.
        timeout: Seconds for all answers together.

    Raises:
        UsageError: The engine cannot process the request.
        RefusedError: Too many requests wait (429), or this request has too many answers.
        UnavailableError: The engine is closed.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        parsed: ParsedRequest,
        tokenizer: Tokenizer,
        *,
        streams: bool,
        timeout: float,
    ) -> None:
        wanted, most = len(parsed.prompts) * parsed.fields.n, engine.config.max_waiting
        if wanted > most:
            raise RefusedError(f"The request has {wanted} answers, but at most {most} are allowed.", 400)
        self._stop_tokens = parsed.sampling.stop_tokens
        self._timeout = timeout
        prompts = [prompt for prompt in parsed.prompts for _ in range(parsed.fields.n)]
        self._texts = [
            TextDecoder(tokenizer, parsed.fields.stops, parsed.fields.skip_special_tokens, parsed.offsets)
            for _ in prompts
        ]
        # Create a queue only if pieces are needed, because each piece wakes the event loop.
        self._queue: asyncio.Queue[tuple[int, Any]] | None = asyncio.Queue() if streams or parsed.fields.stops else None
        self._loop = asyncio.get_running_loop()
        on_tokens = None
        if self._queue is not None:
            on_tokens = [functools.partial(self._put, index) for index in range(len(prompts))]
        try:
            self._handles = engine.submit_many(prompts, parsed.sampling, on_tokens)
        except UnavailableError as error:
            if engine.closed:
                raise
            raise RefusedError(str(error), 429, code="queue_full", headers=RETRY) from error

    async def whole(self) -> list[AnswerPiece]:
        """Return all complete answers, ordered by their index. See `pieces` for the errors."""
        if self._queue is not None:
            parts: list[list[AnswerPiece]] = [[] for _ in self._handles]
            async for piece in self.pieces():
                parts[piece.index].append(piece)
            return [_joined(answer_parts) for answer_parts in parts]
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
        """Yield pieces of the answers as they are decoded. The last piece of each answer has a `finish_reason`.

        Raises:
            UnavailableError: The engine was closed or failed.
            RefusedError: The timeout was exceeded.
        """
        assert self._queue is not None
        timer = self._loop.call_later(self._timeout, self._queue.put_nowait, (-1, self._timeout_error))
        for index, handle in enumerate(self._handles):
            handle.future.add_done_callback(functools.partial(self._end, index))
        pending = set(range(len(self._handles)))
        try:
            while pending:
                index, answer = await self._queue.get()
                if isinstance(answer, Exception):
                    raise answer
                if index not in pending:  # a late piece of an answer that was cancelled
                    continue
                piece = self._piece(index, answer)
                if piece.finish_reason is not None:
                    pending.remove(index)
                    self._handles[index].cancel()  # free the slot if a stop string ended the answer
                yield piece
        finally:
            timer.cancel()
            self.cancel()

    def cancel(self) -> None:
        """Cancel the answers that are not complete, which frees their slots."""
        for handle in self._handles:
            handle.cancel()

    @property
    def _timeout_error(self) -> RefusedError:
        return RefusedError(
            f"The answer was not complete within {self._timeout:g} s. Request fewer tokens, or retry later.", 504
        )

    def _put(self, index: int, answer: Answer | Exception) -> None:
        # The engine's thread calls this method.
        assert self._queue is not None
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, answer))

    def _end(self, index: int, future: Any) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._put(index, error)

    def _piece(self, index: int, answer: Answer) -> AnswerPiece:
        text, tokens = self._texts[index], answer.tokens
        ended_by = tokens[-1] if answer.finish_reason == "stop" and tokens[-1] in self._stop_tokens else None
        offsets_before = len(text.offsets)
        piece_text, count = text.add(tokens if ended_by is None else tokens[:-1], answer.finish_reason is not None)
        offsets = text.offsets[offsets_before:] + [text.length] * (ended_by is not None)
        stopped = text.stopped_by is not None
        count = count if stopped else len(tokens)
        return AnswerPiece(
            index=index,
            text=piece_text,
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
