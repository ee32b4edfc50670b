"""Compare the log-probabilities of top tokens and of prompts with the model's forward pass."""

from __future__ import annotations

import httpx
import jax
import numpy as np
import openai
import pytest

from rlframe.language.model import transformer
from rlframe.language.model.tokenizers import ByteTokenizer
from tests.language.server.serving import DEADLINE, TINY, params_of

PROMPT = [72, 101, 108, 108, 111]
AS_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}


def forward(tokens):
    """Run the model. Return the log-probabilities `[T, V]` of the next token at each position."""
    logits = jax.jit(transformer.apply, static_argnums=1)(params_of(0), TINY, np.array([tokens]))
    return np.asarray(jax.nn.log_softmax(logits[0], axis=-1))


def top_log_probs(row, count):
    return sorted(row, reverse=True)[:count]


def ask(client, **options):
    body = {**AS_IDS, **options.pop("extra_body", {})}
    defaults = {"model": "policy", "prompt": PROMPT, "max_tokens": 6, "seed": 3, "extra_body": body}
    (choice,) = client.completions.create(**{**defaults, **options}).choices
    return choice


def test_top_logprobs_equal_the_values_of_the_forward_pass(client):
    choice = ask(client, logprobs=4)
    rows = forward(PROMPT + choice.token_ids)[len(PROMPT) - 1 :]
    assert choice.logprobs.token_logprobs == pytest.approx([row[i] for row, i in zip(rows, choice.token_ids)], abs=1e-4)
    for token, row, top in zip(choice.token_ids, rows, choice.logprobs.top_logprobs):
        assert len(top) in (4, 5) and f"token_id:{token}" in top
        assert sorted(top.values(), reverse=True)[:4] == pytest.approx(top_log_probs(row, 4), abs=1e-4)
        for name, value in top.items():
            assert value == pytest.approx(row[int(name.removeprefix("token_id:"))], abs=1e-4)


def test_streamed_and_complete_top_logprobs_are_equal(client):
    body = {**AS_IDS}
    options = {"model": "policy", "prompt": PROMPT, "max_tokens": 6, "seed": 3, "logprobs": 3, "extra_body": body}
    events = [event.choices[0].logprobs for event in client.completions.create(**options, stream=True)]
    whole = ask(client, logprobs=3).logprobs
    assert [token for event in events for token in event.tokens] == whole.tokens
    streamed = [top for event in events for top in event.top_logprobs]
    assert [list(top) for top in streamed] == [list(top) for top in whole.top_logprobs]


def test_echo_returns_log_probs_of_the_prompt(client):
    choice = ask(client, logprobs=2, echo=True)
    tokens = PROMPT + choice.token_ids
    rows, found = forward(tokens), choice.logprobs
    assert found.tokens == [f"token_id:{token}" for token in tokens]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([row[i] for row, i in zip(rows, tokens[1:])], abs=1e-4)
    for row, top in zip(rows, found.top_logprobs[1:]):
        assert sorted(top.values(), reverse=True)[:2] == pytest.approx(top_log_probs(row, 2), abs=1e-4)
    assert found.text_offset[: len(PROMPT) + 1] == [0, 1, 2, 3, 4, 5]
    plain = ask(client, logprobs=1, echo=True).logprobs
    assert plain.top_logprobs is None and plain.token_logprobs[1:] == pytest.approx(found.token_logprobs[1:], abs=1e-4)


def test_text_offsets_of_a_prompt_are_positions_in_its_text(client):
    for prompt, positions in (
        ("<|user|>é中<|eos|>a", [0, 8, 8, 9, 9, 9, 10, 17]),
        ([260, 0xC3, 0xA9, 97], [0, 0, 0, 1]),
    ):
        choice = ask(client, prompt=prompt, logprobs=1, echo=True, max_tokens=3)
        count = len(positions)
        assert choice.logprobs.text_offset[: count + 1] == [*positions, len(prompt) if isinstance(prompt, str) else 2]
        text = prompt if isinstance(prompt, str) else "éa"
        assert choice.text == text + ByteTokenizer().decode(choice.token_ids, skip_special_tokens=True)


LONG = pytest.param([(7 * i) % 256 for i in range(512)], marks=pytest.mark.system)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("prompt", [PROMPT, [7], LONG], ids=len)
def test_max_tokens_0_with_echo_scores_the_prompt(client, prompt, stream):
    options = {"model": "policy", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2, "stream": stream}
    answer = client.completions.create(**options, extra_body=AS_IDS)
    answer = next(iter(answer)) if stream else answer
    (choice,), rows = answer.choices, forward(prompt)
    assert (choice.text, choice.token_ids) == (ByteTokenizer().decode(prompt), [])
    assert (choice.finish_reason, choice.policy_version, answer.policy_version) == ("length", 0, 0)
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in prompt]
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    expected = [row[token] for row, token in zip(rows, prompt[1:])]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert len(choice.logprobs.text_offset) == len(choice.logprobs.top_logprobs) == len(prompt)


def test_max_tokens_0_needs_prompt_scores(client, server):
    texts = ["ab", "cd"]
    answer = client.completions.create(
        model="policy", prompt=texts, max_tokens=0, echo=True, n=2, stop=["a"], logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert answer.usage.completion_tokens == 0 and answer.usage.total_tokens == answer.usage.prompt_tokens
    assert all(len(choice.logprobs.token_logprobs) == 2 for choice in answer.choices)
    plain = client.completions.create(model="policy", prompt="ab", max_tokens=0, echo=True).choices[0]
    assert (plain.text, plain.logprobs, plain.finish_reason) == ("ab", None, "length")
    messages, body = [{"role": "user", "content": "hi"}], {**AS_IDS, "prompt_logprobs": 0}
    chat = client.chat.completions.create(model="policy", messages=messages, max_tokens=0, extra_body=body)
    check_prompt(chat.prompt_logprobs, chat.prompt_token_ids, 0)
    assert chat.choices[0].message.content == "" and chat.policy_version == 0
    url = server.url().removesuffix("/v1") + "/generate"
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "prompt_logprobs": 0, "max_tokens": 0}
    vllm = httpx.post(url, json=body, timeout=DEADLINE).json()
    assert vllm["token_ids"] == [[]] and len(vllm["prompt_logprobs"]) == len(PROMPT)
    for invalid in ({}, {"logprobs": 1}, {"echo": True, "max_tokens": -1}):
        with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1, got"):
            client.completions.create(**{"model": "policy", "prompt": "ab", "max_tokens": 0, **invalid})


def check_prompt(positions, prompt, count):
    rows = forward(prompt)
    assert positions[0] is None and len(positions) == len(prompt)
    for token, row, position in zip(prompt[1:], rows, positions[1:]):
        assert next(iter(position)) == str(token) and len(position) in (count, count + 1)
        for name, entry in position.items():
            assert entry["logprob"] == pytest.approx(row[int(name)], abs=1e-4)
            assert entry["rank"] == 1 + (row > row[int(name)]).sum()
        assert position[str(token)]["decoded_token"] == ByteTokenizer().decode([token], skip_special_tokens=False)


def test_prompt_logprobs_equal_the_values_of_the_forward_pass(client):
    check_prompt(ask(client, extra_body={"prompt_logprobs": 3}).prompt_logprobs, PROMPT, 3)
    check_prompt(ask(client, extra_body={"prompt_logprobs": 0}).prompt_logprobs, PROMPT, 0)
    long = [(7 * i) % 256 for i in range(150)]
    check_prompt(ask(client, prompt=long, extra_body={"prompt_logprobs": 2}).prompt_logprobs, long, 2)


def test_chat_has_top_logprobs_and_prompt_logprobs(client):
    messages = [{"role": "user", "content": "hi"}]
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 4, "extra_body": {**AS_IDS, "prompt_logprobs": 1}}
    answer = client.chat.completions.create(model="policy", messages=messages, **options)
    (choice,) = answer.choices
    check_prompt(answer.prompt_logprobs, answer.prompt_token_ids, 1)
    rows = forward(answer.prompt_token_ids + choice.token_ids)[len(answer.prompt_token_ids) - 1 :]
    for token, row, entry in zip(choice.token_ids, rows, choice.logprobs.content):
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(top_log_probs(row, 2), abs=1e-4)


@pytest.mark.system
def test_vllm_format_has_top_logprobs_and_prompt_logprobs(server):
    url = server.url().removesuffix("/v1") + "/generate"
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 2, "prompt_logprobs": 2, "max_tokens": 3}
    answer = httpx.post(url, json=body, timeout=DEADLINE).json()
    (tokens,) = answer["token_ids"]
    rows = forward(PROMPT + tokens)
    assert answer["prompt_logprobs"][0] is None
    positions = [*answer["prompt_logprobs"][1:], *(position for (position,) in answer["logprobs"][0])]
    for token, row, position in zip((PROMPT + tokens)[1:], rows, positions):
        assert next(iter(position)) == str(token)
        assert sorted(position.values(), reverse=True)[:2] == pytest.approx(top_log_probs(row, 2), abs=1e-4)
