"""Tokens that come piece by piece, as text."""

from __future__ import annotations

import pytest

from rlframe.language.model.tokenizers import ByteTokenizer
from rlframe.language.server.generation import TextDecoder

TOKENIZER = ByteTokenizer()
SAID = "añ→😀 end"


def said(text, parts, **options):
    """(texts that were handed out, tokens that were taken, what stopped it)."""
    one = TextDecoder(TOKENIZER, **options)
    out, taken = [], 0
    for index, part in enumerate(parts):
        piece, count = one.add(list(part), last=index == len(parts) - 1)
        out.append(piece)
        taken += count
        if one.stopped_by is not None:
            break
    return out, taken, one.stopped_by


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_characters_are_handed_out_whole(size):
    tokens = SAID.encode()
    out, taken, _ = said(SAID, [tokens[at : at + size] for at in range(0, len(tokens), size)])
    assert "".join(out) == SAID and "\ufffd" not in "".join(out) and taken == len(tokens)
    assert all(piece in SAID for piece in out)


def test_what_is_no_character_is_handed_out_at_the_end():
    assert said("", [b"ab", b"\xf0\x9f"])[0] == ["ab", "\ufffd"]
    assert said("", [b"\xf0"] * 40)[0][15] == "\ufffd" * 16  # and not only there, where it is no beginning of one


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_text_ends_before_a_stop_string_however_it_is_cut(size):
    tokens = b"one two STOP three"
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    out, taken, stopped_by = said("", parts, stops=["STOP", "four"])
    assert ("".join(out), stopped_by, taken) == ("one two ", "STOP", len("one two STOP"))


def test_what_may_be_the_beginning_of_a_stop_string_is_held_back():
    assert said("", [b"a S", b"TO", b"P"], stops=["STOP"])[0] == ["a ", "", ""]
    assert said("", [b"a S", b"TO", b"RE"], stops=["STOP"])[0] == ["a ", "", "STORE"]
    assert said("", [b"a S", b"TO"], stops=["STOP"])[0] == ["a ", "STO"]


def test_a_stop_string_of_a_megabyte_costs_no_more_than_the_text():
    stop = "x" * (1 << 20) + "y"  # its beginnings have half a terabyte
    out, taken, stopped_by = said("", [b"x" * 8] * 8, stops=[stop])
    assert ("".join(out), taken, stopped_by) == ("x" * 64, 64, None)


def test_the_first_of_several_stop_strings_counts():
    assert said("", [b"abcd"], stops=["cd", "bc"]) == (["a"], 3, "bc")


def test_special_tokens_are_no_text_unless_asked_for():
    tokens = [97, TOKENIZER.eos_token_id, 98]
    assert said("", [tokens])[0] == ["ab"]
    assert said("", [tokens], skip_special_tokens=False)[0] == ["a<|eos|>b"]
