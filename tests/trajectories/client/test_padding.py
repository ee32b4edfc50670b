"""Tests of `pad`, which turns groups with sequences of different lengths into rectangular arrays."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest

from rlframe.trajectories import Group
from rlframe.trajectories.client.batches import bucket_lengths, pad
from tests.trajectories.client.test_groups import a_group

BUCKETS = [4, 8]


def test_arrays_are_padded_and_masked():
    one = a_group()  # The tokens are [1, 2, 3] and [4, 5]. The mask excludes the first token of each sequence.
    two = Group([[7]], [[7]], [2.0])
    batch, cut = pad([one, two], BUCKETS)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 0], [4, 5, 0, 0], [7, 0, 0, 0]])
    np.testing.assert_array_equal(batch.mask, [[0, 1, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_allclose(batch.advantages, [[0, 0.1, 0.1, 0], [0, -1, 0, 0], [2, 0, 0, 0]])
    np.testing.assert_allclose(batch.scores, [0.1, -1, 2])
    np.testing.assert_array_equal(batch.lengths, [3, 2, 1])
    np.testing.assert_array_equal(batch.group, [0, 0, 1])
    assert batch.inference_logprobs is None and batch.ref_logprobs is None
    assert cut == 0
    dtypes = {name: getattr(batch, name).dtype.name for name in ("tokens", "lengths", "group", "mask", "scores")}
    assert dtypes == dict(tokens="int32", lengths="int32", group="int32", mask="float32", scores="float32")
    assert batch.advantages.dtype == np.float32


def test_sent_advantages_and_logprobs_are_used_only_at_trained_tokens():
    group = a_group(
        advantages=[[9, 0.5, 0.25], [9, -2]],
        inference_logprobs=[[1, -0.5, -1.5], [1, -0.125]],
        ref_logprobs=[[1, -0.25, -1], [1, -0.5]],
    )
    batch, _ = pad([group, a_group(inference_logprobs=[[1, -3, -4], [1, -5]])], BUCKETS)
    np.testing.assert_allclose(batch.advantages[:2], [[0, 0.5, 0.25, 0], [0, -2, 0, 0]])
    np.testing.assert_allclose(batch.advantages[2:], [[0, 0.1, 0.1, 0], [0, -1, 0, 0]])
    np.testing.assert_array_equal(batch.has_advantages, [True, True, False, False])
    expected = [[0, -0.5, -1.5, 0], [0, -0.125, 0, 0], [0, -3, -4, 0], [0, -5, 0, 0]]
    np.testing.assert_allclose(batch.inference_logprobs, expected)


def test_override_sets_advantage_of_its_sequence_to_zero():
    sent = [[9, 0.5, 0.25], [9, -2]]
    for flag in (True, 1):
        plain = a_group(overrides=[{}, {"set_advantage_to_zero": flag}])
        given = a_group(overrides=[{"set_advantage_to_zero": flag}], advantages=sent)  # 1 override for 2 sequences
        batch, _ = pad([plain, given], BUCKETS)
        np.testing.assert_allclose(batch.advantages[:2], [[0, 0.1, 0.1, 0], [0, 0, 0, 0]])
        np.testing.assert_allclose(batch.advantages[2:], [[0, 0, 0, 0], [0, -2, 0, 0]])
        np.testing.assert_array_equal(batch.has_advantages, [False, True, True, True])
        np.testing.assert_allclose(batch.scores, [0.1, -1] * 2)  # The override leaves the scores unchanged.
    batch, _ = pad([a_group(overrides=[{"set_advantage_to_zero": False}, {}, {}])], BUCKETS)
    assert not batch.has_advantages.any()


def test_temperature_comes_from_override_then_generation_params_then_group():
    """Temperatures of 0 or less count as 1, as in atroposlib's trainer."""
    every = {"overrides": [{"temperature": 0.5}, {}], "generation_params": {"temperature": 0.7}}
    groups = [
        a_group(**every, group_overrides={"temperature": 0.9}),
        a_group(group_overrides={"temperature": 2}),
        a_group(overrides=[{"temperature": 0}], generation_params={"temperature": -1.0, "n": 4}),
        a_group(overrides=[{"temperature": None}, None], generation_params={"temperature": "0.8"}),
        a_group(generation_params={"temperature": 1e-30}),
    ]
    batch, _ = pad(groups, BUCKETS)
    expected = [0.5, 0.7, 2, 2, 1, 1, 0.8, 0.8, 0.01, 0.01]
    np.testing.assert_allclose(batch.temperature, np.float32(expected))
    assert batch.temperature.dtype == np.float32


@pytest.mark.parametrize("fields", [{}, {"generation_params": {"temperature": 1.0}}, {"overrides": [{}, {}]}])
def test_temperature_is_none_if_all_values_are_one(fields):
    assert pad([a_group(), a_group(**fields)], BUCKETS)[0].temperature is None


def test_advantages_of_wrong_length_are_ignored():
    sent = a_group().to_dict(binary=False)
    one = Group.from_item({**sent, "advantages": [[9, 0.5, 0.25], [9, 9, 9]]})
    two = Group.from_item({**sent, "advantages": [[9, 9, 9]]})
    batch, _ = pad([one, two], BUCKETS)
    np.testing.assert_array_equal(batch.has_advantages, [True, False, False, False])
    np.testing.assert_allclose(batch.advantages[:2], [[0, 0.5, 0.25, 0], [0, -1, 0, 0]])
    assert one.to_dict(binary=True)["advantages"] == [[9, 0.5, 0.25], []]


def test_field_is_none_and_logged_if_some_groups_lack_it(caplog):
    having = a_group(ref_logprobs=[[1, -0.25, -1], [1, -0.5]])
    with caplog.at_level(logging.WARNING):
        batch, _ = pad([having, a_group(env_id=5)], BUCKETS)
    assert batch.ref_logprobs is None
    assert "without ref_logprobs: only 1 of its 2 groups have them. They are missing from environment 5" in caplog.text


def test_long_sequences_are_truncated_and_counted():
    long = Group([list(range(10)), [1]], [list(range(10)), [1]], [1.0, 0.0], inference_logprobs=[[-1] * 10, [-2]])
    batch, cut = pad([long], BUCKETS)
    assert cut == 1
    np.testing.assert_array_equal(batch.tokens[0], range(8))
    np.testing.assert_array_equal(batch.lengths, [8, 1])
    np.testing.assert_array_equal(batch.mask, [[1] * 8, [1] + [0] * 7])
    np.testing.assert_array_equal(batch.inference_logprobs[0], [-1] * 8)


@pytest.mark.parametrize(("longest", "length"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 8)])
def test_batch_has_length_of_smallest_sufficient_bucket(longest, length):
    batch, _ = pad([Group([[1] * longest], [[1] * longest], [0.0])], BUCKETS)
    assert batch.tokens.shape == (1, length)


def test_each_bucket_length_is_at_most_1_5_times_the_previous():
    assert bucket_lengths(16) == [16]
    assert bucket_lengths(64) == [64]
    assert bucket_lengths(200) == [64, 96, 128, 192, 200]
    assert bucket_lengths(256) == [64, 96, 128, 192, 256]
    many = bucket_lengths(65_536)
    assert len(many) == 21 and many[-1] == 65_536
    assert all(longer <= 1.5 * shorter for shorter, longer in itertools.pairwise(many))
