"""Test requests of the `openai` package to a policy server."""

from __future__ import annotations

import json
import tracemalloc

import httpx
import numpy as np
import openai
import pytest

from rlframe.language import SamplingParams, generate
from rlframe.language.model import transformer
from rlframe.language.model.tokenizers import ByteTokenizer
from tests.language.server.serving import DEADLINE, TINY, params_of

TOKENIZER = ByteTokenizer()
PROMPT = [1, 2, 3]


def greedy(prompt, count):
    (found,) = generate(params_of(0), TINY, [prompt], 0, SamplingParams(max_tokens=count, temperature=0.0))
    return found


def ask(client, **options):
    return client.completions.create(**{"model": "policy", "prompt": PROMPT, "max_tokens": 8, **options})


def with_ids(**options):
    return {"logprobs": 1, "extra_body": {"return_token_ids": True, "ignore_eos": True}, **options}


@pytest.mark.system
def test_greedy_completion_equals_the_answer_of_generate(client):
    answer = ask(client, temperature=0, **with_ids())
    (choice,) = answer.choices
    expected = greedy(PROMPT, 8)
    assert choice.token_ids == expected.tokens and choice.prompt_token_ids == PROMPT
    assert choice.logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=1e-4)
    assert choice.text == TOKENIZER.decode(expected.tokens, skip_special_tokens=True)
    assert (choice.finish_reason, answer.policy_version, answer.model) == ("length", 0, "policy")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 8, 11)


def test_log_probs_of_an_answer_equal_those_of_a_learner(client):
    (choice,) = ask(client, seed=5, **with_ids()).choices
    computed = transformer.token_log_probs(params_of(0), TINY, np.array([PROMPT + choice.token_ids]))
    assert choice.logprobs.token_logprobs == pytest.approx(computed[0, len(PROMPT) - 1 :].tolist(), abs=1e-4)


def test_tokens_in_logprobs_are_named_by_text_or_id(client):
    (choice,) = ask(client, seed=5, max_tokens=40, **with_ids()).choices
    ids, found = choice.token_ids, choice.logprobs
    assert found.tokens == [name_of(token, "bytes:") for token in ids]
    # An offset is the position of the character that contains the token's first byte.
    ends = [len(TOKENIZER.decode(ids[: i + 1], skip_special_tokens=True)) for i in range(len(ids))]
    positions = zip(ids, ends, found.text_offset)
    assert all(at == end - 1 for token, end, at in positions if token < 256)  # special tokens have no text
    as_ids = with_ids(extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True})
    (again,) = ask(client, seed=5, max_tokens=40, **as_ids).choices
    assert again.logprobs.tokens == [f"token_id:{token}" for token in ids]


def name_of(token, partial):
    """Return the expected name of a token in `logprobs`. `partial` is the prefix of a name of escaped bytes."""
    content = TOKENIZER.token_bytes(token)
    return content.decode() if token < 128 or token > 255 else f"{partial}\\x{token:02x}"


@pytest.mark.system
def test_parts_of_characters_have_different_names_and_bytes(client):
    options = {"model": "policy", "messages": [{"role": "user", "content": "“中”"}], "max_tokens": 60, "seed": 4}
    (choice,) = client.chat.completions.create(**options, logprobs=True, top_logprobs=20, **as_sampled()).choices
    entries = choice.logprobs.content
    assert [bytes(entry.bytes) for entry in entries] == [TOKENIZER.token_bytes(token) for token in choice.token_ids]
    assert [entry.token for entry in entries] == [name_of(token, "") for token in choice.token_ids]
    text = b"".join(bytes(entry.bytes) for entry in entries if len(entry.bytes) == 1)  # special tokens have no text
    assert text.decode(errors="replace") == choice.message.content and "\ufffd" in choice.message.content
    assert all(len({one.token for one in entry.top_logprobs}) == 20 for entry in entries)
    (completion,) = ask(client, seed=5, max_tokens=40, logprobs=20).choices
    assert all(len(position) >= 20 for position in completion.logprobs.top_logprobs)


def as_sampled():
    return {"extra_body": {"return_token_ids": True, "ignore_eos": True}}


def test_prompt_can_be_a_text_or_token_ids_or_a_list_of_these(client):
    text, tokens = "ab", [97, 98]
    answers = [
        [choice.text for choice in ask(client, prompt=prompt, temperature=0, max_tokens=4).choices]
        for prompt in (text, tokens, [text, text], [tokens, tokens])
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 1
    assert answers[2] == answers[3] == answers[0] * 2


def test_n_answers_differ_and_are_in_order(client):
    answer = ask(client, prompt=[[1, 2], [3, 4]], n=3, seed=1, **with_ids())
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.prompt_token_ids for choice in answer.choices] == [[1, 2]] * 3 + [[3, 4]] * 3
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 6
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_same_seed_gives_the_same_answers(client):
    def tokens(**options):
        return [choice.token_ids for choice in ask(client, n=2, **with_ids(**options)).choices]

    assert tokens(seed=3) == tokens(seed=3) != tokens(seed=4)
    assert tokens() != tokens()


def test_stop_string_is_in_the_tokens_but_not_in_the_text(client):
    (whole,) = ask(client, seed=11, max_tokens=32, **with_ids()).choices
    middle = next(at for at in range(4, 30) if all(33 <= token < 127 for token in whole.token_ids[at : at + 2]))
    stop = TOKENIZER.decode(whole.token_ids[middle : middle + 2])
    assert stop not in TOKENIZER.decode(whole.token_ids[: middle + 1])
    for streams in (False, True):
        answer = ask(client, seed=11, max_tokens=32, stop=["never texts", stop], stream=streams, **with_ids())
        choices = [event.choices[0] for event in answer] if streams else answer.choices
        text = "".join(choice.text for choice in choices)
        assert text == TOKENIZER.decode(whole.token_ids[:middle], skip_special_tokens=True)
        assert [token for choice in choices for token in choice.token_ids] == whole.token_ids[: middle + 2]
        assert sum(len(choice.logprobs.token_logprobs) for choice in choices) == middle + 2
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)


def test_stop_token_is_in_the_tokens_but_not_in_the_text(client):
    (whole,) = ask(client, seed=11, max_tokens=32, **with_ids()).choices
    stop = whole.token_ids[5]
    body = {"return_token_ids": True, "ignore_eos": True, "stop_token_ids": [stop]}
    (choice,) = ask(client, seed=11, max_tokens=32, extra_body=body).choices
    position = whole.token_ids.index(stop)
    assert choice.token_ids == whole.token_ids[: position + 1]
    assert choice.text == TOKENIZER.decode(whole.token_ids[:position], skip_special_tokens=True)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_echo_returns_the_prompt_before_the_answer(client):
    plain, echoed = (ask(client, prompt="ab", temperature=0, echo=echo).choices[0].text for echo in (False, True))
    assert echoed == "ab" + plain


def test_stream_equals_the_complete_answer(client):
    (whole,) = ask(client, seed=2, max_tokens=24, **with_ids()).choices
    events = list(ask(client, seed=2, max_tokens=24, stream=True, stream_options={"include_usage": True}, **with_ids()))
    *pieces, usage = events
    choices = [event.choices[0] for event in pieces]
    assert len(choices) > 4, "the answer is not streamed"
    assert "".join(choice.text for choice in choices) == whole.text
    assert [token for choice in choices for token in choice.token_ids] == whole.token_ids
    assert choices[0].prompt_token_ids == PROMPT and not hasattr(choices[1], "prompt_token_ids")
    log_probs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    assert log_probs == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)
    offsets = [value for choice in choices for value in choice.logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert usage.choices == [] and usage.usage.completion_tokens == 24
    assert {event.policy_version for event in events} == {0} and len({event.id for event in events}) == 1


def test_stream_contains_all_n_answers(client):
    whole = ask(client, seed=2, n=3, **with_ids()).choices
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in ask(client, seed=2, n=3, stream=True, **with_ids()):
        found[event.choices[0].index] += event.choices[0].token_ids
    assert list(found.values()) == [choice.token_ids for choice in whole]


@pytest.mark.parametrize("stop", [None, ["never texts"]], ids=["plain", "stops"])
def test_streamed_text_of_each_answer_is_complete(client, stop):
    messages = [{"role": "user", "content": "Привет, 世界 👩‍👩‍👧‍👦"}]
    options = {"n": 3, "seed": 8, "max_tokens": 60, "stop": stop, "extra_body": {"ignore_eos": True}}
    whole = [choice.text for choice in ask(client, **options).choices]
    chats = client.chat.completions.create(model="policy", messages=messages, **options).choices
    texts = dict.fromkeys(range(3), "")
    for event in ask(client, **options, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert [*texts.values()] == whole and all("\ufffd" in text for text in whole)
    texts = dict.fromkeys(range(3), "")
    for event in client.chat.completions.create(model="policy", messages=messages, **options, stream=True):
        texts[event.choices[0].index] += event.choices[0].delta.content
    assert [*texts.values()] == [choice.message.content for choice in chats]


def test_unicode_line_ends_are_escaped_in_events(server):
    body = {"model": "policy", "prompt": "a\u2028b\x85c\u2029", "max_tokens": 1, "echo": True, "stream": True}
    with httpx.stream("POST", f"{server.url()}/completions", json=body, timeout=DEADLINE) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert json.loads(events[0])["choices"][0]["text"].startswith(body["prompt"]) and events[-1] == "[DONE]"


def test_chat_prompt_is_made_by_the_template(client):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    plain = [messages[0], {"role": "user", "content": "hi"}]
    prompt = TOKENIZER.apply_chat_template(plain, add_generation_prompt=True)
    options = {"model": "policy", "messages": messages, "temperature": 0, "max_completion_tokens": 6}
    body = {"return_token_ids": True, "ignore_eos": True}
    answer = client.chat.completions.create(**options, logprobs=True, extra_body=body)
    (choice,) = answer.choices
    expected = greedy(prompt, 6)
    assert choice.token_ids == expected.tokens and answer.prompt_token_ids == prompt
    assert choice.message.role == "assistant"
    assert choice.message.content == TOKENIZER.decode(expected.tokens, skip_special_tokens=True)
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(expected.log_probs, abs=1e-4)
    assert [one.token for one in choice.logprobs.content] == [name_of(token, "") for token in expected.tokens]
    assert (answer.object, answer.usage.prompt_tokens, answer.policy_version) == ("chat.completion", len(prompt), 0)
    # The client sends the answer back as a turn of the next request.
    turns = [*messages, choice.message, plain[1]]
    again = client.chat.completions.create(**{**options, "messages": turns})
    assert again.usage.prompt_tokens > len(prompt) + 6

    events = list(client.chat.completions.create(**options, stream=True, extra_body=body))
    assert "".join(event.choices[0].delta.content or "" for event in events) == choice.message.content
    assert events[0].choices[0].delta.role == "assistant" and events[0].object == "chat.completion.chunk"
    assert events[-1].choices[0].finish_reason == "length"


def test_model_is_listed(client):
    assert [one.id for one in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").max_model_len == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [1] * 512}, "The prompt has 512 tokens and max_tokens is 8. Together, at most 512"),
        ({"prompt": [5, 9999]}, "The prompt has the token 9999, but the model's token ids are 0 to 263"),
        ({"prompt": []}, "prompt must be a text, a list of texts"),
        ({"prompt": ["a", 1]}, "prompt must be a text, a list of texts"),
        ({"prompt": ""}, "The prompt is empty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"n": 65}, "The request has 65 answers, but at most 64 are allowed"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs is not supported with stream"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"best_of": 4}, "best_of is not supported"),
        ({"stop": [""]}, "stop may have at most 16 strings, and none may be empty"),
        ({"extra_body": {"temprature": 1}}, "There is no option 'temprature'. Did you mean 'temperature'?"),
        ({"extra_body": {"stop_token_ids": list(range(20))}}, "stop_tokens; EngineConfig.max_stop_tokens is 8"),
        ({"extra_body": {"stop_token_ids": [10**20]}}, "stop_tokens must be token ids"),
    ],
    ids=str,
)
def test_invalid_requests_are_refused_with_a_message(client, options, message):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **options)
    assert message in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"best_of": 4}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, None),
    ],
    ids=str,
)
def test_error_names_the_field(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **options)
    assert caught.value.param == param


def test_too_many_answers_are_refused_with_little_memory(client):
    tracemalloc.start()
    try:
        with pytest.raises(openai.BadRequestError, match="The request has 100000 answers"):
            ask(client, n=100_000)
        # Measure the memory of this process, because the server runs in a thread of it. The limit is 10 MiB.
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_unsupported_fields_without_effect_are_accepted(client):
    assert ask(client, frequency_penalty=0, best_of=1, user="me", logit_bias={}, suffix=None).choices
    assert ask(client, extra_body={"top_k": 10**20}).choices


def test_invalid_chats_are_refused(client):
    def chat(**options):
        messages = [{"role": "user", "content": "hi"}]
        return client.chat.completions.create(**{"model": "policy", "messages": messages, **options})

    with pytest.raises(openai.BadRequestError, match="The role must be one of system, user"):
        chat(messages=[{"role": "wizard", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        chat(top_logprobs=3)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    text = {"type": "text", "text": "what is it?"}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(messages=[{"role": "user", "content": [text, image]}])
    assert caught.value.body["message"] == (
        "messages[0].content[1] has the type 'image_url', but this model reads only text, so a part must be "
        '{"type": "text", "text": "..."}.'
    )
    assert caught.value.param == "messages[0].content[1]"
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content must be a text or a list of text parts"):
        chat(messages=[{"role": "user", "content": 7}])
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        chat(tools=[{"type": "function", "function": {"name": "f"}}])


def test_tool_calls_are_refused_by_name(client):
    question, calls = {"role": "user", "content": "2 + 2?"}, [{"id": "x", "type": "function", "function": FUNCTION}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "x", "content": "4"}

    def refusal(*messages, **options):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="policy", messages=messages, max_tokens=2, **options)
        return caught.value.param

    assert refusal(question, called, result) == "messages[1].tool_calls"
    assert refusal(question, {**called, "content": "", "tool_calls": calls}) == "messages[1].tool_calls"
    assert refusal(question, {"role": "assistant", "content": None, "function_call": FUNCTION}) == (
        "messages[1].function_call"
    )
    assert refusal(question, {"role": "assistant", "content": None}) == "messages[1].content"
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert refusal(question, tools=[tool], tool_choice="auto", parallel_tool_calls=True) == "tools"
    # A message with the result of a tool is accepted.
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "!", "annotations": None}]
    for content, text in (("4", "4"), (parts, "4!"), ([], "")):
        texts = [question, {"role": "assistant", "content": "add(2, 2)"}, {**result, "content": content}]
        options = {"model": "policy", "messages": texts, "max_tokens": 2, "parallel_tool_calls": False}
        answer = client.chat.completions.create(**options, extra_body={"return_token_ids": True})
        assert answer.prompt_token_ids == TOKENIZER.apply_chat_template(texts, add_generation_prompt=True)
        assert TOKENIZER.decode(answer.prompt_token_ids).endswith(f"<|tool|>{text}<|eos|><|assistant|>")
    cached = [{"type": "text", "text": "4", "cache_control": {"type": "ephemeral"}}]
    assert refusal(question, {**result, "content": cached}) == "messages[1].content[0].cache_control"


FUNCTION = {"name": "add", "arguments": '{"a": 2, "b": 2}'}


def test_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt'. This server has 'policy'") as caught:
        ask(client, model="gpt")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.embeddings.create(model="policy", input="x")
