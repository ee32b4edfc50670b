"""Tests of the previews of groups, which the live page shows."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.trajectories.service.models import (
    MAX_BYTES,
    MAX_SEQUENCES,
    MAX_TOKENS,
    ShownMessage,
    ShownTokens,
    load_decode,
    preview,
)
from tests.extras import needs

needs("tokenizers")
import tokenizers


def stored(**fields: Any) -> bytes:
    return json.dumps({"tokens": [[1]], "masks": [[1]], "scores": [0.0], **fields}).encode()


@pytest.fixture
def tokenizer_file(tmp_path: pathlib.Path) -> str:
    """Write a tokenizer file. As in SentencePiece, a word's token includes the space before the word."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<s>": 3}, unk_token="<s>"))
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_tokens_are_split_where_mask_changes() -> None:
    shown = preview(stored(tokens=[[5, 6, 7, 8, 9]], masks=[[-100, -100, 7, 8, -100]], scores=[0.5]), None)
    (sequence,) = shown.sequences
    assert sequence.pieces == [ShownTokens("5 6 ", True), ShownTokens("7 8 ", False), ShownTokens("9 ", True)]
    assert (sequence.score, sequence.tokens, sequence.trained_tokens, sequence.left_out) == (0.5, 5, 2, 0)


def test_decoded_text_keeps_space_at_start_of_each_piece(tokenizer_file: str) -> None:
    decode = load_decode(tokenizer_file)
    shown = preview(stored(tokens=[[3, 0, 1, 2, 1]], masks=[[-100, -100, 1, 2, -100]]), decode)
    pieces = shown.sequences[0].pieces
    assert pieces == [ShownTokens("<s> a", True), ShownTokens(" bc", False), ShownTokens(" b", True)]


def test_tokenizer_folder_is_accepted(tokenizer_file: str) -> None:
    decode = load_decode(str(pathlib.Path(tokenizer_file).parent))
    assert decode is not None and decode([2, 3]) == "c<s>"


def test_byte_tokenizer_is_supported() -> None:
    for ids, text in (([72, 105, 258], "Hi<|eos|>"), ([72, 999], "72 999 ")):
        (sequence,) = preview(stored(tokens=[ids], masks=[ids]), load_decode("byte")).sequences
        assert [piece.text for piece in sequence.pieces] == [text]


def test_unknown_ids_are_shown_as_numbers(tokenizer_file: str) -> None:
    shown = preview(stored(tokens=[[0, 77, -1]], masks=[[0, 77, -1]]), load_decode(tokenizer_file))
    assert shown.sequences[0].pieces == [ShownTokens("0 77 -1 ", False)]


def test_beginning_and_end_of_long_sequence_are_shown() -> None:
    length = 2 * MAX_TOKENS + 3
    masks = [-100] * 2 + [0] * (length - 2)
    (sequence,) = preview(stored(tokens=[list(range(length))], masks=[masks]), None).sequences
    assert (sequence.tokens, sequence.trained_tokens, sequence.left_out) == (length, length - 2, 3)
    before, after = sequence.pieces[: sequence.before_gap], sequence.pieces[sequence.before_gap :]
    assert [piece.masked for piece in before] == [True, False]
    assert before[1].text.split()[-1] == str(MAX_TOKENS - 1)
    assert after[0].text.split()[0] == str(MAX_TOKENS + 3) and after[0].text.split()[-1] == str(length - 1)


def test_message_content_of_any_type_becomes_text() -> None:
    messages = [
        [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "x" * 30_000},
        ]
    ]
    shown = preview(stored(messages=messages), None).sequences[0].messages
    assert shown is not None
    assert shown[0] == ShownMessage("user", '[{"type":"text","text":"hello"}]')
    assert shown[1].content == "x" * 20_000 + "… (10,000 more characters)"


def test_preview_leaves_out_sequences_of_large_groups() -> None:
    count = MAX_SEQUENCES + 4
    shown = preview(stored(tokens=[[1]] * count, masks=[[1]] * count, scores=[0.0] * count), None)
    assert (shown.size, len(shown.sequences)) == (count, MAX_SEQUENCES)
    large = preview(stored(messages=[[{"role": "user", "content": "x" * MAX_BYTES}]]), None)
    assert (large.size, large.sequences) == (None, []) and large.stored_bytes > MAX_BYTES


def test_binary_groups_are_shown() -> None:
    tokens, masks = np.array([1, 2, 3], "<i4").tobytes(), np.array([-100, 2, 3], "<i4").tobytes()
    lengths, scores = np.array([2, 1], "<i4").tobytes(), np.array([0.5, 1], "<f4").tobytes()
    packed = {"tokens": tokens, "masks": masks, "lengths": lengths, "scores": scores, "env_id": 4, "policy_version": 9}
    shown = preview(msgspec.msgpack.encode(packed), None)
    assert (shown.env_id, shown.policy_version) == (4, 9)
    assert [one.pieces for one in shown.sequences] == [
        [ShownTokens("1 ", True), ShownTokens("2 ", False)],
        [ShownTokens("3 ", False)],
    ]


def test_unreadable_tokenizer_is_refused(tmp_path: pathlib.Path) -> None:
    assert load_decode(None) is None
    with pytest.raises(UsageError, match="none.json cannot be read"):
        load_decode(str(tmp_path / "none.json"))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UsageError, match="broken.json cannot be read"):
        load_decode(str(tmp_path / "broken.json"))
