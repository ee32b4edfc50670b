"""Tests of functions that decode, check and store groups. These tests are not possible over HTTP."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.service import wire
from rlframe.trajectories.service.validation import InvalidGroupError, text_lengths
from rlframe.trajectories.service.wire import as_json, as_packed, join_json, join_packed, parse_group, parse_groups
from tests.trajectories.api import ITEM_KEYS, group


def packed(lengths=(1, 2), **fields):
    """Return a group with binary arrays."""
    total = sum(lengths)
    ints = np.arange(total, dtype="<i4").tobytes()
    arrays = {
        "tokens": ints,
        "masks": ints,
        "scores": np.full(len(lengths), 0.5, "<f4").tobytes(),
        "lengths": np.asarray(lengths, "<i4").tobytes(),
    }
    return {**arrays, **fields}


def encoded(fields):
    return msgspec.msgpack.encode(fields)


def test_json_is_stored_as_sent_except_that_missing_keys_are_added():
    body = json.dumps(group(mark=123456, inference_logprobs=[[-1.5e-07], [0.1, 1.0]], env_id=3)).encode()
    parsed = parse_group(b" " + body + b"\n", packed=False)
    assert (parsed.sequences, parsed.tokens, parsed.env_id, parsed.policy_version) == (2, 3, 3, None)
    assert parsed.payload.startswith(body[:-1])
    assert set(json.loads(parsed.payload)) == ITEM_KEYS


def test_numbers_are_stored_with_the_same_digits_as_sent():
    body = b'{"tokens":[[1,2]],"masks":[[1,2]],"scores":[1e-3],"ref_logprobs":[[0.10000, 1]],"policy_version":4}'
    parsed = parse_group(body, packed=False)
    assert parsed.policy_version == 4
    assert b"[[0.10000, 1]]" in parsed.payload


def test_binary_arrays_are_stored_unchanged_and_served_as_lists():
    logprobs = np.asarray([0.5, -0.25, 1.0], "<f4").tobytes()
    body = encoded(packed(inference_logprobs=logprobs, env_id=1, policy_version=7, messages=[[], []]))
    parsed = parse_group(body, packed=True)
    assert parsed == (2, 3, 1, 7, body)
    item = json.loads(as_json(body))
    assert set(item) == ITEM_KEYS | {"policy_version"}
    assert item["tokens"] == [[0], [1, 2]]
    assert item["inference_logprobs"] == [[0.5], [-0.25, 1.0]]
    assert (item["scores"], item["messages"], item["advantages"]) == ([0.5, 0.5], [[], []], None)
    assert as_packed(body) == body


def test_unknown_keys_of_messagepack_group_are_dropped():
    assert parse_group(encoded(packed(more=[1] * 1000)), packed=True).payload == encoded(packed())


def test_messagepack_group_may_contain_lists():
    body = encoded(group(mark=5))
    assert json.loads(as_json(parse_group(body, packed=True).payload))["tokens"] == [[5], [5, 5]]


def test_batch_may_mix_json_and_messagepack_groups():
    payloads = [parse_group(json.dumps(group(mark=1)).encode(), False).payload, encoded(packed())]
    assert [item["tokens"][0] for item in json.loads(join_json(payloads))] == [[1], [0]]
    first, second = msgspec.msgpack.decode(join_packed(payloads))
    assert first["tokens"] == [[1], [1, 1]]
    assert second == packed()
    assert join_json([]) == b"[]"


@pytest.mark.parametrize("name", ["scores", "advantages"])
def test_integer_beyond_64_bits_becomes_float(name):
    wide = {"scores": [10**20], "advantages": [[10**20, 1]]}[name]
    body = json.dumps({"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1], name: wide}).encode()
    (item,) = msgspec.msgpack.decode(join_packed([parse_group(body, packed=False).payload]))
    assert item[name] == wide
    assert Group.from_item(item).scores.dtype == np.float64


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 2**70])
@pytest.mark.parametrize("name", ["generation_params", "overrides", "group_overrides", "images", "messages"])
def test_opaque_fields_with_integers_beyond_64_bits_are_refused(name, number):
    """The service could not send such integers to a consumer that requests MessagePack."""
    inner = {"role": "user", "content": "", "seed": number}
    value = {"overrides": [inner, {}], "messages": [[inner], []]}.get(name, inner)
    with pytest.raises(InvalidGroupError) as caught:
        parse_group(json.dumps(group(**{name: value})).encode(), packed=False)
    assert caught.value.loc == (name,)


def test_opaque_fields_may_contain_64_bit_integers():
    body = json.dumps(group(generation_params={"seeds": [2**64 - 1, -(2**63)]})).encode()
    (item,) = msgspec.msgpack.decode(join_packed([parse_group(body, packed=False).payload]))
    assert item["generation_params"] == {"seeds": [2**64 - 1, -(2**63)]}


def test_group_may_have_tokens_as_lists_and_masks_as_binary_array():
    body = encoded(packed(tokens=[[0], [1, 2]]))
    (item,) = msgspec.msgpack.decode(join_packed([parse_group(body, packed=True).payload]))
    assert [row.tolist() for row in Group.from_item(item).masks] == [[0], [1, 2]]


WRONG = {
    "an incomplete number": (packed(tokens=b"12345"), ("tokens",)),
    "more values than the lengths": (packed(masks=bytes(16)), ("masks",)),
    "no lengths": ({k: v for k, v in packed().items() if k != "lengths"}, ("lengths",)),
    "binary masks and lists of tokens, but no lengths": (group(masks=bytes(12)), ("lengths",)),
    "lists of tokens whose lengths differ from the sent lengths": (packed(tokens=[[0, 1], [2]]), ("lengths",)),
    "a negative length": (packed(lengths=(4, -1)), ("lengths",)),
    "an empty sequence": (packed(lengths=(0, 3)), ("tokens", 0)),
    "no sequence": (packed(lengths=()), ("tokens",)),
    "NaN in an array": (packed(ref_logprobs=np.asarray([0, np.nan, 0], "<f4").tobytes()), ("ref_logprobs",)),
    "NaN in a score": (packed(scores=np.asarray([0, np.nan], "<f4").tobytes()), ("scores", 1)),
    "NaN in a list": (group(ref_logprobs=[[0.5], [0.5, float("nan")]]), ("ref_logprobs", 1, 1)),
    "infinity deep inside": (group(images={"a": [float("inf")]}), ("images",)),
    "bytes in images": (group(images={"a": b"x"}), ("images",)),
    "keys in images that are not text": (group(images={1: 2}), ("images",)),
    "keys that are not text": (group(generation_params={1: 2}), ("generation_params",)),
    "a version that is too large": (packed(policy_version=2**53 + 1), ("policy_version",)),
    "a version that is too small": (packed(policy_version=-(2**53) - 1), ("policy_version",)),
    "too few scores": (packed(scores=bytes(4)), ("scores",)),
}


@pytest.mark.parametrize("fields, where", WRONG.values(), ids=WRONG)
def test_invalid_messagepack_group_is_refused(fields, where):
    with pytest.raises(InvalidGroupError) as caught:
        parse_group(encoded(fields), packed=True)
    assert caught.value.loc == where


def test_error_path_begins_with_index_in_list():
    with pytest.raises(InvalidGroupError) as caught:
        list(parse_groups(encoded([packed(), packed(tokens=b"")]), packed=True))
    assert caught.value.loc == (1, "tokens")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91" * 100_000, encoded(3), encoded([1])])
def test_bytes_that_are_not_a_group_are_refused(body):
    with pytest.raises(InvalidGroupError):
        parse_group(body, packed=True)
    with pytest.raises(InvalidGroupError):
        list(parse_groups(body, packed=True))


@pytest.mark.parametrize("name", ["advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs", "messages"])
def test_empty_optional_array_is_accepted(name):
    """BaseEnv of atroposlib sends [] for a missing array. The service returns this empty array unchanged."""
    body = json.dumps({"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1.0], name: []}).encode()
    assert json.loads(parse_group(body, packed=False).payload)[name] == []
    with pytest.raises(InvalidGroupError):
        parse_group(body.replace(b'"masks": [[1, 2]]', b'"masks": []'), packed=False)


@pytest.mark.parametrize("absent", [b"null", b"[]"])
def test_absent_array_does_not_cause_decoding(absent, monkeypatch):
    """The service only checks the text, because decoding it would take three times as long."""
    monkeypatch.setattr(wire, "_decode_numbers", None)
    body = b'{"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1.0], "advantages": ' + absent + b"}"
    assert parse_group(body, packed=False).tokens == 2


def test_text_that_is_not_utf_8_is_refused():
    for text in (b'{"tokens": [[1]], "masks": [[1]], "scores": [1.0], "images": "\xff"}', b'{"\xff": 1}'):
        with pytest.raises(InvalidGroupError, match="UTF-8"):
            parse_group(text, packed=False)
    with pytest.raises(InvalidGroupError, match="UTF-8"):
        parse_group(b"\x81\xa2\xff\xfe\xc0", packed=True)


@pytest.mark.parametrize("numbers, where", [(200_000, ("tokens", 1, 200_000)), (4_000_000, ("tokens",))])
def test_path_to_nan_is_found_with_little_memory(numbers, where):
    """For 8 MB of JSON, the path has no index, because a search for the index would block other requests."""
    body = b'{"scores":[1,2],"masks":[],"tokens":[[1],[' + b"1," * numbers + b"NaN]]}"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidGroupError) as caught:
            parse_group(body, packed=False)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.loc == where


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_field_with_nan_in_long_list_is_found(number):
    long = json.dumps(group(tokens=[[7] * 300_000] * 2)).encode()
    with pytest.raises(InvalidGroupError) as caught:
        list(parse_groups(b"[" + long + b', {"tokens": [[1]], "scores": [0.5, ' + number + b'], "masks": []}]', False))
    assert (caught.value.loc, caught.value.kind) == (("scores",), "finite_number")
    with pytest.raises(InvalidGroupError) as caught:
        list(parse_groups(b"[" + long + b', {"scores": None}]', False))
    assert (caught.value.loc, caught.value.kind) == ((), "json_invalid")


# Tests of `text_lengths`, which finds the lengths of lists in JSON text without decoding it


numbers = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.floats(allow_nan=False, allow_infinity=False), st.integers(-9, 9)
)


@given(
    st.lists(st.lists(numbers, max_size=5), max_size=4),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.sampled_from([0, None, 1]),
)
def test_text_lengths_match_decoded_lengths(value, separators, indent):
    text = json.dumps(value, separators=separators, indent=indent).encode()
    found = text_lengths(text, integers=False)
    assert found in (None, [len(inner) for inner in value])
    if value and all(len(inner) > 1 for inner in value) and "e+" not in text.decode() and len(text) < 60:
        assert found is not None or any(abs(number) > 1e9 for inner in value for number in inner) or len(text) > 40
    found = text_lengths(text, integers=True)
    assert found in (None, [len(inner) for inner in value])
    if any(isinstance(number, float) for inner in value for number in inner):
        assert found is None


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "[[]]", "[[1]]", "[1,2]", "[[[1,2]]]", "[[1,2],3]", "[[1,2],null]", "[[1,true]]", '[["1","2"]]'),
        *("[[1,2],[]]", "[[1,[2,3]]]", "[[1,2147483648]]", "[[1,1.5]]", "[[1,1e5]]", '[["],[",1]]', "null"),
    ],
)
def test_text_lengths_returns_none_for_unusual_lists_of_integers(text):
    assert text_lengths(text.encode(), integers=True) is None


@pytest.mark.parametrize("text", ["[[1,1e999]]", "[[1,1E-5]]", f"[[1,{'9' * 400}]]", "[[1,null]]", "[[1,{}]]"])
def test_text_lengths_returns_none_for_unusual_lists_of_floats(text):
    assert text_lengths(text.encode(), integers=False) is None


def test_text_lengths_accepts_common_arrays():
    assert text_lengths(b"[[1,-100],[3, 4, 151643]]", integers=True) == [2, 3]
    assert text_lengths(b"[[1.0,-1.5e-05],[-0.125, 2, 3]]", integers=False) == [2, 3]
    assert text_lengths(b"[[1.0," + b"9" * 38 + b",0]]", integers=False) == [3]
    assert text_lengths(b"[[1.0," + b"9" * 39 + b",0]]", integers=False) is None
