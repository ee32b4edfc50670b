"""Test `/generate` in the formats of vLLM and SGLang. The request bodies are written out in full."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from rlframe.language import SamplingParams, generate
from rlframe.language.model import transformer
from rlframe.language.model.tokenizers import ByteTokenizer
from tests.language.server.serving import DEADLINE, TINY, params_of

TOKENIZER = ByteTokenizer()
PROMPT = [1, 2, 3]


def post(server, body):
    return httpx.post(server.url().removesuffix("/v1") + "/generate", json=body, timeout=DEADLINE)


def ask(server, body):
    response = post(server, body)
    assert response.status_code == 200, response.text
    return response.json()


def greedy(count):
    (found,) = generate(params_of(0), TINY, [PROMPT], 0, SamplingParams(max_tokens=count, temperature=0.0))
    return found


def check_log_probs(tokens, log_probs):
    computed = transformer.token_log_probs(params_of(0), TINY, np.array([PROMPT + tokens]))
    assert log_probs == pytest.approx(computed[0, len(PROMPT) - 1 :].tolist(), abs=1e-4)


@pytest.mark.system
def test_request_in_the_vllm_format_gets_a_response_in_this_format(server):
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "max_tokens": 6, "temperature": 0.0, "top_p": 1.0}
    answer = ask(server, {**body, "n": 2, "ignore_eos": True})
    expected = greedy(6).tokens
    assert answer["token_ids"] == [expected] * 2 and answer["prompt_token_ids"] == PROMPT
    assert answer["finish_reasons"] == ["length"] * 2
    assert answer["text"] == [TOKENIZER.decode(expected, skip_special_tokens=True)] * 2
    for listed in answer["logprobs"]:
        assert [list(entry[0]) for entry in listed] == [[str(token)] for token in expected]
        check_log_probs(expected, [entry[0][str(token)] for entry, token in zip(listed, expected)])
    assert answer["policy_versions"] == [[0] * 6] * 2


@pytest.mark.system
def test_request_in_the_sglang_format_gets_a_response_in_this_format(server):
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "return_logprob": True, "return_text_in_logprobs": False}
    answer = ask(server, {**body, "sampling_params": params})
    expected, info = greedy(6).tokens, answer["meta_info"]
    assert answer["output_ids"] == expected == [token for _, token, _ in info["output_token_logprobs"]]
    check_log_probs(expected, [log_prob for log_prob, _, _ in info["output_token_logprobs"]])
    assert {text for _, _, text in info["output_token_logprobs"]} == {None}
    assert info["finish_reason"] == {"type": "length", "length": 6}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (3, 6)
    assert answer["text"] == TOKENIZER.decode(expected, skip_special_tokens=True)


def test_sglang_response_with_several_answers_is_a_list(server):
    params = {"max_new_tokens": 4, "n": 3, "ignore_eos": True}
    answers = ask(server, {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    answers = ask(server, {"input_ids": [PROMPT, [7]], "sampling_params": {"max_new_tokens": 1}})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 1]
    assert ask(server, {"text": "a", "sampling_params": {"max_new_tokens": 1}})["meta_info"]["prompt_tokens"] == 1


def test_response_contains_the_stop_reason(server):
    stop = greedy(6).tokens[2]
    options = {"temperature": 0, "stop_token_ids": [stop], "ignore_eos": True}
    end = greedy(6).tokens.index(stop) + 1
    answer = ask(server, {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, **options}})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == greedy(6).tokens[:end]
    answer = ask(server, {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 6, "logprobs": 0, **options})
    assert answer["finish_reasons"] == ["stop"] and answer["token_ids"] == [greedy(6).tokens[:end]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "presence_penalty": 1}, "presence_penalty is not supported"),
        ({"prompt": "a", "temprature": 1}, "no option 'temprature'. Did you mean 'temperature'"),
        ({"prompt": {"prompt_token_ids": [9999]}}, "The prompt has the token 9999"),
        ({"input_ids": [1], "sampling_params": {"max_new_token": 1}}, "'max_new_token'. Did you mean 'max_new_tokens'"),
        ({"input_ids": [1], "sampling_params": {"min_p": 0.5}}, "min_p is not supported"),
        ({"sampling_params": {}}, "either text or input_ids"),
        ({"input_ids": [1], "stream": True}, "stream"),
    ],
)
def test_invalid_requests_are_refused_with_a_message(server, body, message):
    response = post(server, body)
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


def test_unsupported_fields_without_effect_are_accepted(server):
    neutral = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "best_of": 1, "min_p": 0.0, "top_k": -1}
    assert ask(server, {"prompt": "a", "max_tokens": 1, "stream": False, "detokenize": True, **neutral})["text"]
    params = {"max_new_tokens": 1, "min_new_tokens": 0, "no_stop_trim": False, **neutral}
    body = {"input_ids": [1], "sampling_params": params, "stream": False, "logprob_start_len": -1}
    assert ask(server, {**body, "top_logprobs_num": 0})["output_ids"]
