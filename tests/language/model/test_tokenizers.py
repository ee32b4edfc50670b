"""Test the byte tokenizer, and tokenizers in the format of Hugging Face, which the tests write to folders."""

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


def test_bytes_are_token_ids():
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


def test_byte_chat_template_marks_roles_and_ends_of_turns():
    tokenizer = ByteTokenizer()
    tokens = [260, *"añ😀".encode(), 258, 261, *b"no", 258]
    assert tokenizer.apply_chat_template(CHAT) == tokens
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True) == [*tokens, 261]
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "<|user|>añ😀<|eos|><|assistant|>no<|eos|>"
    with pytest.raises(UsageError, match="role must be one of system, user, assistant, tool, got 'god'"):
        tokenizer.apply_chat_template([{"role": "god", "content": ""}])
    with pytest.raises(
        UsageError, match=r"messages\[0\].content must be text or a list of text parts, got None. Write it as text"
    ):
        tokenizer.apply_chat_template([{"role": "user", "content": None}])


def test_saved_byte_tokenizer_encodes_the_same_tokens(tmp_path):
    original = ByteTokenizer()
    original.save(tmp_path / "folder")
    loaded = load_tokenizer(tmp_path / "folder")
    for text in ("", "añ😀\n x  y", "".join(map(chr, range(300))), "a<|eos|><|user|> <|"):
        for special in (True, False):
            tokens = original.encode(text, add_special_tokens=special)
            assert loaded.encode(text, add_special_tokens=special) == tokens
            assert loaded.decode(tokens, skip_special_tokens=special) == original.decode(
                tokens, skip_special_tokens=special
            )
    chat = [{"role": "system", "content": "Be brief."}, CHAT[0], {"role": "tool", "content": "{}"}]
    for prompt in (True, False):
        expected = original.apply_chat_template(chat, add_generation_prompt=prompt)
        assert loaded.apply_chat_template(chat, add_generation_prompt=prompt) == expected
    for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "stop_token_ids"):
        assert getattr(loaded, name) == getattr(original, name)
    with pytest.raises(UsageError, match="role must be one of system, user, assistant, tool, got god"):
        loaded.apply_chat_template([{"role": "god", "content": ""}])


def test_special_tokens_are_read_from_the_folder(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hello there you") == [1, 3, 4, 0]
    assert tokenizer.encode("hello</s>", add_special_tokens=False) == [3, 2]
    assert tokenizer.encode("hello \ud800", add_special_tokens=False) == [3, 0]
    assert tokenizer.decode([1, 3, 4, 2, 77], skip_special_tokens=True) == "hello there"
    assert tokenizer.decode([1, 3]) == "<s> hello"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (6, 1, 2)
    assert tokenizer.pad_token_id is None
    assert tokenizer.stop_token_ids == (2,)


def test_truncation_and_padding_in_the_file_are_ignored(folder):
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(file)
    assert load_tokenizer(folder).encode("hello there hello") == [1, 3, 4, 3]


def test_tokenizer_with_unused_ids_is_accepted(folder):
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"]["vocab"]["far"] = 9
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 10
    assert tokenizer.decode([3, 7, 9, 10, 2**40]) == "hello far"


@pytest.mark.parametrize(("listed", "stops"), [([2, 5], (2, 5)), (5, (2, 5)), ([], (2,))])
def test_generation_config_adds_stop_tokens(folder, listed, stops):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert load_tokenizer(folder).stop_token_ids == stops


@pytest.mark.parametrize("case", CHATS)
def test_chat_templates_render_as_in_transformers(folder, case):
    write_config(folder, bos_token="<s>", eos_token="</s>", chat_template=case["template"])
    text = load_tokenizer(folder).apply_chat_template(
        case["messages"], tokenize=False, add_generation_prompt=case["add_generation_prompt"]
    )
    assert text == case["text"]


def test_tools_and_documents_are_none_in_templates(folder):
    write_config(folder, chat_template="{{ tools is none }} {{ documents is none }}")
    assert load_tokenizer(folder).apply_chat_template([], tokenize=False) == "True True"


def test_chat_template_file_takes_precedence(folder):
    templates = [{"name": "default", "template": "never"}, {"name": "tools", "template": "never"}]
    write_config(folder, bos_token="<s>", eos_token="</s>", chat_template=templates)
    assert load_tokenizer(folder / "tokenizer.json").apply_chat_template([], tokenize=False) == "never"
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<turn>{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    )
    assert load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "hello"}]) == [5, 3]


def test_template_runs_in_a_sandbox(folder):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    write_config(folder, chat_template=escape)
    with pytest.raises(UsageError, match="cannot render the messages: .*unsafe"):
        load_tokenizer(folder).apply_chat_template([])
    write_config(folder, chat_template="{{ messages.append(1) }}")
    with pytest.raises(UsageError, match="cannot render the messages"):
        load_tokenizer(folder).apply_chat_template([])


def test_plain_text_template_refuses_tool_calls_by_name(folder):
    write_config(folder, chat_template="{% for message in messages %}{{ '<turn>' + message.content }}{% endfor %}")
    tokenizer, calls = load_tokenizer(folder), [{"id": "1", "type": "function", "function": {"name": "f"}}]
    with pytest.raises(UsageError, match=r"so write messages\[1\].tool_calls, messages\[1\].content as text"):
        tokenizer.apply_chat_template([*CHAT[:1], {"role": "assistant", "tool_calls": calls}])
    with pytest.raises(UsageError, match=r"so write messages\[0\].content as text"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [5, 3]


@pytest.mark.parametrize(
    "write", ["{{ message.content }}", "{{ message.content | trim }}", "{{ 'x' ~ message.content }}"]
)
def test_python_objects_in_rendered_text_are_refused_by_name(write, folder):
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
        with pytest.raises(UsageError, match=rf"does not write .*so write {named} as text"):
            tokenizer.apply_chat_template([{"role": "user", "content": "None"}, {"role": "assistant", **message}])


def test_template_can_render_tool_calls_and_text_parts(folder):
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
    with pytest.raises(UsageError, match=r"so write messages\[0\].content as text"):
        render([{"role": "user", "content": [{"type": "image", "url": "x"}]}])


def test_unusable_tokenizers_and_templates_are_refused_with_a_message(folder, tmp_path):
    with pytest.raises(UsageError, match="no chat template, so it accepts only plain text"):
        load_tokenizer(folder).apply_chat_template(CHAT)
    write_config(folder, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="cannot render the messages: roles must alternate"):
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
