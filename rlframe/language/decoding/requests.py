"""Requests to the decode engine, and its answers."""

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
    """A completion, whole, or a piece of one that is streamed."""

    tokens: list[int]  # with the stop token, where one ended it
    log_probs: list[float]  # of each token, under the model at temperature 1: see `rlframe.language.decoding.sampling`
    versions: list[int]  # of the parameters that each token was sampled with
    finish_reason: str | None  # "stop" or "length"; None: a piece that others follow
    likeliest: list[dict[int, float]]  # at each token the likeliest and their log-probabilities; empty: not asked for
    prompt_scores: PromptScores | None  # with the first piece, where they were asked for


OnTokens = Callable[[Answer], None]


class DecodeRequest(NamedTuple):
    """One completion that is asked for, checked."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    key: np.ndarray  # [2] uint32


class Handle:
    """An answer to come.

    `future` is a `concurrent.futures.Future` of it, which `asyncio.wrap_future` takes; whoever cancels that cancels the
    request, and frees its slot.
    """

    def __init__(self, request: DecodeRequest, on_tokens: OnTokens | None) -> None:
        self.request = request
        self.future: Future[Answer] = Future()
        self._on_tokens = on_tokens
        self._sampled = Answer([], [], [], finish_reason=None, likeliest=[], prompt_scores=None)  # grows
        self.prompt_scores: PromptScores | None = None  # the engine's

    def result(self, timeout: float = RESULT_TIMEOUT) -> Answer:
        """Wait for the whole answer.

        Raises:
            PeerError: it took more than `timeout` seconds. The request goes on: `cancel` ends it.
            UnavailableError: the engine was closed, or failed.
            CancelledError: it was cancelled.
        """
        try:
            return self.future.result(timeout)
        except FutureTimeout as error:
            if self.future.done():
                raise
            raise PeerError(f"The decode engine gave no whole answer within {timeout:g} s.") from error

    @property
    def done(self) -> bool:
        """Whether there is an answer, or will be none."""
        return self.future.done()

    def cancel(self) -> None:
        """Give the request up, if it is not done."""
        self.future.cancel()

    def add(self, tokens: Sequence[int], log_probs: Sequence[float], version: int, ranked: TopTokens) -> bool:
        """The engine's: tokens that were sampled. Returns whether the answer is complete."""
        if self.done:
            return True
        start = self.sampled
        self._sampled.tokens.extend(tokens)
        self._sampled.log_probs.extend(log_probs)
        self._sampled.versions.extend([version] * len(tokens))
        if count := self.request.sampling.likeliest:
            self._sampled.likeliest.extend(ranked.first(count))
        reason = None
        if self.sampled and self._sampled.tokens[-1] in self.request.sampling.stop_tokens:
            reason = "stop"
        elif self.sampled >= self.request.max_tokens:
            reason = "length"
        if self._on_tokens is not None:
            try:
                self._on_tokens(self._answer(start, reason))
            except Exception as error:  # the caller's: it concerns this request alone
                self.fail(error)
        if reason is not None:
            with contextlib.suppress(InvalidStateError):  # it failed, or was cancelled
                self.future.set_result(self._answer(0, reason))
        return self.done

    def fail(self, error: Exception) -> None:
        """The engine's: there will be no answer."""
        with contextlib.suppress(InvalidStateError):  # it is done, or was cancelled
            self.future.set_exception(error)

    @property
    def sampled(self) -> int:
        """Tokens so far."""
        return len(self._sampled.tokens)

    def _answer(self, start: int, reason: str | None) -> Answer:
        return Answer(
            tokens=self._sampled.tokens[start:],
            log_probs=self._sampled.log_probs[start:],
            versions=self._sampled.versions[start:],
            finish_reason=reason,
            likeliest=self._sampled.likeliest[start:],
            prompt_scores=self.prompt_scores if start == 0 else None,
        )
