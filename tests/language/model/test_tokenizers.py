"""Tokenizers: bytes, and published folders that the tests write."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from rlframe.errors import UsageError
from rlframe.language import ModelConfig
from rlframe.language.model.tokenizers import ByteTokenizer, load_tokenizer

CHATS = json.loads((Path(__file__).parent / "golden" / "chats.json").read_text())
CHAT = [{"role": "user", "content": "añ😀"}, {"role": "assistant", "content": "no"}]
VOCABULARY = {"?": 0, "<s>": 1, "</s>": 2, "hello": 3, "there": 4, "<turn>": 5}


@pytest.fixture
def folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<turn>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, bos_token="<s>", eos_token={"content": "</s>", "special": True})
    return tmp_path


def write_config(folder, **fields):
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_bytes_are_their_own_tokens_and_survive():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("añ") == tokenizer.encode("añ", add_special_tokens=False) == [97, 0xC3, 0xB1]
    assert tokenizer.decode(tokenizer.encode("añ😀\n")) == "añ😀\n"
    assert tokenizer.decode([257, 97, 0xC3, 258, 9999, -1], skip_special_tokens=True) == "a\ufffd"
    assert tokenizer.decode([257, 97, 258]) == "<|bos|>a<|eos|>"
    assert tokenizer.encode("<|bos|>a<|eos|><|no|>") == [257, 97, 258, *b"<|no|>"]
    assert tokenizer.encode("\ud800") == [ord("?")]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)
    assert tokenizer.stop_token_ids == (258,)
    assert tokenizer.vocab_size == 263 <= ModelConfig().vocab_size


def test_a_conversation_in_bytes_marks_roles_and_the_ends_of_turns():
    tokenizer = ByteTokenizer()
    tokens = [260, *"añ😀".encode(), 258, 261, *b"no", 258]
    assert tokenizer.apply_chat_template(CHAT) == tokens
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True) == [*tokens, 261]
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "<|user|>añ😀<|eos|><|assistant|>no<|eos|>"
    with pytest.raises(UsageError, match="role must be one of system, user, assistant, tool, got 'god'"):
        tokenizer.apply_chat_template([{"role": "god", "content": ""}])
    with pytest.raises(
        UsageError, match=r"messages\[0\].content must be text, or a list of text parts, got None: write it as text"
    ):
        tokenizer.apply_chat_template([{"role": "user", "content": None}])


def test_saved_bytes_are_a_published_tokenizer_with_the_same_tokens(tmp_path):
    ours = ByteTokenizer()
    ours.save(tmp_path / "folder")
    theirs = load_tokenizer(tmp_path / "folder")
    for text in ("", "añ😀\n x  y", "".join(map(chr, range(300))), "a<|eos|><|user|> <|"):
        for special in (True, False):
            tokens = ours.encode(text, add_special_tokens=special)
            assert theirs.encode(text, add_special_tokens=special) == tokens
            assert theirs.decode(tokens, skip_special_tokens=special) == ours.decode(
                tokens, skip_special_tokens=special
            )
    chat = [{"role": "system", "content": "Be brief."}, CHAT[0], {"role": "tool", "content": "{}"}]
    for prompt in (True, False):
        expected = ours.apply_chat_template(chat, add_generation_prompt=prompt)
        assert theirs.apply_chat_template(chat, add_generation_prompt=prompt) == expected
    for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "stop_token_ids"):
        assert getattr(theirs, name) == getattr(ours, name)
    with pytest.raises(UsageError, match="role must be one of system, user, assistant, tool, got god"):
        theirs.apply_chat_template([{"role": "god", "content": ""}])


def test_a_published_tokenizer_is_read_with_its_special_tokens(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hello there you") == [1, 3, 4, 0]
    assert tokenizer.encode("hello</s>", add_special_tokens=False) == [3, 2]
    assert tokenizer.encode("hello \ud800", add_special_tokens=False) == [3, 0]
    assert tokenizer.decode([1, 3, 4, 2, 77], skip_special_tokens=True) == "hello there"
    assert tokenizer.decode([1, 3]) == "<s> hello"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (6, 1, 2)
    assert tokenizer.pad_token_id is None
    assert tokenizer.stop_token_ids == (2,)


def test_no_text_is_cut_or_filled_up_whatever_the_file_says(folder):
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(file)
    assert load_tokenizer(folder).encode("hello there hello") == [1, 3, 4, 3]


def test_tokens_above_a_gap_are_tokens(folder):
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"]["vocab"]["far"] = 9
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 10
    assert tokenizer.decode([3, 7, 9, 10, 2**40]) == "hello far"


@pytest.mark.parametrize(("listed", "stops"), [([2, 5], (2, 5)), (5, (2, 5)), ([], (2,))])
def test_more_tokens_may_end_an_answer(folder, listed, stops):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert load_tokenizer(folder).stop_token_ids == stops


@pytest.mark.parametrize("case", CHATS)
def test_conversations_are_rendered_as_transformers_renders_them(folder, case):
    write_config(folder, bos_token="<s>", eos_token="</s>", chat_template=case["template"])
    text = load_tokenizer(folder).apply_chat_template(
        case["messages"], tokenize=False, add_generation_prompt=case["add_generation_prompt"]
    )
    assert text == case["text"]


def test_a_template_is_told_that_there_are_no_tools_and_no_documents(folder):
    write_config(folder, chat_template="{{ tools is none }} {{ documents is none }}")
    assert load_tokenizer(folder).apply_chat_template([], tokenize=False) == "True True"


def test_a_template_of_its_own_file_comes_first_and_its_tokens_are_special(folder):
    templates = [{"name": "default", "template": "never"}, {"name": "tools", "template": "never"}]
    write_config(folder, bos_token="<s>", eos_token="</s>", chat_template=templates)
    assert load_tokenizer(folder / "tokenizer.json").apply_chat_template([], tokenize=False) == "never"
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<turn>{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    )
    assert load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "hello"}]) == [5, 3]


def test_a_template_is_another_ones_program_and_runs_in_a_sandbox(folder):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    write_config(folder, chat_template=escape)
    with pytest.raises(UsageError, match="refuses the messages: .*unsafe"):
        load_tokenizer(folder).apply_chat_template([])
    write_config(folder, chat_template="{{ messages.append(1) }}")
    with pytest.raises(UsageError, match="refuses the messages"):
        load_tokenizer(folder).apply_chat_template([])


def test_a_template_for_plain_text_names_the_message_that_calls_tools(folder):
    write_config(folder, chat_template="{% for message in messages %}{{ '<turn>' + message.content }}{% endfor %}")
    tokenizer, calls = load_tokenizer(folder), [{"id": "1", "type": "function", "function": {"name": "f"}}]
    with pytest.raises(UsageError, match=r"cannot take messages\[1\].tool_calls, messages\[1\].content: write"):
        tokenizer.apply_chat_template([*CHAT[:1], {"role": "assistant", "tool_calls": calls}])
    with pytest.raises(UsageError, match=r"cannot take messages\[0\].content: write"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [5, 3]


@pytest.mark.parametrize(
    "write", ["{{ message.content }}", "{{ message.content | trim }}", "{{ 'x' ~ message.content }}"]
)
def test_a_template_that_writes_what_is_no_text_as_python_does_is_refused_by_the_field(write, folder):
    write_config(folder, chat_template="{% for message in messages %}<turn>" + write + "{% endfor %}")
    tokenizer, calls = load_tokenizer(folder), [{"id": "1", "type": "function", "function": {"name": "f"}}]
    for message, fields in (
        ({"content": None}, ["content"]),
        ({"content": None, "tool_calls": calls}, ["tool_calls", "content"]),
        ({"content": "None", "tool_calls": calls}, ["tool_calls"]),
        ({"content": [{"type": "text", "text": "hello"}]}, ["content"]),
        ({"content": 7}, ["content"]),
    ):
        named = ", ".join(rf"messages\[1\].{field}" for field in fields)
        with pytest.raises(UsageError, match=rf"does not write .*cannot take {named}: write each as text"):
            tokenizer.apply_chat_template([{"role": "user", "content": "None"}, {"role": "assistant", **message}])


def test_a_template_that_writes_calls_and_parts_takes_them(folder):
    write_config(
        folder,
        chat_template="{% for message in messages %}<turn>{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
        "{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}{{ message.no_such_field }}{% endfor %}",
    )
    render = functools.partial(load_tokenizer(folder).apply_chat_template, tokenize=False)
    assert render([{"role": "assistant", "tool_calls": [{"id": None}]}]) == '<turn>{"id": null}'
    assert render([{"role": "user", "content": [{"type": "text", "text": "None"}]}]) == "<turn>None"
    assert render([{"role": "user", "content": [{"type": "text", "text": ""}]}, {"role": "user"}]) == "<turn><turn>"
    with pytest.raises(UsageError, match=r"cannot take messages\[0\].content"):
        render([{"role": "user", "content": [{"type": "image", "url": "x"}]}])


def test_what_cannot_be_is_said(folder, tmp_path):
    with pytest.raises(UsageError, match="no chat template: it takes plain text only"):
        load_tokenizer(folder).apply_chat_template(CHAT)
    write_config(folder, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="refuses the messages: roles must alternate"):
        load_tokenizer(folder).apply_chat_template(CHAT)
    write_config(folder, chat_template="{% for %}")
    with pytest.raises(UsageError, match="chat template in .* cannot be read"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(folder)
    with pytest.raises(UsageError, match="There is no tokenizer 'some/model'.*Nothing is downloaded"):
        load_tokenizer("some/model")
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)
