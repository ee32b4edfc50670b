"""Chats as tokens for a trainer: only what a model writes is trained on."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletionMessage

from rlframe.errors import UsageError
from rlframe.language.environments import tokenize_for_trainer
from rlframe.language.model.tokenizers import ByteTokenizer, load_tokenizer
from tests.language import published

CHAT = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "one, “eins”"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "中 two"},
]
END = "<|im_end|>"
# Templates whose turns of the assistant are CHAT's, and what is around a content.
TEMPLATES = {
    "ChatML": published.CHATML,
    "without a line behind": published.CHATML.replace("<|im_end|>\n", "<|im_end|>"),
    "several marks": published.CHATML.replace("<|im_end|>\n", " <|im_end|>\n\n<|im_end|>\n"),
    "empty thought": published.CHATML.replace(
        "message.content", "('<think>\n\n</think>\n\n' if message.role == 'assistant' else '') + message.content"
    ),
}


@pytest.fixture(params=TEMPLATES, scope="module")
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(published.byte_level(folder, chat_template=TEMPLATES[request.param]))


def trained(tokenizer, chat, **options):
    """(text of the trained tokens, whether tokens end with them); the masks fit the tokens."""
    found = tokenize_for_trainer(tokenizer, chat, **options)
    tokens, masks = found["tokens"], found["masks"]
    assert all(mask in (-100, token) for token, mask in zip(tokens, masks)) and len(tokens) == len(masks)
    assert tokens == list(tokenizer.apply_chat_template(chat))[: len(tokens)]
    return tokenizer.decode([mask for mask in masks if mask != -100]), masks[-1] != -100


def test_an_answer_that_was_cut_off_ends_with_its_content(tokenizer):
    assert trained(tokenizer, CHAT, finish_reason="length") == ("中 two", True)
    every = trained(tokenizer, CHAT, finish_reason="length", train_on_all_assistant_turns=True)
    assert every == (f"one, “eins”{END}中 two", True)


@pytest.mark.parametrize("reason", ["", "stop"])
def test_of_the_template_only_the_end_of_the_turn_is_trained_on(tokenizer, reason):
    text, _ = trained(tokenizer, CHAT, finish_reason=reason)
    assert text == f"中 two{END}"
    text, _ = trained(tokenizer, CHAT, finish_reason=reason, train_on_all_assistant_turns=True)
    assert text == f"one, “eins”{END}中 two{END}"


@pytest.mark.parametrize("content", ["a", "b", "ab", "ba", "a\n", "<think>why</think>so", "c "])
def test_the_content_may_be_anything(tokenizer, content):
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    assert trained(tokenizer, chat, finish_reason="length")[0] == content
    assert trained(tokenizer, chat)[0] == content + END


def test_an_empty_answer_has_only_its_end(tmp_path):
    tokenizer, chat = load_tokenizer(published.byte_level(tmp_path)), [CHAT[0], {"role": "assistant", "content": ""}]
    assert trained(tokenizer, chat)[0] == END
    assert trained(tokenizer, chat, finish_reason="length")[0] == ""


def test_a_content_that_is_no_text_is_trained_on_up_to_the_end_of_its_turn(tmp_path):
    template = published.CHATML.replace("message.content", "(message.content or '') + (message.tool_calls | tojson)")
    tokenizer = load_tokenizer(published.byte_level(tmp_path, chat_template=template))
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert trained(tokenizer, chat)[0] == json.dumps(calls) + END
    assert trained(tokenizer, chat, finish_reason="length") == (json.dumps(calls), True)


def test_the_byte_tokenizer_s_turns_are_trained_on_with_their_end():
    tokenizer = ByteTokenizer()
    assert trained(tokenizer, CHAT) == ("中 two<|eos|>", True)
    assert trained(tokenizer, CHAT, finish_reason="length") == ("中 two", True)


def test_an_end_of_turn_that_the_tokenizer_does_not_name_is_trained_on(tmp_path):
    tokenizer = load_tokenizer(published.byte_level(tmp_path, eos_token=None))
    assert trained(tokenizer, CHAT)[0] == f"中 two{END}\n"
    assert trained(tokenizer, CHAT, finish_reason="length")[0] == "中 two"


def test_messages_of_the_openai_package_are_turns(tokenizer):
    chat = [CHAT[0], ChatCompletionMessage(role="assistant", content="one", tool_calls=None)]
    found = tokenize_for_trainer(tokenizer, chat, include_messages=True)
    assert found["messages"] == [CHAT[0], {"role": "assistant", "content": "one"}]
    assert found["tokens"] == tokenizer.apply_chat_template(found["messages"]) == tokenizer.apply_chat_template(chat)
    with pytest.raises(
        UsageError, match=r"messages\[1\] must be a dict .* or a message of the openai package.*got str"
    ):
        tokenize_for_trainer(tokenizer, [CHAT[0], "one"])
    with pytest.raises(UsageError, match=r"messages\[0\] has no role: it has content"):
        tokenizer.apply_chat_template([{"content": "one"}])
