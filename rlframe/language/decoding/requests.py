"""Types of requests to the decode engine and of their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple

import numpy as np

from rlframe.errors import PeerError
from rlframe.language.decoding.sampling import PromptScores, SamplingParams, TopTokens

RESULT_TIMEOUT = 600.0  # seconds


class Answer(NamedTuple):
    """A full completion, or one piece of a streamed completion."""

    tokens: list[int]  # includes the stop token that ended the answer, if there is one
    log_probs: list[float]  # log-probability of each token at temperature 1; see `rlframe.language.decoding.sampling`
    versions: list[int]  # version of the parameters for each token
    finish_reason: str | None  # "stop" or "length"; None if more pieces follow
    top_tokens: list[dict[int, float]]  # for each token: top token -> log-probability; empty if not requested
    prompt_scores: PromptScores | None  # only in the first piece, and only if requested; else None


OnTokens = Callable[[Answer], None]


class DecodeRequest(NamedTuple):
    """A request for one completion, after its options were checked."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    key: np.ndarray  # [2] uint32


class Handle:
    """Gives access to the answer of a submitted request.

    `future` is a `concurrent.futures.Future` with the `Answer`; `asyncio.wrap_future` makes it awaitable. To cancel the
    request and free its slot, cancel the future.
    """

    def __init__(self, request: DecodeRequest, on_tokens: OnTokens | None) -> None:
        self.request = request
        self.future: Future[Answer] = Future()
        self._on_tokens = on_tokens
        # Sampled tokens are appended to these lists.
        self._sampled = Answer([], [], [], finish_reason=None, top_tokens=[], prompt_scores=None)
        self.prompt_scores: PromptScores | None = None  # the engine sets this attribute

    def result(self, timeout: float = RESULT_TIMEOUT) -> Answer:
        """Wait for the complete answer.

        Raises:
            PeerError: No answer came within `timeout` seconds. The request continues; `cancel` ends it.
            UnavailableError: The engine was closed or failed.
            CancelledError: The request was cancelled.
        """
        try:
            return self.future.result(timeout)
        except FutureTimeout as error:
            if self.future.done():
                raise
            raise PeerError(f"The decode engine did not complete the answer within {timeout:g} s.") from error

    @property
    def done(self) -> bool:
        """True if the request has an answer, has failed or was cancelled."""
        return self.future.done()

    def cancel(self) -> None:
        """Cancel the request if it is not done."""
        self.future.cancel()

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], version: int, ranked: TopTokens) -> bool:
        """Append sampled tokens. Return True if the request is done. The engine calls this method."""
        if self.done:
            return True
        start = self.sampled
        self._sampled.tokens.extend(tokens)
        self._sampled.log_probs.extend(log_probs)
        self._sampled.versions.extend([version] * len(tokens))
        if count := self.request.sampling.top_tokens:
            self._sampled.top_tokens.extend(ranked.first(count))
        reason = None
        if self.sampled and self._sampled.tokens[-1] in self.request.sampling.stop_tokens:
            reason = "stop"
        elif self.sampled >= self.request.max_tokens:
            reason = "length"
        if self._on_tokens is not None:
            try:
                self._on_tokens(self._answer(start, reason))
            except Exception as error:  # an error in the callback affects only this request
                self.fail(error)
        if reason is not None:
            with contextlib.suppress(InvalidStateError):  # the request has already failed or was cancelled
                self.future.set_result(self._answer(0, reason))
        return self.done

    def fail(self, error: Exception) -> None:
        """Set an error as the result of the request. The engine calls this method."""
        with contextlib.suppress(InvalidStateError):  # the request is already done or was cancelled
            self.future.set_exception(error)

    @property
    def sampled(self) -> int:
        """Number of tokens sampled so far."""
        return len(self._sampled.tokens)

    def _answer(self, start: int, reason: str | None) -> Answer:
        return Answer(
            tokens=self._sampled.tokens[start:],
            log_probs=self._sampled.log_probs[start:],
            versions=self._sampled.versions[start:],
            finish_reason=reason,
            top_tokens=self._sampled.top_tokens[start:],
            prompt_scores=self.prompt_scores if start == 0 else None,
        )
