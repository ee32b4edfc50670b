"""Tests of the class `Group`: its checks and its encodings."""

from __future__ import annotations

import warnings

import msgspec
import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.trajectories import Group


def a_group(**fields) -> Group:
    tokens = [[1, 2, 3], [4, 5]]
    masks = [[-100, 2, 3], [-100, 5]]
    return Group(**{"tokens": tokens, "masks": masks, "scores": [0.1, -1.0], **fields})


FULL = {
    "advantages": [[0.0, 0.5, 0.25], [0.0, -2.0]],
    "inference_logprobs": [[1.0, -0.5, -1.5], [1.0, -0.125]],
    "ref_logprobs": [[1.0, -0.25, -1.0], [1.0, -0.5]],
    "messages": [[{"role": "user", "content": "?"}], [{"role": "user", "content": "!"}]],
    "env_id": 3,
    "policy_version": 7,
    "group_overrides": {"a": 1},
}


def assert_same_group(one: Group, other: Group) -> None:
    for name in ("tokens", "masks", "advantages", "inference_logprobs", "ref_logprobs"):
        rows, others = getattr(one, name), getattr(other, name)
        assert (rows is None) == (others is None), name
        for row, expected in zip(rows or (), others or ()):
            np.testing.assert_array_equal(row, expected)
            assert row.dtype == expected.dtype
    np.testing.assert_array_equal(one.scores, other.scores)
    for name in ("messages", "env_id", "policy_version", "group_overrides", "images", "overrides"):
        assert getattr(one, name) == getattr(other, name), name


def test_rows_become_int32_and_float32_arrays():
    group = a_group(**FULL)
    assert [row.dtype for row in (*group.tokens, *group.masks)] == [np.int32] * 4
    assert group.advantages[0].dtype == np.float32
    np.testing.assert_array_equal(group.tokens[1], [4, 5])
    np.testing.assert_array_equal(group.lengths, [3, 2])
    assert len(group) == 2


@pytest.mark.parametrize("fields", [{}, FULL])
def test_group_survives_json_round_trip(fields):
    group = a_group(**fields)
    assert_same_group(Group.from_item(msgspec.json.decode(msgspec.json.encode(group.to_dict(binary=False)))), group)


@pytest.mark.parametrize("fields", [{}, FULL])
def test_group_survives_binary_messagepack_round_trip(fields):
    group = a_group(**fields)
    assert_same_group(
        Group.from_item(msgspec.msgpack.decode(msgspec.msgpack.encode(group.to_dict(binary=True)))), group
    )


def test_binary_arrays_are_little_endian_and_concatenated():
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(a_group(**FULL).to_dict(binary=True)))
    assert sent["tokens"] == np.array([1, 2, 3, 4, 5], "<i4").tobytes()
    assert sent["lengths"] == np.array([3, 2], "<i4").tobytes()
    assert sent["advantages"] == np.array([0, 0.5, 0.25, 0, -2], "<f4").tobytes()
    assert sent["scores"] == [0.1, -1.0]


def test_fields_that_are_none_are_not_sent():
    assert set(a_group().to_dict(binary=False)) == {"tokens", "masks", "scores"}


@pytest.mark.parametrize("scores", [[True, False], np.array([True, False]), [np.bool_(True), 0.0], [True, 0]], ids=str)
def test_boolean_scores_become_one_and_zero(scores):
    found = a_group(scores=scores)
    assert found.scores.tolist() == [1.0, 0.0] and found.scores.dtype == np.float64
    assert str(found.to_dict(binary=True)["scores"]) == "[1.0, 0.0]"


def test_null_override_becomes_empty_dict():
    assert a_group(overrides=[None, {"set_advantage_to_zero": True}]).to_dict(binary=False)["overrides"] == [
        {},
        {"set_advantage_to_zero": True},
    ]


def test_group_can_be_made_from_batch_item_with_arrays():
    tokens = np.array([[1, 2], [3, 4]])
    item = {"tokens": tokens, "masks": np.where(tokens == 1, -100, tokens), "scores": np.array([True, False])}
    found = Group.from_item({**item, "advantages": np.ones((2, 2)), "inference_logprobs": []})
    assert [row.tolist() for row in (*found.tokens, *found.masks)] == [[1, 2], [3, 4], [-100, 2], [3, 4]]
    assert found.scores.tolist() == [1.0, 0.0] and found.inference_logprobs is None
    assert [row.tolist() for row in found.advantages] == [[1.0, 1.0], [1.0, 1.0]]


def test_binary_scores_are_decoded():
    item = msgspec.msgpack.decode(msgspec.msgpack.encode(a_group().to_dict(binary=True)))
    item["scores"] = np.array([0.5, 2.0], "<f4").tobytes()
    np.testing.assert_array_equal(Group.from_item(item).scores, [0.5, 2.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [], "masks": [], "scores": []}, "at least one sequence"),
        ({"overrides": {"temperature": 1}}, "overrides must be a list with a dict for each sequence.*; got dict"),
        ({"overrides": [{}, "zero"]}, "overrides must be a list with a dict for each sequence.*; got list with str"),
        ({"tokens": [[1, 2, 3], []]}, "at least one token"),
        ({"masks": [[1, 2, 3]]}, "2 sequences needs the same number of rows of masks; got 1"),
        ({"masks": [[1, 2, 3], [4]]}, "Sequence 1 has 2 tokens, but 1 masks"),
        ({"scores": [1.0]}, "2 sequences needs the same number of scores; got 1"),
        ({"scores": [1.0, float("nan")]}, r"scores must be finite float32; got nan at position 1"),
        ({"scores": [1.0, -1e39]}, r"scores must be finite float32; got -1e\+39 at position 1"),
        ({"scores": [[1.0], [2.0]]}, "scores must be a row of numbers; got an array of float64 with 2 axes"),
        ({"tokens": [[1, 2, 3], [4, 5.5]]}, r"tokens\[1\] must be a row of integers; got an array of float64"),
        ({"tokens": [[1, 2, 3], [4, 2**31]]}, r"tokens\[1\] must be a row of int32; got numbers from 4 to 2147483648"),
        ({"tokens": [[1, 2, 3], [4, [5]]]}, r"tokens\[1\] must be a row of integers; got a ragged list"),
        ({"tokens": "abc"}, "tokens must be a list of rows"),
        ({"inference_logprobs": [[1.0, 0.0, -np.inf], [1.0, 0.0]]}, r"inference_logprobs\[0\] must be finite.*-inf"),
        ({"advantages": [[1.0, 0.0, 1e39], [1.0, 0.0]]}, r"advantages\[0\] must be finite float32; got 1e\+39"),
        ({"advantages": [[1.0, 0.0], [1.0, 0.0]]}, "Sequence 0 has 3 tokens, but 2 advantages"),
        ({"distill_token_ids": [[[1]]]}, "the same number of distill_token_ids; got 1"),
        ({"distill_logprobs": 5}, "distill_logprobs must be a list with an entry for each sequence; got int"),
        ({"generation_params": [1]}, "generation_params must be a dict, such as .*; got list"),
        ({"group_overrides": "x"}, "group_overrides must be a dict, such as .*; got str"),
        ({"advantages": 5}, "advantages must be a list of rows, one for each sequence; got int"),
        (
            {"advantages": [[1.0, 2.0, 3.0], 6]},
            r"advantages\[1\] must be a row of numbers; got an array of int64 with 0 axes",
        ),
        ({"scores": [10**400, 1.0]}, "scores must be a row of numbers; got an array of object"),
        ({"env_id": True}, r"env_id must be a 64-bit integer; got True \(bool\)"),
        ({"policy_version": 10**400}, r"policy_version must be a 64-bit integer; got 10{39} \(int\)"),
        ({"policy_version": 1.5}, r"policy_version must be a 64-bit integer; got 1.5 \(float\)"),
    ],
)
def test_invalid_group_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        a_group(**fields)


@pytest.mark.parametrize("advantages", [5, [5, 6], [[1.0, 2.0, 3.0], 6], "ab", [[1.0, 2.0, "x"], [1.0, 2.0]]], ids=str)
def test_item_with_invalid_advantages_is_refused(advantages):
    item = a_group().to_dict(binary=False)
    with pytest.raises(UsageError, match="advantages.* must be a (row of numbers|list of rows)"):
        Group.from_item({**item, "advantages": advantages})
    rows = Group.from_item({**item, "advantages": [None, [1.0, 2.0]]}).advantages
    assert rows[0] is None and rows[1].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("given", [10**400, -(10**400), 1e300, 1e39, float("inf"), float("nan"), "hot", [0.5], {}])
def test_temperature_that_is_not_finite_is_ignored(given):
    for source in ({"generation_params": {"temperature": given}}, {"overrides": [{"temperature": given}, {}]}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert a_group(**source).temperatures.tolist() == [1, 1]
            assert a_group(**source, group_overrides={"temperature": "0.5"}).temperatures[0] == 0.5


@pytest.mark.parametrize("lengths", [[3, 3], [-1, 6], []])
def test_lengths_that_do_not_match_arrays_are_refused(lengths):
    item = msgspec.msgpack.decode(msgspec.msgpack.encode(a_group().to_dict(binary=True)))
    item["lengths"] = np.array(lengths, "<i4").tobytes()
    with pytest.raises(UsageError, match="5 tokens, but its lengths sum to"):
        Group.from_item(item)


def test_empty_lists_from_atroposlib_clients_become_none():
    item = {"tokens": [[1, 2], [3]], "masks": [[1, 2], [-100]], "scores": [0.5, 1.0], "env_id": 0}
    group = Group.from_item({**item, "advantages": [], "ref_logprobs": [], "messages": [], "overrides": []})
    assert [row.tolist() for row in group.tokens] == item["tokens"]
    assert group.advantages is None and group.ref_logprobs is None and group.overrides is None
    assert group.messages is None and group.env_id == 0
