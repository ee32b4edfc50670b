"""The codec converts valid values exactly and refuses invalid values, in every type of pool."""

from __future__ import annotations

import collections
import pathlib
import pickle

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces as g

from rlframe.agents.networks import flatten_observation
from rlframe.envs import SyncEnv
from rlframe.envs.spaces import codec_of_spaces
from rlframe.errors import EnvError, UsageError
from rlframe.types import MultiDiscreteArray, specs


class ListEnv(gymnasium.Env):
    """An environment that returns the given observations in order, and refuses actions outside its action space."""

    def __init__(self, space, values, action_space=None):
        self.observation_space, self.values = space, values
        self.action_space = g.Discrete(2) if action_space is None else action_space
        self.given = []

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return self.values[0], {}

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        self.given.append(action)
        self.at += 1
        return self.values[self.at], 0.0, False, False, {}


def observed(space, *values, type="loop"):
    """Return the last observations of two environments: one repeats `values[0]`, and one returns all values."""
    made = iter([ListEnv(space, [values[0]] * len(values)), ListEnv(space, list(values))])
    with SyncEnv(lambda: next(made), 2, type, num_workers=1) as pool:
        pool.reset()
        for _ in values[1:]:
            timestep = pool.step(np.zeros(2, np.int32))
    return timestep.observation


UINT8, DISCRETE, MULTI = g.Box(0, 255, (2,), np.uint8), g.Discrete(3, start=-1), g.MultiDiscrete([2, 3])
OUTSIDE = [
    (g.Box(0, 2**40, (1,), np.int64), [2**32 + 7], "4294967303 at (0,): expected whole numbers that fit int32"),
    (UINT8, np.array([1, 300], np.uint16), "300 at (1,): expected whole numbers that fit uint8, 0 to 255"),
    (UINT8, [-1, 3], "-1 at (0,): expected whole numbers that fit uint8"),
    (g.Box(-1, 1, (), np.float64), np.float64(1e300), "1e+300: expected numbers that fit float32"),
    (g.Box(-1, 1, (2,), np.float32), np.array([0, -1e300]), "-1e+300 at (1,): expected numbers that fit float32"),
    (DISCRETE, 2, "2: expected whole numbers from -1 to 1"),
    (DISCRETE, np.int64(-2), "-2: expected whole numbers from -1 to 1"),
    (DISCRETE, 2**32, "4294967296: expected whole numbers from -1 to 1"),
    (MULTI, np.array([1, 3]), "3 at (1,): expected whole numbers from [0 0] to [1 2]"),
    (MULTI, [-1, 0], "-1 at (0,): expected"),
    (DISCRETE, np.uint64(2**64 - 1), "18446744073709551615: expected whole numbers from -1 to 1"),
    (g.MultiDiscrete([2, 3], start=[-1, 5]), np.array([2**64 - 1, 5], np.uint64), "18446744073709551615 at (0,)"),
]  # fmt: skip


@pytest.mark.parametrize("type", ["loop", "thread"])
@pytest.mark.parametrize(("space", "value", "message"), OUTSIDE)
def test_value_outside_its_space_is_refused_with_the_environment_id(space, value, message, type):
    with pytest.raises(EnvError) as raised:
        observed(space, space.low if isinstance(space, g.Box) else space.sample(), value, type=type)
    assert f"Environment 1 gave 'observation' with {message}" in str(raised.value)


class OutsideInAProcess(ListEnv):
    def __init__(self):
        super().__init__(g.Discrete(3), [2, 7])


@pytest.mark.system
def test_error_from_a_worker_process_contains_the_environment_id_and_the_value():
    with SyncEnv(OutsideInAProcess, 2, "process", num_workers=1) as pool:
        pool.reset()
        with pytest.raises(
            EnvError, match="Environment 0 gave 'observation' with 7: expected whole numbers from 0 to 2"
        ):
            pool.step(np.zeros(2, np.int32))


@pytest.mark.parametrize("value", [1.0, "1", None, [1], [[1], [2, 3]], np.float32(1)])
def test_category_with_a_wrong_dtype_or_shape_is_refused(value):
    with pytest.raises(UsageError, match="Environment 1 gave 'observation' as .*its space requires int32 of shape"):
        observed(DISCRETE, 0, value)


def test_valid_observations_keep_their_values_for_all_input_types():
    assert observed(DISCRETE, 0, np.int8(1)).tolist() == [1, 2]
    assert observed(UINT8, [0, 0], [7, 255]).tolist() == [[0, 0], [7, 255]]
    starts_high = g.Discrete(3, start=2**40)
    assert observed(starts_high, 2**40, 2**40 + 2).tolist() == [0, 2]
    low = g.MultiDiscrete([2, 3], start=[-1, 5])
    assert observed(low, [-1, 5], np.array([0, 7])).tolist() == [[0, 0], [1, 2]]
    tree = g.Dict(a=g.Tuple((DISCRETE, UINT8)))
    given = [collections.OrderedDict(a=[n, np.array([n, 1], np.int64)]) for n in (0, 1)]
    seen = observed(tree, *given)
    assert seen["a"][0].tolist() == [1, 2] and seen["a"][1].tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize("space", [g.Discrete(2**40), g.MultiDiscrete([3, 2**40])])
def test_space_with_more_categories_than_int32_allows_is_refused(space):
    with pytest.raises(UsageError, match=r"The space of 'observation', .*, has 1099511627776 values"):
        codec_of_spaces(space, g.Discrete(2))
    with pytest.raises(UsageError, match=r"The space of 'action', .*, has 1099511627776 values"):
        codec_of_spaces(g.Discrete(2), space)


def test_float64_action_bounds_are_rounded_inward_and_actions_are_clipped_to_the_bounds():
    space = g.Box(np.array([-0.1, 0.3, -np.inf]), np.array([0.1, 0.7, 0.7]), (3,), np.float64)
    env = ListEnv(g.Discrete(2), [0] * 9, space)
    with SyncEnv(lambda: env, 1) as pool:
        low, high = pool.action_spec.minimum, pool.action_spec.maximum
        assert low.dtype == np.float32 and (low >= space.low).all() and (high <= space.high).all()
        assert float(np.nextafter(high, np.float32(np.inf))[0]) > 0.1 and low[2] == -np.inf
        pool.reset()
        for action in (low, high, [-5.0, 5.0, 5.0]):
            pool.step(np.nan_to_num(np.array([action], np.float32), neginf=-3.0))
    assert env.given[2].tolist() == [-0.1, 0.7, 0.7]  # equal to the float64 bounds of the space, without rounding


def test_start_of_a_multi_discrete_space_is_added_to_actions():
    env = ListEnv(g.Discrete(2), [0] * 9, g.MultiDiscrete([2, 3], start=[-1, 5]))
    with SyncEnv(lambda: env, 1) as pool:
        pool.reset()
        pool.step(np.array([[0, 2]], np.int32))
    assert env.given[0].tolist() == [-1, 7]


def test_each_component_of_a_multi_discrete_becomes_a_one_hot_vector():
    spec = codec_of_spaces(g.MultiDiscrete([[2, 3], [1, 2]]), g.Discrete(2)).observation_spec
    assert isinstance(spec, MultiDiscreteArray) and spec.num_values.tolist() == [[2, 3], [1, 2]]
    rows = flatten_observation(spec, np.array([[[1, 2], [0, 0]], [[0, 1], [0, 1]]], np.int32))
    assert rows.tolist() == [[0, 1, 0, 0, 1, 1, 1, 0], [1, 0, 0, 1, 0, 1, 0, 1]]


def test_stacked_discrete_observations_become_multi_discrete():
    env = ListEnv(g.Discrete(3, start=4), [4, 6, 5])
    with SyncEnv(lambda: env, 1, frame_stack=2) as pool:
        spec = pool.observation_spec
        assert isinstance(spec, MultiDiscreteArray) and spec.num_values.tolist() == [3, 3]
        pool.reset()
        stacked = pool.step(np.zeros(1, np.int32)).observation
    assert stacked.tolist() == [[0, 2]]
    assert flatten_observation(spec, stacked).tolist() == [[1, 0, 0, 0, 0, 1]]
    cube = MultiDiscreteArray(np.full((2, 2, 2), 3))
    assert jax.eval_shape(lambda rows: flatten_observation(cube, rows), np.zeros((1, 2, 2, 2), np.int32)).shape == (
        1,
        24,
    )


# Row of the table in docs/learn/your-network.md -> (example of a space, number of network inputs for this space).
SEEN = {
    "Box of floats": (g.Box(-1, 1, (3,), np.float64), 3),
    "Box of integers": (g.Box(0, 9, (3,), np.int64), 3),
    "Discrete": (DISCRETE, 3),
    "MultiDiscrete": (MULTI, 5),
    "Discrete or MultiDiscrete, with `--frame-stack`": (MULTI, 10),
    "MultiBinary": (g.MultiBinary(3), 3),
    "Dict, Tuple": (g.Dict(a=DISCRETE, b=g.Tuple((MULTI,))), 8),
}


def test_docs_table_of_network_inputs_is_correct():
    page = (pathlib.Path(__file__).parents[2] / "docs/learn/your-network.md").read_text()
    table = page.partition("| space |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = {name.strip(): spec for _, name, _, spec, *_ in (line.split("|") for line in table)}
    assert rows.keys() == SEEN.keys()
    for name, (space, inputs) in SEEN.items():
        frames = 2 if "frame-stack" in name else 1
        with SyncEnv(lambda space=space: ListEnv(space, [space.sample()]), 1, frame_stack=frames) as pool:
            spec, observation = pool.observation_spec, pool.reset().observation
        assert type(spec).__name__.lower() in rows[name].lower(), name
        assert flatten_observation(spec, observation).shape == (1, inputs), name


def test_codec_can_be_pickled_and_depends_on_the_start_of_a_space():
    spaces = g.Dict(a=DISCRETE, b=MULTI), g.Discrete(3, start=-1)
    codec = codec_of_spaces(*spaces)
    again = pickle.loads(pickle.dumps(codec))
    assert again == codec and isinstance(again.observation_spec["b"], MultiDiscreteArray)
    assert again.observation_spec["a"] == specs.DiscreteArray(3, np.int32)
    assert codec != codec_of_spaces(spaces[0], g.Discrete(3)) and "starting at [-1, [0, 0], -1]" in repr(codec)
