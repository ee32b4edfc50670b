"""Pools refuse invalid actions before any environment steps."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from dm_env import specs

from rlframe.envs import AsyncEnv, SyncEnv
from rlframe.envs.checks import ActionCheck
from rlframe.errors import UsageError

SYNC_TYPES = ("loop", "thread", "process", "envpool")
MISSHAPEN = [
    ([1], r"'action' must be int32 of shape \(2,\), got int64 of shape \(1,\)"),
    ([1, 0, 1], r"got int64 of shape \(3,\)"),
    ([[1], [0]], r"got int64 of shape \(2, 1\)"),
    (1, r"got int64 of shape \(\)"),
    ([1.0, 0.0], r"got float64 of shape \(2,\)\. Floats are not cast to integers"),
    (np.ones(2, np.float32), "got float32"),
    ([[1], [0, 1]], "inhomogeneous"),
]
OUT_OF_RANGE = r"'action' must be between 0 and 1, got 7 in row 0 of the batch"


def refused(step, type):
    """Yield pairs of invalid actions for two environments and the expected error message.

    Python pools check the values of int32 actions only in the first batch. EnvPool checks them in every batch.
    """
    yield from MISSHAPEN
    yield [7, -3], OUT_OF_RANGE
    if step == 0 or type == "envpool":
        yield np.array([7, -3], np.int32), OUT_OF_RANGE


@pytest.mark.parametrize("type", SYNC_TYPES)
def test_step_refuses_invalid_actions_and_the_pool_continues(type):
    make = functools.partial(SyncEnv, "CartPole-v1", 2, type, seed=1, num_workers=1)
    with make() as pool, make() as twin:
        pool.reset()
        twin.reset()
        for step in range(3):
            for actions, message in refused(step, type):
                with pytest.raises(UsageError, match=message):
                    pool.step(actions)
            # The pool still has the same state as its twin, so the refused actions have stepped no environment.
            ours, expected = pool.step(np.array([0, 1], np.int32)), twin.step(np.array([0, 1], np.int32))
            np.testing.assert_array_equal(ours.observation, expected.observation)


@pytest.mark.parametrize("type", ["thread", "process", "envpool"])
def test_send_refuses_invalid_actions_and_the_pool_continues(type):
    with AsyncEnv("CartPole-v1", 3, 2, type, num_workers=1) as pool:
        for step in range(3):
            env_ids, _ = pool.recv()
            for actions, message in refused(step, type):
                with pytest.raises(UsageError, match=message):
                    pool.send(env_ids, actions)
            pool.send(env_ids, [0, 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_continuous_actions_must_be_finite(bad):
    actions = np.array([[0.5], [bad]], np.float32)
    for type in ("loop", "envpool"):
        with SyncEnv("Pendulum-v1", 2, type) as pool:
            pool.reset()
            for _ in range(2 if type == "envpool" else 1):
                with pytest.raises(UsageError, match=rf"'action' must be finite, got {bad} in row 1 of the batch"):
                    pool.step(actions)
                pool.step(np.zeros((2, 1), np.float32))


def discrete(num_values):
    return specs.DiscreteArray(num_values, np.int32, "action")


def test_valid_actions_keep_their_values_in_the_cast_to_the_spec_dtype():
    check = ActionCheck(discrete(5), every_value=True)
    for given in (np.array([4, 0], np.int64), np.array([4, 0], np.uint8), [4, 0]):
        actions = check(given, 2)
        assert actions.dtype == np.int32 and actions.tolist() == [4, 0]
    assert check(np.array([True, False]), 2).tolist() == [1, 0]
    same = np.array([4, 0], np.int32)
    assert check(same, 2) is same
    continuous = ActionCheck(specs.BoundedArray((1,), np.float32, -2.0, 2.0, "action"), every_value=True)
    for given in (np.array([[0.5], [3.0]]), np.array([[1], [3]])):  # 3 is outside the bounds, but allowed
        actions = continuous(given, 2)
        assert actions.dtype == np.float32 and actions.tolist() == given.tolist()


def test_actions_too_large_for_the_spec_dtype_are_refused():
    check = ActionCheck(discrete(5), every_value=False)
    continuous = ActionCheck(specs.BoundedArray((), np.float32, -2.0, 2.0, "action"), every_value=False)
    for _ in range(2):  # twice, because the first batch gets more checks
        check(np.array([1, 2], np.int32), 2)
        with pytest.raises(UsageError, match="between 0 and 4, got 4294967297 in row 1"):
            check([0, 2**32 + 1], 2)
        continuous(np.zeros(2, np.float32), 2)
        with pytest.raises(UsageError, match=r"must be numbers that fit float32, got 1e\+300 in row 0"):
            continuous([1e300, 0.0], 2)
    assert continuous(np.array([3e38, -3e38], np.float32), 2).tolist() == [np.float32(3e38), np.float32(-3e38)]


@pytest.mark.parametrize("num_values", [5, 500])
@pytest.mark.parametrize("size", [8, 1000])
def test_action_range_is_checked_in_small_and_large_batches(num_values, size):
    check = ActionCheck(discrete(num_values), every_value=True)
    actions = np.full(size, num_values - 1, np.int32)
    assert check(actions, size) is actions
    for bad in (num_values, -1):
        actions[size - 2] = bad
        with pytest.raises(UsageError, match=rf"got {bad} in row {size - 2} of"):
            check(actions, size)


def test_each_component_of_a_multi_discrete_action_has_its_own_range():
    check = ActionCheck(specs.BoundedArray((2,), np.int32, [0, 0], [1, 9], "action"), every_value=True)
    assert check([[1, 9], [0, 0]], 2).tolist() == [[1, 9], [0, 0]]
    with pytest.raises(UsageError, match=r"between \[0 0\] and \[1 9\], got 2 in row 1"):
        check([[1, 9], [2, 0]], 2)


@pytest.mark.parametrize("type", ["thread", "process", "envpool"])
def test_send_refuses_ids_of_environments_that_are_still_stepping(type):
    with AsyncEnv("CartPole-v1", 4, 2, type, num_workers=1) as pool:
        env_ids, _ = pool.recv()
        one, other = env_ids.tolist()
        stepping = next(i for i in range(4) if i not in (one, other))
        for ids, message in [
            ([one, one], f"environment {one} twice in one call"),
            ([one, 4], "environment 4: expected an id from 0 to 3"),
            ([-1, one], "environment -1: expected an id from 0 to 3"),
            ([one, stepping], f"environment {stepping}, which is still stepping"),
            ([float(one), 0.5], "'env_ids' must be .* integers, got float64"),
        ]:
            with pytest.raises(UsageError, match=message):
                pool.send(ids, [0, 0])
        pool.send(env_ids, [0, 1])
        with pytest.raises(UsageError, match=f"environment {one}, which is still stepping"):
            pool.send([one], [0])
        env_ids, timestep = pool.recv()
        assert len(set(env_ids.tolist())) == 2 and len(timestep.reward) == 2
