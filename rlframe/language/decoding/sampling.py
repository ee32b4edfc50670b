"""Choosing tokens, and the log-probabilities of the others: pure functions on logits.

**Log-probabilities are the model's own**, at temperature 1 and with nothing cut off: log softmax(logits)[token], which
is what `transformer.token_log_probs` computes from the same parameters and what the ratio of a policy gradient is
made of. With temperature 1, top_p 1 and top_k 0 tokens are drawn from just that distribution. Otherwise they are drawn
from another one, and the log-probability still says how likely the *model* was to say the token, not how likely it was
to be drawn: train on what was sampled at temperature 1 and without cut-offs, or accept that bias.

A row's noise is a function of its key and of how many tokens it has been given before, so what else is in the batch
makes no difference to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.errors import UsageError
from rlframe.language.model import transformer
from rlframe.language.model.config import ModelConfig
from rlframe.types import Params

Array = Any  # of numpy or of JAX
MAX_TOP_TOKENS = 20  # tokens at each place, as OpenAI allows
_CHUNK = 64  # positions of a prompt whose logits exist at once
_FLOAT32, _INT32 = np.finfo(np.float32), np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Options of one answer: its length, temperature, cut-offs, stop tokens and seed. Checked."""

    max_tokens: int | None = None  # of the answer; None: as many as there is room for; 0: only score the prompt
    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0  # in (0, 1]: the likeliest tokens that together have this probability (Holtzman et al. 2020)
    top_k: int = 0  # of the likeliest tokens so many; 0: all
    stop_tokens: tuple[int, ...] = ()  # that end the answer, of which they are the last
    seed: int | None = None  # any integer; None: the engine draws one
    likeliest: int = 0  # tokens whose log-probabilities are wanted beside that of each sampled one
    score_prompt: int | None = None  # as `likeliest`, at the prompt's tokens, with their own; None: not even those

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < (1 if self.score_prompt is None else 0):
            raise UsageError(
                f"max_tokens must be at least 1, got {self.max_tokens}. (0 samples nothing and scores the prompt: with "
                "echo or prompt_logprobs of a request, score_prompt of SamplingParams.)"
            )
        if not 0.0 <= self.temperature < float("inf"):  # NaN is neither
            raise UsageError(f"temperature must be at least 0, got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if self.top_k < 0:
            raise UsageError(f"top_k must be at least 0 (0: all tokens), got {self.top_k}.")
        for name, count in (("likeliest", self.likeliest), ("score_prompt", self.score_prompt or 0)):
            if not 0 <= count <= MAX_TOP_TOKENS:
                raise UsageError(f"{name} must be from 0 to {MAX_TOP_TOKENS}, got {count}.")
        if not all(0 <= token < 2**31 for token in self.stop_tokens):
            raise UsageError(f"stop_tokens must be token ids, got {list(self.stop_tokens)}.")


class SamplingRows(NamedTuple):
    """Sampling options of each row of a batch: `SamplingParams` as arrays."""

    key: Array  # [B, 2] uint32, of `row_key`
    temperature: Array  # [B] float32
    top_p: Array  # [B] float32
    top_k: Array  # [B] int32
    stop: Array  # [B, S] int32: stop tokens; -1 is none


class Sampled(NamedTuple):
    """Tokens that were sampled, `[steps, B]`, or of one step `[B]`."""

    tokens: Array  # int32; -1 where none was sampled
    log_probs: Array  # float32
    ranked: TopTokens  # [..., K]


def row_key(seed: int, sample: int = 0) -> np.ndarray:
    """The key `[2]` uint32 of the `sample`-th answer to a request with this seed (any integer)."""
    return np.random.SeedSequence([seed % 2**64, sample]).generate_state(2, np.uint32)


def make_rows(
    keys: Sequence[np.ndarray] | np.ndarray, sampling: Sequence[SamplingParams], max_stop: int
) -> SamplingRows:
    """One row of numpy for each key `[2]` uint32 and its `sampling`, of at most `max_stop` stop tokens."""
    stop = np.full((len(sampling), max_stop), -1, np.int32)
    for row, one in zip(stop, sampling):
        row[: len(one.stop_tokens)] = one.stop_tokens
    return SamplingRows(
        np.asarray(keys, np.uint32),
        np.array([one.temperature for one in sampling]).clip(max=_FLOAT32.max).astype(np.float32),
        np.array([one.top_p for one in sampling]).clip(_FLOAT32.tiny).astype(np.float32),  # 0 would keep no token
        np.array([min(one.top_k, _INT32.max) for one in sampling], np.int32),
        stop,
    )


def sample(logits: jax.Array, rows: SamplingRows, sampled: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choose a token for each row.

    Args:
        logits: `[B, V]` float32.
        rows: how.
        sampled: `[B]` int32: tokens that the row was given before.

    Returns:
        (tokens `[B]` int32, their log-probabilities `[B]` float32 under `logits` as they are: see the module).
    """
    drawn = rows.temperature > 0
    # Below the largest, so that none becomes infinite, however low the temperature is.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(drawn, rows.temperature, 1.0)[:, None]
    cut = drawn & ((rows.top_p < 1) | (rows.top_k > 0))
    # Sorting is left out where no row needs it.
    scaled = jax.lax.cond(jnp.any(cut), lambda x: _cut(x, rows.top_p, rows.top_k), lambda x: x, scaled)
    keys = jax.vmap(lambda key, i: jax.random.fold_in(jax.random.wrap_key_data(key), i))(rows.key, sampled)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    tokens = jnp.argmax(jnp.where(drawn[:, None], scaled + noise, logits), axis=-1).astype(jnp.int32)
    log_probs = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
    return tokens, log_probs


def _cut(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Logits with -inf for what is beyond `top_k`, then beyond `top_p` of what is left (Holtzman et al. 2020).

    Tokens as likely as the last that is kept are kept.
    """
    ranked = -jnp.sort(-logits, axis=-1)
    within = (jnp.arange(logits.shape[-1]) < top_k[:, None]) | (top_k == 0)[:, None]
    ranked = jnp.where(within, ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The likeliest is kept whatever top_p is; with top_p 1 rounding must cut nothing.
    kept = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    last = jnp.min(jnp.where(kept & within, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= last, logits, -jnp.inf)


class DecodeProgress(NamedTuple):
    """Progress of each row of a batch that is decoded."""

    token: jax.Array  # [B] int32: the last of the row, which is not in the cache yet
    length: jax.Array  # [B] int32: tokens in the cache
    sampled: jax.Array  # [B] int32: tokens it was given
    remaining: jax.Array  # [B] int32: tokens that may still be sampled; 0: the row rests


def decode(
    params: Params,
    config: ModelConfig,
    cache: transformer.Cache,
    rows: SamplingRows,
    progress: DecodeProgress,
    *,
    steps: int,
    span: int | None = None,
    likeliest: int = 0,
) -> tuple[transformer.Cache, DecodeProgress, Sampled]:
    """Sample up to `steps` tokens for each row that does not rest; fewer steps are made when all rest.

    Args:
        params, config, cache: as for `rlframe.language.model.transformer.apply_cached`.
        rows, progress: what is sampled, and from where.
        steps: static.
        span: static: positions of the cache that are in use after this; see `apply_cached`.
        likeliest: static: tokens that are ranked beside each sampled one.

    Returns:
        (cache, progress, what was sampled `[steps, B]`).
    """
    B = progress.token.shape[0]
    ranked = rank(jnp.zeros((steps, B, config.vocab_size)), likeliest)
    sampled = Sampled(jnp.full((steps, B), -1, jnp.int32), jnp.zeros((steps, B), jnp.float32), ranked)

    def more(state):  # type: ignore[no-untyped-def]
        i, _, progress, _ = state
        return (i < steps) & jnp.any(progress.remaining > 0)

    def step(state):  # type: ignore[no-untyped-def]
        i, cache, progress, sampled = state
        logits, cache = transformer.apply_cached(
            params, config, progress.token[:, None], cache, progress.length, span=span
        )
        token, log_prob = sample(logits[:, 0], rows, progress.sampled)
        goes_on = progress.remaining > 0
        new = Sampled(jnp.where(goes_on, token, -1), log_prob, rank(logits[:, 0], likeliest))
        sampled = jax.tree.map(lambda all_of, one: all_of.at[i].set(one), sampled, new)
        return i + 1, cache, advance(rows, progress, token, 1), sampled

    _, cache, progress, sampled = jax.lax.while_loop(more, step, (0, cache, progress, sampled))
    return cache, progress, sampled


def begin(
    rows: SamplingRows, logits: jax.Array, lengths: jax.Array, max_tokens: jax.Array, likeliest: int = 0
) -> tuple[DecodeProgress, Sampled]:
    """Sample the first token of rows whose prompts are in the cache.

    Args:
        logits: `[B, V]`, of the prompts' last tokens.
        lengths: `[B]` int32, of the prompts.
        max_tokens: `[B]` int32, that the rows may have.
        likeliest: static: tokens that are ranked beside each sampled one.

    Returns:
        (progress, what was sampled `[B]`).
    """
    none = jnp.zeros_like(lengths)
    token, log_prob = sample(logits, rows, none)
    sampled = Sampled(jnp.where(max_tokens > 0, token, -1), log_prob, rank(logits, likeliest))
    before = DecodeProgress(token=token, length=lengths, sampled=none, remaining=max_tokens)
    return advance(rows, before, token, 0), sampled


def advance(rows: SamplingRows, progress: DecodeProgress, token: jax.Array, cached: int) -> DecodeProgress:
    """`progress` after `token` `[B]` was sampled, with `cached` tokens more in the cache; rows that rest stay."""
    goes_on = progress.remaining > 0
    stopped = jnp.any(token[:, None] == rows.stop, axis=-1)
    return DecodeProgress(
        token=jnp.where(goes_on, token, progress.token),
        length=progress.length + cached * goes_on,
        sampled=progress.sampled + goes_on,
        remaining=jnp.where(goes_on & ~stopped, progress.remaining - 1, 0),
    )


def check_prompt(prompt: Sequence[int], max_tokens: int, vocab_size: int, length: int) -> None:
    """Raise `UsageError` for a prompt that a model cannot answer with `max_tokens` within `length` tokens."""
    if not len(prompt):
        raise UsageError("The prompt is empty: a model needs at least one token, such as bos, to begin with.")
    if len(prompt) + max_tokens > length:
        raise UsageError(
            f"The prompt has {len(prompt)} tokens; with max_tokens {max_tokens} that is more than the {length} that "
            "there is room for."
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise UsageError(f"The prompt has the token {wrong}; the model's vocabulary is 0 to {vocab_size - 1}.")


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return max(1 << max(count - 1, 0).bit_length(), least)


# --- log-probabilities beyond those of sampled tokens


class TopTokens(NamedTuple):
    """The likeliest tokens of each place, the likeliest first: `[..., K]`."""

    tokens: Array  # int32
    log_probs: Array  # float32, at temperature 1

    def first(self, count: int) -> list[dict[int, float]]:
        """Return for each place of `[T, K]` the first `count` as log-probabilities by token."""
        places = zip(self.tokens[:, :count].tolist(), self.log_probs[:, :count].tolist())
        return [dict(zip(tokens, log_probs)) for tokens, log_probs in places]


class PromptScores(NamedTuple):
    """The scores of a prompt's tokens, from the second on."""

    log_probs: list[float]
    ranks: list[int]  # 1: the likeliest at its place
    likeliest: list[dict[int, float]]  # at each place, as many as were asked for
    version: int = -1  # of the parameters; the engine fills it in

    def places(self, prompt: Sequence[int], count: int) -> list[dict[int, tuple[float, int]] | None]:
        """Return for each token of the prompt (log-probability, rank) of it and of the `count` likeliest, by token."""
        places: list[dict[int, tuple[float, int]] | None] = [None]  # of the first nothing is known
        for token, log_prob, at, likeliest in zip(prompt[1:], self.log_probs, self.ranks, self.likeliest):
            others = {other: (value, i + 1) for i, (other, value) in enumerate([*likeliest.items()][:count])}
            places.append({token: (log_prob, at), **others})
        return places


def rank(logits: jax.Array, count: int) -> TopTokens:
    """The `count` likeliest tokens under `logits` `[..., V]`: `[..., count]`, where there are so many."""
    if count == 0:
        empty = jnp.zeros((*logits.shape[:-1], 0))
        return TopTokens(empty.astype(jnp.int32), empty)
    log_probs, tokens = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    return TopTokens(tokens, log_probs - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def score_prompt(params: Any, config: Any, x: jax.Array, prompt: tuple[int, ...], count: int) -> PromptScores:
    """Score the tokens of a prompt.

    Args:
        params, config: the model.
        x: `[T, D]`: the head's input at each of the prompt's tokens, and at padding behind them.
        prompt: token ids.
        count: likeliest tokens of each place.
    """
    targets = np.zeros(len(x), np.int32)
    targets[: len(prompt) - 1] = prompt[1:]
    log_probs, ranks, ranked = jax.device_get(_score(params, config, x, targets, MAX_TOP_TOKENS if count else 0))
    n = len(prompt) - 1
    likeliest = TopTokens(*(array[:n] for array in ranked)).first(count)
    return PromptScores(log_probs[:n].tolist(), ranks[:n].tolist(), likeliest)


@functools.partial(jax.jit, static_argnames=("config", "count"))
def _score(params, config, x, targets, count):  # type: ignore[no-untyped-def]
    T = len(x)
    x, targets = (jnp.pad(each, ((0, -T % _CHUNK), *[(0, 0)] * (each.ndim - 1))) for each in (x, targets))

    def chunk(part):  # type: ignore[no-untyped-def]
        hidden, target = part
        logits = transformer.logits_of(params, config, hidden)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)
        log_probs = (chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))[:, 0]
        return log_probs, 1 + jnp.sum(logits > chosen, axis=-1), rank(logits, count)

    parts = x.reshape(-1, _CHUNK, x.shape[-1]), targets.reshape(-1, _CHUNK)
    return jax.tree.map(lambda a: a.reshape(len(x), *a.shape[2:])[:T], jax.lax.map(chunk, parts))
