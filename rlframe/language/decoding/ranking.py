"""Log-probabilities beyond those of sampled tokens: of the likeliest tokens at each place, and of a prompt's own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.language.model import transformer

Array = Any  # of numpy or of JAX
MOST_RANKED = 20  # tokens at each place, as OpenAI allows
_CHUNK = 64  # positions of a prompt whose logits exist at once


class Ranked(NamedTuple):
    """The likeliest tokens of each place, the likeliest first: `[..., K]`."""

    tokens: Array  # int32
    log_probs: Array  # float32, at temperature 1

    def first(self, count: int) -> list[dict[int, float]]:
        """Return for each place of `[T, K]` the first `count` as log-probabilities by token."""
        places = zip(self.tokens[:, :count].tolist(), self.log_probs[:, :count].tolist())
        return [dict(zip(tokens, log_probs)) for tokens, log_probs in places]


class PromptScores(NamedTuple):
    """What the model makes of a prompt's tokens, all but the first, of which it says nothing."""

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


def rank(logits: jax.Array, count: int) -> Ranked:
    """The `count` likeliest tokens under `logits` `[..., V]`: `[..., count]`, where there are so many."""
    if count == 0:
        empty = jnp.zeros((*logits.shape[:-1], 0))
        return Ranked(empty.astype(jnp.int32), empty)
    log_probs, tokens = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    return Ranked(tokens, log_probs - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


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
    log_probs, ranks, ranked = jax.device_get(_score(params, config, x, targets, MOST_RANKED if count else 0))
    n = len(prompt) - 1
    likeliest = Ranked(*(array[:n] for array in ranked)).first(count)
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
