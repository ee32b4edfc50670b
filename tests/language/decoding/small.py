"""A small language model for tests, and a function that computes a learner's log-probabilities of its answers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from rlframe.language import ModelConfig
from rlframe.language.model import transformer

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, max_position_embeddings=64
)


@functools.cache
def weights(seed: int = 0) -> Any:
    """Return random parameters. They are doubled, so that some tokens are clearly more likely than others."""
    return jax.tree.map(lambda x: 2 * x, transformer.init(jax.random.key(seed), CONFIG))


def learner_log_probs(prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities that a learner computes for `tokens` after `prompt`."""
    padded = np.zeros(CONFIG.max_position_embeddings, np.int32)
    padded[: len(prompt) + len(tokens)] = [*prompt, *tokens]
    return np.asarray(_log_probs(weights(), padded))[len(prompt) - 1 :][: len(tokens)]


@jax.jit
def _log_probs(params: Any, tokens: jax.Array) -> jax.Array:
    return transformer.token_log_probs(params, CONFIG, tokens[None])[0]
