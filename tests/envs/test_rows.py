"""`ObservationRows` writes observations of all dtypes, and checks a whole batch in one operation."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as g

from rlframe.envs import SyncEnv
from rlframe.envs.codec import ObservationLeaf
from rlframe.errors import EnvError, UsageError


class ListEnv(gymnasium.Env):
    """An environment that returns one of the given observations at each reset and step."""

    action_space = g.Discrete(2)

    def __init__(self, space, values, reward=1.0):
        self.observation_space, self._values, self._reward = space, iter(values), reward

    def reset(self, *, seed=None, options=None):
        return next(self._values), {}

    def step(self, action):
        return next(self._values), self._reward, False, False, {}


def pool_of(space, *envs, type="loop"):
    """Return a pool with one worker. For each list of values in `envs`, it has one environment."""
    made = iter([ListEnv(space, values) for values in envs])
    return SyncEnv(lambda: next(made), len(envs), type, num_workers=None if type == "loop" else 1)


def seen(space, *envs):
    """Step a pool of `ListEnv`s, and return the observations of all steps as lists."""
    with pool_of(space, *envs) as pool:
        pool.reset()
        return [pool.step(np.zeros(len(envs), np.int32)).observation.tolist() for _ in envs[0][1:]]


def test_observations_of_mixed_dtypes_keep_their_values():
    f32, f64 = np.array([0.5], np.float32), np.array([0.25])
    first, second = [f32, f64, f32, [2.0], f64, np.array([3], np.int8)], [f64, f32, f32, f64, [1], f32]
    expected = [[[0.25], [0.5]], [[0.5], [0.5]], [[2.0], [0.25]], [[0.25], [1.0]], [[3.0], [0.5]]]
    assert seen(g.Box(-9, 9, (1,), np.float32), first, second) == expected
    i64, u8 = np.array([7]), np.array([200], np.uint8)
    assert seen(g.Box(0, 255, (1,), np.uint8), [u8, u8, i64, u8], [u8, i64, [5], i64]) == [
        [[200], [7]],
        [[7], [5]],
        [[200], [7]],
    ]


def test_categories_of_all_dtypes_start_at_zero():
    values = [4, np.int64(5), np.int8(6), np.array(4), np.uint64(5), True + 4]
    assert seen(g.Discrete(3, start=4), values, values[::-1]) == [[1, 1], [2, 0], [0, 2], [1, 1], [1, 0]]
    rows = [np.array([4, 1]), [5, 0], (6, 1), np.array([4, 0], np.int16)]
    assert seen(g.MultiDiscrete([3, 2], start=[4, 0]), rows, rows[::-1]) == [
        [[1, 0], [2, 1]],
        [[2, 1], [1, 0]],
        [[0, 0], [0, 1]],
    ]


F64, I64, TWO = np.array([0.5]), np.array([5]), g.MultiDiscrete([3, 2])
WRONG = [
    (g.Box(-9, 9, (1,), np.float64), F64, np.array([1e300]), "1e+300 at (0,): expected numbers that fit float32"),
    (g.Box(-9, 9, (1,), np.float32), F64, [-1e300], "-1e+300 at (0,): expected numbers that fit float32"),
    (g.Box(0, 2**40, (1,), np.int64), I64, np.array([2**32 + 7]), "4294967303 at (0,): expected whole numbers that"),
    (g.Box(0, 255, (1,), np.uint8), I64, [300], "300 at (0,): expected whole numbers that fit uint8, 0 to 255"),
    (TWO, np.array([2, 1]), np.array([2, -1]), "-1 at (1,): expected whole numbers from [0 0] to [2 1]"),
    (g.Discrete(3, start=4), np.int64(4), np.int64(7), "7: expected whole numbers from 4 to 6"),
    (g.Discrete(3), 2, 2**70, "as 1180591620717411303424, but its space requires int32 of shape ()"),
    (g.Discrete(3), 2, np.float64(1), "as float64 of shape (), but its space requires int32 of shape ()"),
]  # fmt: skip


@pytest.mark.parametrize("type", ["loop", "thread"])
@pytest.mark.parametrize(("space", "right", "wrong", "message"), WRONG)
def test_value_outside_its_space_in_a_later_step_is_refused_with_the_environment_id_and_leaf(
    space, right, wrong, message, type
):
    for wanted, inside, wrap in (
        ("observation", space, lambda value: value),
        ("observation.b", g.Dict(a=g.Discrete(2), b=space), lambda value: {"a": 1, "b": value}),
        ("observation.1", g.Tuple((space, space)), lambda value: (right, value)),
    ):
        values = [wrap(right)] * 3
        with pool_of(inside, [*values, wrap(right)], [*values, wrap(wrong)], type=type) as pool:
            pool.reset()
            for _ in range(2):
                pool.step(np.zeros(2, np.int32))
            with pytest.raises((EnvError, UsageError)) as raised:
                pool.step(np.zeros(2, np.int32))
        assert f"Environment 1 gave '{wanted}' " in str(raised.value) and message in str(raised.value)


def test_pool_copies_an_observation_before_it_steps_the_next_environment():
    shared = np.zeros(1)

    class Counts(ListEnv):
        def step(self, action):
            shared[:] += 1
            return shared, 0.0, False, False, {}

    with SyncEnv(lambda: Counts(g.Box(-9, 9, (1,), np.float64), [shared] * 9), 3) as pool:
        pool.reset()
        assert pool.step(np.zeros(3, np.int32)).observation.tolist() == [[1], [2], [3]]
        assert pool.step(np.zeros(3, np.int32)).observation.tolist() == [[4], [5], [6]]


@pytest.mark.parametrize(
    "space",
    [
        *(g.Box(0, 9, (2,), dtype) for dtype in (np.float32, np.float64, np.int64, np.uint8)),
        *(g.Discrete(3, start=4), TWO, g.MultiBinary(3)),
        g.Dict(a=TWO, b=g.Box(0, 9, (2,), np.float64), c=g.Discrete(2)),
    ],
)
def test_values_of_all_environments_are_checked_in_one_operation(space, monkeypatch):
    space.seed(0)
    values = [space.sample() for _ in range(4)]
    with pool_of(space, *[values] * 8) as pool:
        pool.reset()
        monkeypatch.setattr(ObservationLeaf, "encode", lambda *args, **kwargs: pytest.fail("one by one"))
        for _ in range(3):
            pool.step(np.zeros(8, np.int32))


@pytest.mark.parametrize("rewards", [(1.0, None), (np.float32(1), "2"), (2.0, [1.0]), (True, 1j), (1.0, 1e300)])
def test_error_for_one_invalid_reward_contains_the_environment_id(rewards):
    made = iter([ListEnv(g.Discrete(2), [0] * 3, reward) for reward in rewards])
    with SyncEnv(lambda: next(made), 2) as pool:
        pool.reset()
        with pytest.raises(UsageError, match="Environment 1 gave .* as its reward: expected"):
            pool.step(np.zeros(2, np.int32))


def test_rewards_of_different_types_keep_their_values():
    made = iter([ListEnv(g.Discrete(2), [0] * 3, reward) for reward in (True, 2, np.float16(0.5), np.array(4.0))])
    with SyncEnv(lambda: next(made), 4) as pool:
        pool.reset()
        assert pool.step(np.zeros(4, np.int32)).reward.tolist() == [1.0, 2.0, 0.5, 4.0]
