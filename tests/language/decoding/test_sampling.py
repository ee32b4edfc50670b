"""Test how tokens are sampled from logits, and the function `generate`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.language import SamplingParams, generate
from rlframe.language.decoding import sampling
from rlframe.language.model import transformer
from tests.language.decoding.small import CONFIG, learner_log_probs, weights

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
draw = jax.jit(sampling.sample)


def frequencies(params: SamplingParams, count: int = 4000) -> np.ndarray:
    rows = sampling.make_rows(np.stack([sampling.row_key(5, i) for i in range(count)]), [params] * count, 1)
    logits = LOGITS[::-1] + 20  # reversed: token 0, which a bug would often sample, is the least likely
    tokens, log_probs = draw(np.tile(logits, (count, 1)), rows, np.zeros(count, np.int32))
    np.testing.assert_allclose(log_probs, LOGITS[4 - tokens], atol=1e-5)  # sampling options do not change them
    return np.bincount(4 - tokens, minlength=5) / count


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (SamplingParams(temperature=0.5), np.square([0.4, 0.3, 0.15, 0.1, 0.05]) / 0.285),
        (SamplingParams(temperature=0.0), [1, 0, 0, 0, 0]),
        (SamplingParams(top_p=0.75), np.array([0.4, 0.3, 0.15, 0, 0]) / 0.85),
        (SamplingParams(top_p=0.01), [1, 0, 0, 0, 0]),
        (SamplingParams(top_k=2), np.array([4, 3, 0, 0, 0]) / 7),
        (SamplingParams(top_k=4, top_p=0.8), np.array([0.4, 0.3, 0.15, 0, 0]) / 0.85),  # top_k first, then top_p
        (SamplingParams(top_k=9), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (SamplingParams(top_k=10**20), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (SamplingParams(top_p=1e-50), [1, 0, 0, 0, 0]),  # 1e-50 is 0 in float32
        (SamplingParams(temperature=2e-38), [1, 0, 0, 0, 0]),  # a logit divided by 2e-38 overflows float32
    ],
)
def test_token_frequencies_match_the_probabilities(params, expected):
    np.testing.assert_allclose(frequencies(params), expected, atol=0.025)
    assert (frequencies(params)[np.asarray(expected) == 0] == 0).all()


def test_noise_depends_only_on_key_and_position():
    flat = np.zeros((64, 40), np.float32)
    keys = np.stack([sampling.row_key(1, i) for i in range(64)])
    rows = sampling.make_rows(keys, [SamplingParams()] * 64, 1)
    first, again = (draw(flat, rows, np.zeros(64, np.int32))[0] for _ in range(2))
    later = draw(flat, rows, np.ones(64, np.int32))[0]
    np.testing.assert_array_equal(first, again)
    assert len(set(first.tolist())) > 20 and (first != later).sum() > 50
    assert not np.array_equal(sampling.row_key(1), sampling.row_key(2))
    assert not np.array_equal(sampling.row_key(-1), sampling.row_key(1))


@pytest.mark.system
def test_generate_returns_the_log_probs_that_a_learner_computes():
    prompts = [[1, 2, 3], list(range(20)), [7]]
    answers = generate(weights(), CONFIG, prompts, 3, SamplingParams(max_tokens=9, temperature=1.3, top_p=0.9))
    for prompt, answer in zip(prompts, answers):
        assert len(answer.tokens) == 9 and answer.finish_reason == "length"
        np.testing.assert_allclose(answer.log_probs, learner_log_probs(prompt, answer.tokens), atol=1e-4)
    assert len({tuple(answer.tokens) for answer in answers}) == 3


def test_temperature_0_gives_the_most_likely_tokens():
    prompt = [4, 5, 6]
    tokens = generate(weights(), CONFIG, [prompt], 0, SamplingParams(max_tokens=6, temperature=0.0))[0].tokens
    logits = transformer.apply(weights(), CONFIG, jnp.array([prompt + tokens]))[0, 2:-1]
    assert tokens == np.argmax(logits, axis=-1).tolist()


@pytest.mark.system
def test_stop_token_ends_only_its_own_answer():
    whole = generate(weights(), CONFIG, [[1], [2]], 3, SamplingParams(max_tokens=12))
    stop = whole[0].tokens[4]
    first, second = generate(weights(), CONFIG, [[1], [2]], 3, SamplingParams(max_tokens=12, stop_tokens=(39, stop)))
    end = whole[0].tokens.index(stop) + 1
    assert (first.tokens, first.log_probs) == (whole[0].tokens[:end], whole[0].log_probs[:end])
    assert first.finish_reason == "stop"
    # The second answer is the same as without stop tokens, up to its own end.
    assert second.tokens == whole[1].tokens[: len(second.tokens)]
    assert generate(weights(), CONFIG, [[1]], 3, SamplingParams(max_tokens=1))[0].tokens == whole[0].tokens[:1]


@pytest.mark.system
def test_answers_without_max_tokens_end_at_the_maximum_length():
    assert generate(weights(), CONFIG, [], 0, SamplingParams()) == []
    answers = generate(weights(), CONFIG, [[1] * 60, [2] * 58], 0, SamplingParams())
    assert [len(answer.tokens) for answer in answers] == [4, 6]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "prompt is empty"),
        ([1, 40], 1, "has the token 40, but the model's token ids are 0 to 39"),
        ([-1], 1, "has the token -1"),
        ([1] * 60, 5, "has 60 tokens and max_tokens is 5. Together, at most 64"),
    ],
)
def test_invalid_prompts_are_refused(prompt, max_tokens, message):
    with pytest.raises(UsageError, match=message):
        generate(weights(), CONFIG, [[1], prompt], 0, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(
    "fields", [dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_p=0.0), dict(top_p=1.1), dict(top_k=-1),
               dict(max_tokens=0), dict(stop_tokens=(-1,)), dict(stop_tokens=(2**31,))]
)  # fmt: skip
def test_error_names_the_invalid_sampling_option(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        SamplingParams(**fields)
