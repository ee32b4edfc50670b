"""Test that a chat is converted to tokens and masks, and that only tokens of the model are trained on."""

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
# These templates do not change the contents of messages. They differ in the tokens around the contents.
TEMPLATES = {
    "ChatML": published.CHATML,
    "no line end after a turn": published.CHATML.replace("<|im_end|>\n", "<|im_end|>"),
    "two end tokens": published.CHATML.replace("<|im_end|>\n", " <|im_end|>\n\n<|im_end|>\n"),
    "empty thought": published.CHATML.replace(
        "message.content", "('<think>\n\n</think>\n\n' if message.role == 'assistant' else '') + message.content"
    ),
    "Qwen3": published.CHATML.replace(
        "message.content",
        "('<think>' + (message.content.split('</think>')[0].split('<think>')[1] if '</think>' in message.content "
        "else '\n\n') + '</think>' if message.role == 'assistant' and loop.last else '') "
        "+ message.content.split('</think>')[-1]",
    ),
    "Mistral": "{% for message in messages %}{{ '[INST]' + message.content + '[/INST]' if message.role == 'user' else "
    "message.content + '<|im_end|>' }}{% endfor %}",
}
# These templates strip white space around the contents of messages.
STRIPPING = {
    "Llama 3": published.CHATML.replace("role + '\n'", "role + '\n\n'")
    .replace("assistant\n", "assistant\n\n")
    .replace("content + '<|im_end|>\n'", "content | trim + '<|im_end|>'"),
    "Gemma": published.CHATML.replace("message.role", "message.role | replace('assistant', 'model')")
    .replace("message.content", "message.content | trim")
    .replace("start|>assistant", "start|>model"),
}


@pytest.fixture(params=TEMPLATES, scope="module")
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(published.byte_level(folder, chat_template=TEMPLATES[request.param]))


def trained(tokenizer, chat, **options):
    """Convert a chat, and check its masks. Return (text of the trained tokens, True if the last token is one)."""
    found = tokenize_for_trainer(tokenizer, chat, **options)
    tokens, masks = found["tokens"], found["masks"]
    assert all(mask in (-100, token) for token, mask in zip(tokens, masks)) and len(tokens) == len(masks)
    assert tokens == list(tokenizer.apply_chat_template(chat))[: len(tokens)]
    return tokenizer.decode([mask for mask in masks if mask != -100]), masks[-1] != -100


def test_cut_off_answer_ends_with_its_content(tokenizer):
    assert trained(tokenizer, CHAT, finish_reason="length") == ("中 two", True)
    every = trained(tokenizer, CHAT, finish_reason="length", train_on_all_assistant_turns=True)
    assert every == (f"one, “eins”{END}中 two", True)


@pytest.mark.parametrize("reason", ["", "stop"])
def test_content_and_end_of_the_turn_are_trained_on(tokenizer, reason):
    text, _ = trained(tokenizer, CHAT, finish_reason=reason)
    assert text == f"中 two{END}"
    text, _ = trained(tokenizer, CHAT, finish_reason=reason, train_on_all_assistant_turns=True)
    assert text == f"one, “eins”{END}中 two{END}"


@pytest.mark.parametrize("content", ["a", "b", "ab", "ba", "a\n", "<think>why</think>so", "c "])
def test_mask_includes_the_exact_content(tokenizer, content):
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    assert trained(tokenizer, chat, finish_reason="length")[0] == content
    assert trained(tokenizer, chat)[0] == content + END


def test_mask_excludes_thoughts_that_the_template_removes(tmp_path):
    tokenizer = load_tokenizer(published.byte_level(tmp_path, chat_template=TEMPLATES["Qwen3"]))
    answers = [{"role": "assistant", "content": content} for content in ("<think>a</think>b", "c", "<think>d</think>e")]
    chat = [message for answer in answers for message in (CHAT[0], answer)]
    every = f"b{END}c{END}<think>d</think>e{END}"
    assert trained(tokenizer, chat, train_on_all_assistant_turns=True)[0] == every
    every = f"b{END}c{END}e{END}"  # if the last turn is the user's, the template removes all thoughts
    assert trained(tokenizer, [*chat, CHAT[2]], train_on_all_assistant_turns=True)[0] == every


@pytest.mark.parametrize("family", STRIPPING)
def test_mask_excludes_white_space_that_the_template_strips(family, tmp_path):
    tokenizer = load_tokenizer(published.byte_level(tmp_path, chat_template=STRIPPING[family]))
    answers = [{"role": "assistant", "content": content} for content in ("  a \n", " \n", "", "b")]
    chat = [message for answer in answers for message in (CHAT[0], answer)]
    assert trained(tokenizer, chat, train_on_all_assistant_turns=True)[0] == f"a{END}{END}{END}b{END}"
    assert trained(tokenizer, chat[:4], finish_reason="length")[0] == ""


def test_only_the_end_token_of_an_empty_answer_is_trained_on(tokenizer):
    chat = [CHAT[0], {"role": "assistant", "content": ""}]
    assert trained(tokenizer, [*chat, *chat], train_on_all_assistant_turns=True)[0] == END + END
    assert trained(tokenizer, chat)[0] == END
    assert trained(tokenizer, chat, finish_reason="length")[0] == ""


def test_mask_includes_tool_calls_and_the_end_of_the_turn(tmp_path):
    template = published.CHATML.replace(
        "message.content", "(message.content or '') + (message.tool_calls | tojson if message.tool_calls else '')"
    )
    tokenizer = load_tokenizer(published.byte_level(tmp_path, chat_template=template))
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert trained(tokenizer, chat)[0] == json.dumps(calls) + END
    assert trained(tokenizer, chat, finish_reason="length") == (json.dumps(calls), True)
    every = trained(tokenizer, [*chat, CHAT[0], *chat], train_on_all_assistant_turns=True)
    assert every[0] == 2 * (json.dumps(calls) + END)


def test_mask_includes_the_end_token_of_the_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert trained(tokenizer, CHAT) == ("中 two<|eos|>", True)
    assert trained(tokenizer, CHAT, finish_reason="length") == ("中 two", True)


def test_mask_includes_all_closing_tokens_if_the_end_token_is_unknown(tmp_path):
    tokenizer = load_tokenizer(published.byte_level(tmp_path, eos_token=None))
    assert trained(tokenizer, CHAT, train_on_all_assistant_turns=True)[0] == f"one, “eins”{END}\n中 two{END}\n"
    assert trained(tokenizer, CHAT, finish_reason="length")[0] == "中 two"


def test_messages_of_the_openai_package_are_accepted(tokenizer):
    chat = [CHAT[0], ChatCompletionMessage(role="assistant", content="one", tool_calls=None)]
    found = tokenize_for_trainer(tokenizer, chat, include_messages=True)
    assert found["messages"] == [CHAT[0], {"role": "assistant", "content": "one"}]
    assert found["tokens"] == tokenizer.apply_chat_template(found["messages"]) == tokenizer.apply_chat_template(chat)
    with pytest.raises(
        UsageError, match=r"messages\[1\] must be a dict .* or a message of the openai package.*got str"
    ):
        tokenize_for_trainer(tokenizer, [CHAT[0], "one"])
    with pytest.raises(UsageError, match=r"messages\[0\] has no role. Its fields: content"):
        tokenizer.apply_chat_template([{"content": "one"}])
