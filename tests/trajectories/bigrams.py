"""A language model with one table of bigram logits, small enough to learn within a test."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.agents import Agent
from rlframe.trajectories import Group

TOKENS = 4
BEST = 3  # the token that is rewarded


@dataclasses.dataclass(frozen=True)
class BigramConfig:
    learning_rate: float = 0.3


class Bigram(Agent):
    """An agent with logits[a, b] for token b after token a. It learns by policy gradients with importance weights."""

    config_cls = BigramConfig

    def __init__(self) -> None:
        super().__init__(BigramConfig(), None, None)

    def initial_params(self, rng):
        del rng
        return {"logits": jnp.zeros((TOKENS, TOKENS))}

    def loss(self, params, learner_state, batch):
        del learner_state
        data = batch.data
        log_probs = jax.nn.log_softmax(params["logits"])[data.tokens[:, :-1], data.tokens[:, 1:]]
        mask = data.mask[:, 1:]
        ratio = jnp.exp(log_probs - data.inference_logprobs[:, 1:])
        loss = -jnp.sum(ratio * data.advantages[:, 1:] * mask) / jnp.sum(mask)
        return loss, {"score": jnp.mean(data.scores)}


def sample_group(
    params, rng: np.random.Generator, version: int, sequences: int = 8, length: int = 12, **fields
) -> Group:
    """Sample a group of sequences that begin with token 0. The score of a sequence is the fraction of BEST tokens."""
    logits = np.asarray(params["logits"], np.float64)
    table = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    tokens, logprobs = [], []
    for _ in range(sequences):
        row, probabilities = [0], [1.0]
        for _ in range(length):
            row.append(int(rng.choice(TOKENS, p=table[row[-1]])))
            probabilities.append(float(np.log(table[row[-2], row[-1]])))
        tokens.append(row)
        logprobs.append(probabilities)
    scores = np.array([np.mean(np.array(row[1:]) == BEST) for row in tokens])
    advantages = [[score - scores.mean()] * (length + 1) for score in scores]
    return Group(
        tokens,
        [[-100, *row[1:]] for row in tokens],
        scores,
        advantages=advantages,
        inference_logprobs=logprobs,
        policy_version=version,
        **fields,
    )
