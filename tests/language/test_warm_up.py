"""Tests of the supervised warm-up: batches, parameters and errors."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from rlframe.agents import GRPO, GRPOConfig
from rlframe.errors import NonFiniteLossError, UsageError
from rlframe.language import ModelConfig, SamplingParams, generate
from rlframe.language.model import weights
from rlframe.language.model.tokenizers import ByteTokenizer
from rlframe.language.warm_up import demonstration_batch, warm_up
from tests.agents.batches import assert_trees_equal

BYTES = ByteTokenizer()
EOS = BYTES.eos_token_id
MODEL = ModelConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
CONFIG = GRPOConfig(
    MODEL, max_tokens=24, supervised_steps=60, supervised_batch_size=8, supervised_learning_rate=2e-2, average="token"
)


def next_letter(source, count):
    letters = source.choices("abcd", k=count)
    return [(f"{letter}>", chr(ord(letter) + 1)) for letter in letters]


class RecordingLogger:
    def __init__(self):
        self.steps, self.losses = [], []

    def write(self, step, values):
        self.steps.append(step)
        self.losses.append(values["supervised_loss"])


def test_mask_selects_only_the_answers_with_their_eos():
    batch = demonstration_batch(BYTES, [("ab>", "ba"), (">", "")], 24)
    data = batch.data
    assert data.tokens.shape == (2, 16)
    np.testing.assert_array_equal(data.tokens[0, :6], [*b"ab>", *b"ba", EOS])
    np.testing.assert_array_equal(data.tokens[1, :2], [*b">", EOS])
    np.testing.assert_array_equal(np.argwhere(data.mask), [[0, 3], [0, 4], [0, 5], [1, 1]])
    np.testing.assert_array_equal(data.lengths, [6, 2])
    assert not data.tokens[0, 6:].any() and not data.tokens[1, 2:].any()


@pytest.mark.system
def test_grpo_starts_from_the_warmed_up_model(tmp_path):
    rows = RecordingLogger()
    agent = GRPO(CONFIG)
    params = warm_up(agent, next_letter, BYTES, logger=rows)
    assert rows.steps == [10, 20, 30, 40, 50, 60]
    assert rows.losses[0] > 1.0 > 0.1 > rows.losses[-1]
    prompts = [BYTES.encode(f"{letter}>") for letter in "abcd"]
    sampling = SamplingParams(max_tokens=4, temperature=0.0, stop_tokens=(EOS,))
    answers = generate(params, MODEL, prompts, 0, sampling)
    assert [answer.tokens for answer in answers] == [[ord(letter), EOS] for letter in "bcde"]
    weights.save(tmp_path, MODEL, params)
    after = GRPO(dataclasses.replace(CONFIG, weights=str(tmp_path)))
    started = after.initial_params(jax.random.PRNGKey(1))
    assert_trees_equal(started, params)
    assert_trees_equal(after.initial_learner_state(started).reference_params, params)


@pytest.mark.system
def test_same_seed_gives_the_same_parameters():
    agent = GRPO(dataclasses.replace(CONFIG, supervised_steps=1))
    one, other = (warm_up(agent, next_letter, BYTES, seed=3) for _ in range(2))
    assert_trees_equal(one, other)


def test_too_long_demonstrations_and_infinite_losses_are_refused():
    with pytest.raises(UsageError, match=r"25 tokens, more than GRPOConfig.max_tokens \(24\): \('aaa"):
        demonstration_batch(BYTES, [("a", "b"), ("a" * 20, "b" * 4)], 24)
    agent = GRPO(dataclasses.replace(CONFIG, supervised_learning_rate=1e38, max_grad_norm=None))
    with pytest.raises(NonFiniteLossError, match="Supervised warm-up: "):
        warm_up(agent, next_letter, BYTES)
