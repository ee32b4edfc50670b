"""The part of the decode engine that runs on the device: a cache and a batch, with one row for each slot.

JAX compiles for each new shape, so the engine uses few shapes: it pads prompts to powers of two, a prefill call has 1,
4, 16, ... prompts, and the number of positions to which a decode step attends is a power of two.

The file starts with the types of requests to the engine and of their answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.errors import PeerError, check_at_least
from rlframe.language.decoding.sampling import (
    MAX_TOP_TOKENS,
    DecodeProgress,
    PromptScores,
    Sampled,
    SamplingParams,
    SamplingRows,
    TopTokens,
    decode,
    make_rows,
    power_of_two,
    sample_first,
    score_prompt,
)
from rlframe.language.model import transformer
from rlframe.language.model.config import ModelConfig
from rlframe.types import Params

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


_SHORTEST_PROMPT = 16  # tokens; shorter prompts are padded to this length
_SHORTEST_SPAN = 64  # positions


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the decode engine."""

    slots: int = 32  # requests decoded at the same time
    length: int | None = None  # maximum number of tokens of prompt plus answer; None: the model's limit
    steps: int = 8  # tokens sampled per slot and call; waiting requests enter free slots between two calls
    prefill_tokens: int = 1024  # maximum number of prompt tokens in a prefill call, including padding
    max_waiting: int = 1024  # maximum number of waiting requests; further requests are refused
    max_stop_tokens: int = 8  # maximum number of stop tokens of one request

    def __post_init__(self) -> None:
        check_at_least(self, 1, *(field.name for field in dataclasses.fields(self)))


class Slots:
    """The cache and the batch of the decode engine, on the device. Only one thread may use this object.

    Args:
        config: Architecture of the model.
        engine_config: Number of slots and other sizes.
        length: Maximum number of tokens of a prompt and its answer together.
    """

    def __init__(self, config: ModelConfig, engine_config: EngineConfig, length: int) -> None:
        self._config, self._engine_config, self._length = config, engine_config, length
        self._slots = slots = engine_config.slots
        self._cache = transformer.init_cache(config, slots, length)
        nothing = jnp.zeros(slots, jnp.int32)
        self._progress = DecodeProgress(nothing, nothing + 0, nothing + 0, nothing + 0)
        rows = make_rows(np.zeros((slots, 2), np.uint32), [SamplingParams()] * slots, engine_config.max_stop_tokens)
        self._rows: SamplingRows = jax.tree.map(jnp.asarray, rows)

    def bucket(self, prompt: Sequence[int]) -> int:
        """Return the length to which this prompt is padded, in tokens."""
        return min(power_of_two(len(prompt), _SHORTEST_PROMPT), self._length)

    def batch(self, bucket: int) -> int:
        """Return the maximum number of different prompts for one call of `fill`, if prompts are padded to `bucket`."""
        return max(1, min(self._engine_config.prefill_tokens // bucket, self._slots))

    def fill(
        self, params: Params, slots: Sequence[int], requests: Sequence[DecodeRequest]
    ) -> tuple[Sampled, list[PromptScores | None]]:
        """Put requests into free slots, and sample their first tokens. Their prompts have the same padded length.

        The model reads equal prompts only once.

        Returns:
            (sampled tokens `[1, requests]`; for each request the scores of its prompt, None if not requested).
        """
        prompts = {prompt: i for i, prompt in enumerate(dict.fromkeys(request.prompt for request in requests))}
        bucket = self.bucket(requests[0].prompt)
        tokens = np.zeros((_padded_batch_size(len(prompts), self.batch(bucket)), bucket), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for prompt, i in prompts.items():
            tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)
        # Pad the batch to one row for each slot. Padding has a slot index that is out of range, so `_place` drops it.
        padded = [*requests, *[requests[0]] * (self._slots - len(requests))]
        where = np.full(self._slots, self._slots, np.int32)
        where[: len(slots)] = slots
        rows = make_rows(
            [request.key for request in padded],
            [request.sampling for request in padded],
            self._engine_config.max_stop_tokens,
        )
        sources = np.array([prompts[request.prompt] for request in padded], np.int32)
        max_tokens = np.array([request.max_tokens for request in padded], np.int32)
        x, logits, prefilled = _prefill(params, self._config, tokens, lengths)
        self._cache, self._rows, self._progress, first = _place(
            self._cache,
            self._rows,
            self._progress,
            *(logits, prefilled, lengths, sources, where, rows, max_tokens),
            top_tokens=_top_token_count(requests),
        )

        @functools.cache
        def scores(prompt: tuple[int, ...], count: int) -> PromptScores:
            return score_prompt(params, self._config, x[prompts[prompt]], prompt, count)

        wanted = [(request.prompt, request.sampling.score_prompt) for request in requests]
        scored = [None if count is None else scores(prompt, count) for prompt, count in wanted]
        return jax.tree.map(lambda array: np.asarray(array)[None, : len(requests)], first), scored

    def decode(self, params: Params, running: dict[int, DecodeRequest], longest: int) -> Sampled:
        """Sample up to `steps` tokens for each slot of `running`. Return arrays `[steps, running]`.

        Args:
            longest: Maximum over these slots of the number of tokens in the prompt and the answer so far.
        """
        slots = list(running)
        live = np.zeros(self._slots, bool)
        live[slots] = True
        steps = self._engine_config.steps
        span = min(power_of_two(longest + steps, _SHORTEST_SPAN), self._length)
        top_tokens = _top_token_count(list(running.values()))
        self._cache, self._progress, sampled = _decode(
            *(params, self._config, self._cache, self._rows, self._progress, live),
            **dict(steps=steps, span=span, top_tokens=top_tokens),
        )
        return jax.tree.map(lambda array: np.asarray(array)[:, slots], sampled)


def _top_token_count(requests: Sequence[DecodeRequest]) -> int:
    """Return MAX_TOP_TOKENS if any request needs top tokens, else 0. With only two values, JAX compiles only twice."""
    return MAX_TOP_TOKENS if any(request.sampling.top_tokens for request in requests) else 0


def _padded_batch_size(count: int, most: int) -> int:
    """Return the smallest of 1, 4, 16, ... that is at least `count`. If it exceeds `most`, return `most`."""
    size = 1
    while size < count:
        size *= 4
    return min(size, most)


@functools.partial(jax.jit, static_argnames="config")
def _prefill(params, config, tokens, lengths):  # type: ignore[no-untyped-def]
    """Run the model on the prompts `tokens` `[R, T]`, with their `lengths` `[R]`.

    Return (input of the model's head `[R, T, D]`, logits `[R, V]` at the last token of each prompt, cache).
    """
    R, T = tokens.shape
    x, cache = transformer.hidden_cached(
        params, config, tokens, transformer.init_cache(config, R, T), jnp.zeros(R, jnp.int32)
    )
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return x, transformer.logits_of(params, config, last), cache


@functools.partial(jax.jit, static_argnames="top_tokens", donate_argnames=("cache", "rows", "progress"))
def _place(  # type: ignore[no-untyped-def]
    cache, rows, progress, logits, prefilled, lengths, sources, slots, new_rows, max_tokens, *, top_tokens
):
    """Copy the prefilled rows with the indexes `sources` into `slots`, and sample the first token of each slot."""
    start, sampled = sample_first(new_rows, logits[sources], lengths[sources], max_tokens, top_tokens)
    T = prefilled.keys[0].shape[2]
    cache = jax.tree.map(lambda total, part: total.at[slots, :, :T].set(part[sources], mode="drop"), cache, prefilled)
    rows, progress = jax.tree.map(
        lambda total, part: total.at[slots].set(part, mode="drop"), (rows, progress), (new_rows, start)
    )
    return cache, rows, progress, sampled


@functools.partial(
    jax.jit, static_argnames=("config", "steps", "span", "top_tokens"), donate_argnames=("cache", "progress")
)
def _decode(params, config, cache, rows, progress, live, *, steps, span, top_tokens):  # type: ignore[no-untyped-def]
    progress = progress._replace(remaining=jnp.where(live, progress.remaining, 0))
    return decode(params, config, cache, rows, progress, steps=steps, span=span, top_tokens=top_tokens)
