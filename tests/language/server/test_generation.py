"""Test `TextDecoder`, which decodes tokens to text while they arrive in pieces."""
# ruff: noqa: RUF001  quotation marks of other languages

from __future__ import annotations

import random
import time

import pytest

from rlframe.language.model.tokenizers import ByteTokenizer, load_tokenizer
from rlframe.language.server.generation import TextDecoder
from tests.language import published

TOKENIZER = ByteTokenizer()
TEXT = "añ→😀 end"


@pytest.fixture(scope="module", params=["byte", "byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    if request.param == "byte":
        return TOKENIZER
    return load_tokenizer(getattr(published, request.param)(tmp_path_factory.mktemp("tokenizer")))


def cut(tokens, size):
    return [tokens[at : at + size] for at in range(0, len(tokens), size)]


def decode_parts(text, parts, tokenizer=TOKENIZER, **options):
    """Decode tokens that arrive in `parts`. Return (pieces of text, number of used tokens, stop string or None)."""
    one = TextDecoder(tokenizer, **options)
    out, taken = [], 0
    for index, part in enumerate(parts):
        piece, count = one.add(list(part), last=index == len(parts) - 1)
        out.append(piece)
        taken += count
        if one.stopped_by is not None:
            break
    return out, taken, one.stopped_by


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_pieces_contain_complete_characters(size):
    tokens = TEXT.encode()
    out, taken, _ = decode_parts(TEXT, [tokens[at : at + size] for at in range(0, len(tokens), size)])
    assert "".join(out) == TEXT and "\ufffd" not in "".join(out) and taken == len(tokens)
    assert all(piece in TEXT for piece in out)


SIZES = [1, 2, 3, 5, 7, 8, 16, 100]


@pytest.mark.parametrize("stops", [(), ("\x00never", "quotes never")], ids=["plain", "stops"])
@pytest.mark.parametrize("size", SIZES)
def test_streamed_text_of_any_language_is_complete(tokenizer, size, stops):
    for text in (*published.TEXTS, "".join(published.TEXTS), published.TEXTS[3] * 9):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for with_offsets in (False, True):
            out, taken, _ = decode_parts("", cut(tokens, size), tokenizer, stops=stops, with_offsets=with_offsets)
            assert "".join(out) == tokenizer.decode(tokens) == text
            assert "\ufffd" not in "".join(out) and taken == len(tokens)


@pytest.mark.parametrize("size", SIZES)
def test_streamed_text_with_malformed_bytes_is_complete(tokenizer, size):
    source = random.Random(size)
    partial = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token)[:1] >= b"\x80"]
    for i in range(60):
        tokens = tokenizer.encode("".join(published.TEXTS), add_special_tokens=False)[: source.randrange(60)]
        for _ in range(8):  # some of the random tokens are special tokens
            tokens.insert(source.randrange(len(tokens) + 1), source.randrange(tokenizer.vocab_size))
        tokens += source.choices(partial, k=source.randrange(60))
        for skip in (True, False):
            options = {"skip_special_tokens": skip, "with_offsets": i % 2 == 0}
            out, _, _ = decode_parts("", cut(tokens, size), tokenizer, **options)
            assert "".join(out) == tokenizer.decode(tokens, skip_special_tokens=skip)


def test_character_is_returned_with_its_last_token(tokenizer):
    text = "é中" + "👩‍👩‍👧‍👦" * 3
    decoder, out = TextDecoder(tokenizer), ""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for i, token in enumerate(tokens):
        out += decoder.add([token], last=False)[0]
        assert out == tokenizer.decode(tokens[: i + 1]).rstrip("\ufffd")
    assert out == text


def test_stop_string_of_several_bytes_is_removed(tokenizer):
    tokens = tokenizer.encode("日本語”、ありがとう", add_special_tokens=False)
    ends = next(i for i in range(len(tokens)) if "”" in tokenizer.decode(tokens[: i + 1]))
    for size in SIZES:
        out, taken, stopped_by = decode_parts("", cut(tokens, size), tokenizer, stops=["’", "”"])
        assert ("".join(out), taken, stopped_by) == ("日本語", ends + 1, "”")


def test_offset_of_a_token_is_the_position_of_its_first_character(tokenizer):
    text = "añ中😀 “b”"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    data, expected = b"", []
    for token in tokens:
        content = tokenizer.token_bytes(token)
        expected.append(len((data + content[:1]).decode(errors="replace")) - 1)
        data += content
    if data.decode() == " " + text:  # the decoder strips the first space of a text
        expected = [max(0, position - 1) for position in expected]
    for size in SIZES:
        decoder = TextDecoder(tokenizer, with_offsets=True)
        for part in cut(tokens, size):
            decoder.add(part, last=False)
        assert decoder.offsets == expected
    if tokenizer is TOKENIZER:
        assert expected == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5, 5, 5, 6, 7, 7, 7]


def test_incomplete_character_is_returned_at_the_end():
    assert decode_parts("", [b"ab", b"\xf0\x9f"])[0] == ["ab", "\ufffd"]
    # The second byte shows that the first byte is invalid.
    assert decode_parts("", [b"\xf0"] * 4)[0] == ["", "\ufffd", "\ufffd", "\ufffd\ufffd"]


@pytest.mark.parametrize("token", [258, 0xF0, 0x80], ids=["special token", "first byte", "continuation byte"])
def test_time_per_token_is_independent_of_the_length_of_the_text(token):
    def seconds(count):
        decoder, start = TextDecoder(TOKENIZER, stops=["x"]), time.process_time()
        decoder.add([token] * count, last=False)
        return time.process_time() - start

    few, many = min(seconds(2000) for _ in range(3)), seconds(20_000)
    assert many < 40 * few  # decoding the whole text for each token would take 100 times as long


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_text_ends_before_a_stop_string_that_is_split_between_parts(size):
    tokens = b"one two STOP three"
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    out, taken, stopped_by = decode_parts("", parts, stops=["STOP", "four"])
    assert ("".join(out), stopped_by, taken) == ("one two ", "STOP", len("one two STOP"))


def test_beginning_of_a_stop_string_is_not_returned_at_once():
    assert decode_parts("", [b"a S", b"TO", b"P"], stops=["STOP"])[0] == ["a ", "", ""]
    assert decode_parts("", [b"a S", b"TO", b"RE"], stops=["STOP"])[0] == ["a ", "", "STORE"]
    assert decode_parts("", [b"a S", b"TO"], stops=["STOP"])[0] == ["a ", "STO"]


def test_long_stop_string_takes_little_time_and_memory():
    stop = "x" * (1 << 20) + "y"  # all its prefixes together have half a terabyte
    out, taken, stopped_by = decode_parts("", [b"x" * 8] * 8, stops=[stop])
    assert ("".join(out), taken, stopped_by) == ("x" * 64, 64, None)


def test_text_ends_at_its_first_stop_string():
    assert decode_parts("", [b"abcd"], stops=["cd", "bc"]) == (["a"], 3, "bc")


def test_special_tokens_are_skipped_by_default():
    tokens = [97, TOKENIZER.eos_token_id, 98]
    assert decode_parts("", [tokens])[0] == ["ab"]
    assert decode_parts("", [tokens], skip_special_tokens=False)[0] == ["a<|eos|>b"]


def test_offsets_are_the_same_for_one_or_many_pieces(tokenizer):
    for text in ("plain words.", "", published.TEXTS[0], published.TEXTS[1]):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        whole, pieces = (TextDecoder(tokenizer, with_offsets=True) for _ in range(2))
        assert whole.add(tokens, last=True) == (text, len(tokens))
        for token in tokens:
            pieces.add([token], last=False)
        assert whole.offsets == pieces.offsets and len(whole.offsets) == len(tokens)
