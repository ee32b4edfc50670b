"""Pure functions on logits: sample tokens, and compute log-probabilities and ranks of tokens.

**A log-probability always means log softmax(logits)[token]**, at temperature 1 and without top_p and top_k.
`transformer.token_log_probs` computes the same values from the same parameters. The importance weight of a policy
gradient is the ratio of two such probabilities. With temperature 1, top_p 1 and top_k 0, tokens are sampled from this
distribution. With other options, tokens are sampled from another distribution, but the log-probabilities stay the same.
This biases training. To train without this bias, sample with temperature 1, top_p 1 and top_k 0.

The random noise of a row depends only on the row's key and on the number of tokens that the row has sampled. Other rows
of the batch do not affect it.
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

Array = Any  # a numpy or JAX array
MAX_TOP_TOKENS = 20  # maximum number of top tokens at each position, as in OpenAI's API
_CHUNK = 64  # number of prompt positions whose logits are in memory at the same time
_FLOAT32, _INT32 = np.finfo(np.float32), np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request. Invalid values raise `UsageError`."""

    max_tokens: int | None = (
        None  # maximum number of sampled tokens; None: the engine's limit; 0: only score the prompt
    )
    temperature: float = 1.0  # 0: always take the most likely token
    top_p: float = 1.0  # in (0, 1]: sample from the top tokens with this total probability (Holtzman et al. 2020)
    top_k: int = 0  # sample from this number of top tokens; 0: from all tokens
    stop_tokens: tuple[int, ...] = ()  # tokens that end the answer, and are included in it
    seed: int | None = None  # any integer; None: the engine draws a seed
    top_tokens: int = 0  # number of top tokens to return for each sampled token
    score_prompt: int | None = None  # number of top tokens to return for each prompt token; None: no prompt scores

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < (1 if self.score_prompt is None else 0):
            raise UsageError(
                f"max_tokens must be at least 1, got {self.max_tokens}. 0 is allowed only if the prompt is scored: set "
                "echo or prompt_logprobs in a request, or score_prompt in SamplingParams."
            )
        if not 0.0 <= self.temperature < float("inf"):  # this comparison also refuses NaN
            raise UsageError(f"temperature must be at least 0, got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if self.top_k < 0:
            raise UsageError(f"top_k must be at least 0 (0 means all tokens), got {self.top_k}.")
        for name, count in (("top_tokens", self.top_tokens), ("score_prompt", self.score_prompt or 0)):
            if not 0 <= count <= MAX_TOP_TOKENS:
                raise UsageError(f"{name} must be from 0 to {MAX_TOP_TOKENS}, got {count}.")
        if not all(0 <= token < 2**31 for token in self.stop_tokens):
            raise UsageError(f"stop_tokens must be token ids, got {list(self.stop_tokens)}.")


class SamplingRows(NamedTuple):
    """The `SamplingParams` of a batch of B rows (requests), as arrays."""

    key: Array  # [B, 2] uint32, made by `row_key`
    temperature: Array  # [B] float32
    top_p: Array  # [B] float32
    top_k: Array  # [B] int32
    stop: Array  # [B, S] int32: stop tokens, padded with -1


class Sampled(NamedTuple):
    """The result of sampling: arrays `[steps, B]` for several steps, or `[B]` for one step."""

    tokens: Array  # int32; -1 if the row's answer was already complete
    log_probs: Array  # float32
    ranked: TopTokens  # [..., K]


def row_key(seed: int, sample: int = 0) -> np.ndarray:
    """Return a random key `[2]` uint32 for a seed (any integer). `sample` numbers the answers to one request."""
    return np.random.SeedSequence([seed % 2**64, sample]).generate_state(2, np.uint32)


def make_rows(
    keys: Sequence[np.ndarray] | np.ndarray, sampling: Sequence[SamplingParams], max_stop: int
) -> SamplingRows:
    """Convert the options of several requests to numpy arrays, with one row for each request.

    Each key is `[2]` uint32. A row has space for `max_stop` stop tokens.
    """
    stop = np.full((len(sampling), max_stop), -1, np.int32)
    for row, one in zip(stop, sampling):
        row[: len(one.stop_tokens)] = one.stop_tokens
    return SamplingRows(
        np.asarray(keys, np.uint32),
        np.array([one.temperature for one in sampling]).clip(max=_FLOAT32.max).astype(np.float32),
        # Avoid a top_p that rounds to 0, because it would exclude all tokens.
        np.array([one.top_p for one in sampling]).clip(_FLOAT32.tiny).astype(np.float32),
        np.array([min(one.top_k, _INT32.max) for one in sampling], np.int32),
        stop,
    )


def sample(logits: jax.Array, rows: SamplingRows, sampled: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sample a token for each row.

    Args:
        logits: `[B, V]` float32.
        rows: Sampling options of the rows.
        sampled: `[B]` int32: number of tokens that each row has sampled before.

    Returns:
        (tokens `[B]` int32, their log-probabilities `[B]` float32 at temperature 1, without top_p and top_k).
    """
    drawn = rows.temperature > 0
    # Subtract the maximum, so that the division by a low temperature gives no infinite value.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(drawn, rows.temperature, 1.0)[:, None]
    cut = drawn & ((rows.top_p < 1) | (rows.top_k > 0))
    # Call `_cut` only if a row needs it, because it sorts the logits.
    scaled = jax.lax.cond(jnp.any(cut), lambda x: _cut(x, rows.top_p, rows.top_k), lambda x: x, scaled)
    keys = jax.vmap(lambda key, i: jax.random.fold_in(jax.random.wrap_key_data(key), i))(rows.key, sampled)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    tokens = jnp.argmax(jnp.where(drawn[:, None], scaled + noise, logits), axis=-1).astype(jnp.int32)
    log_probs = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
    return tokens, log_probs


def _cut(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Keep the top_k tokens, and of these the tokens within top_p (Holtzman et al. 2020). Set other logits to -inf.

    If several tokens have the same probability as the last kept token, keep all of them.
    """
    ranked = -jnp.sort(-logits, axis=-1)
    within = (jnp.arange(logits.shape[-1]) < top_k[:, None]) | (top_k == 0)[:, None]
    ranked = jnp.where(within, ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # This always keeps the most likely token. With top_p 1, it keeps all tokens, even if `before` is rounded to 1.
    kept = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    last = jnp.min(jnp.where(kept & within, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= last, logits, -jnp.inf)


class DecodeProgress(NamedTuple):
    """Progress of each row of a decoding batch."""

    token: jax.Array  # [B] int32: last token of the row, which is not in the cache yet
    length: jax.Array  # [B] int32: number of tokens in the cache
    sampled: jax.Array  # [B] int32: number of sampled tokens
    remaining: jax.Array  # [B] int32: maximum number of further tokens; 0: the row has ended


def decode(
    params: Params,
    config: ModelConfig,
    cache: transformer.Cache,
    rows: SamplingRows,
    progress: DecodeProgress,
    *,
    steps: int,
    span: int | None = None,
    top_tokens: int = 0,
) -> tuple[transformer.Cache, DecodeProgress, Sampled]:
    """Sample up to `steps` tokens for each row that has not ended. Return early if all rows have ended.

    Args:
        params, config, cache: See `rlframe.language.model.transformer.apply_cached`.
        rows: Sampling options of the rows.
        progress: Progress of the rows.
        steps: Static. Maximum number of tokens for each row.
        span: Static. Number of cache positions that are used, including the new tokens; see `apply_cached`.
        top_tokens: Static. Number of top tokens to return for each sampled token.

    Returns:
        (cache, progress, sampled tokens `[steps, B]`).
    """
    B = progress.token.shape[0]
    ranked = rank(jnp.zeros((steps, B, config.vocab_size)), top_tokens)
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
        is_running = progress.remaining > 0
        new = Sampled(jnp.where(is_running, token, -1), log_prob, rank(logits[:, 0], top_tokens))
        sampled = jax.tree.map(lambda total, one: total.at[i].set(one), sampled, new)
        return i + 1, cache, advance(rows, progress, token, 1), sampled

    _, cache, progress, sampled = jax.lax.while_loop(more, step, (0, cache, progress, sampled))
    return cache, progress, sampled


def sample_first(
    rows: SamplingRows, logits: jax.Array, lengths: jax.Array, max_tokens: jax.Array, top_tokens: int = 0
) -> tuple[DecodeProgress, Sampled]:
    """Sample the first token for each row. The prompts of the rows are in the cache.

    Args:
        rows: Sampling options of the rows.
        logits: `[B, V]`, at the last token of each prompt.
        lengths: `[B]` int32: number of tokens of each prompt.
        max_tokens: `[B]` int32: maximum number of tokens that each row may sample.
        top_tokens: Static. Number of top tokens to return for each sampled token.

    Returns:
        (progress, sampled tokens `[B]`).
    """
    none = jnp.zeros_like(lengths)
    token, log_prob = sample(logits, rows, none)
    sampled = Sampled(jnp.where(max_tokens > 0, token, -1), log_prob, rank(logits, top_tokens))
    before = DecodeProgress(token=token, length=lengths, sampled=none, remaining=max_tokens)
    return advance(rows, before, token, 0), sampled


def advance(rows: SamplingRows, progress: DecodeProgress, token: jax.Array, cached: int) -> DecodeProgress:
    """Return the progress after each row sampled `token` `[B]` and cached `cached` tokens. Ended rows do not change."""
    is_running = progress.remaining > 0
    stopped = jnp.any(token[:, None] == rows.stop, axis=-1)
    return DecodeProgress(
        token=jnp.where(is_running, token, progress.token),
        length=progress.length + cached * is_running,
        sampled=progress.sampled + is_running,
        remaining=jnp.where(is_running & ~stopped, progress.remaining - 1, 0),
    )


def check_prompt(prompt: Sequence[int], max_tokens: int, vocab_size: int, length: int) -> None:
    """Raise `UsageError` if the prompt is empty, has an unknown token, or is too long.

    Args:
        length: Maximum value of the prompt's length plus `max_tokens`.
    """
    if not len(prompt):
        raise UsageError("The prompt is empty. A model needs at least one token, such as bos.")
    if len(prompt) + max_tokens > length:
        raise UsageError(
            f"The prompt has {len(prompt)} tokens and max_tokens is {max_tokens}. Together, at most {length} tokens "
            "are allowed."
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise UsageError(f"The prompt has the token {wrong}, but the model's token ids are 0 to {vocab_size - 1}.")


def power_of_two(count: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `count`; if it is smaller than `least`, return `least`."""
    return max(1 << max(count - 1, 0).bit_length(), least)


# --- The most likely tokens at each position, and scores of prompts.


class TopTokens(NamedTuple):
    """The most likely tokens at each position, in descending order: `[..., K]`."""

    tokens: Array  # int32
    log_probs: Array  # float32, at temperature 1

    def first(self, count: int) -> list[dict[int, float]]:
        """Return a dict for each position of `[T, K]`: token -> log-probability, for the top `count` tokens."""
        positions = zip(self.tokens[:, :count].tolist(), self.log_probs[:, :count].tolist())
        return [dict(zip(tokens, log_probs)) for tokens, log_probs in positions]


class PromptScores(NamedTuple):
    """Scores of a prompt's tokens. The first token has no score."""

    log_probs: list[float]
    ranks: list[int]  # rank of each token: 1 for the most likely token at its position
    top_tokens: list[dict[int, float]]  # for each position: top token -> log-probability
    version: int = -1  # version of the parameters, which the engine sets

    def positions(self, prompt: Sequence[int], count: int) -> list[dict[int, tuple[float, int]] | None]:
        """Return a dict for each position of the prompt: token -> (log-probability, rank).

        Each dict contains the prompt's token and the `count` most likely tokens. The first position has None.
        """
        positions: list[dict[int, tuple[float, int]] | None] = [None]  # the first token has no score
        for token, log_prob, at, top_tokens in zip(prompt[1:], self.log_probs, self.ranks, self.top_tokens):
            others = {other: (value, i + 1) for i, (other, value) in enumerate([*top_tokens.items()][:count])}
            positions.append({token: (log_prob, at), **others})
        return positions


def rank(logits: jax.Array, count: int) -> TopTokens:
    """Return the `count` most likely tokens for `logits` `[..., V]`, as arrays `[..., min(count, V)]`."""
    if count == 0:
        empty = jnp.zeros((*logits.shape[:-1], 0))
        return TopTokens(empty.astype(jnp.int32), empty)
    log_probs, tokens = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    return TopTokens(tokens, log_probs - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def score_prompt(params: Any, config: Any, x: jax.Array, prompt: tuple[int, ...], count: int) -> PromptScores:
    """Return the scores of a prompt's tokens.

    Args:
        params, config: The model.
        x: `[T, D]`: input of the model's head at each token of the prompt, followed by padding.
        prompt: Token ids.
        count: Number of most likely tokens to return at each position.
    """
    targets = np.zeros(len(x), np.int32)
    targets[: len(prompt) - 1] = prompt[1:]
    log_probs, ranks, ranked = jax.device_get(_score(params, config, x, targets, MAX_TOP_TOKENS if count else 0))
    n = len(prompt) - 1
    top_tokens = TopTokens(*(array[:n] for array in ranked)).first(count)
    return PromptScores(log_probs[:n].tolist(), ranks[:n].tolist(), top_tokens)


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
