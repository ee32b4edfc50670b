"""Pools convert spaces and specs to the framework's specs. `as_pool` converts environments and builders to pools."""

from __future__ import annotations

import types

import dm_env
import gymnasium
import jax
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces as g

from rlframe.agents import PPO, PPOConfig
from rlframe.envs import SyncEnv, as_pool, spaces
from rlframe.envs.layout import Layout
from rlframe.errors import UsageError
from rlframe.types import FIRST, MID, TimeStep
from tests.envs.scripted import ScriptedDmEnv, ScriptedEnv


class Echo(gymnasium.Env):
    """An environment that returns the previous action. Like some real environments, it stores the action array."""

    def __init__(self, action_space):
        self.action_space = action_space
        self.observation_space = g.Box(-100, 100, action_space.shape, np.float32)
        self.given = np.zeros(action_space.shape)

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.action_space.shape, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        before, self.given = self.given, action
        return np.asarray(before, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("space", "spec", "actions"),
    [
        (g.Discrete(3), specs.DiscreteArray(3, np.int32), [0, 2]),
        (g.MultiDiscrete([3, 5]), specs.BoundedArray((2,), np.int32, 0, [2, 4]), [[2, 4], [0, 1]]),
        (g.MultiBinary(2), specs.BoundedArray((2,), np.int32, 0, 1), [[1, 0], [0, 1]]),
        (g.Box(-2.0, 2.0, (1,)), specs.BoundedArray((1,), np.float32, -2.0, 2.0), [[1.5], [-1.5]]),
        (g.Box(-2.0, 2.0, (1,), np.float64), specs.BoundedArray((1,), np.float32, -2.0, 2.0), [[1.5], [-1.5]]),
    ],
)
def test_environments_receive_copies_of_actions_in_the_dtype_of_their_action_space(space, spec, actions):
    with SyncEnv(lambda: Echo(space), 1) as pool:
        assert pool.action_spec == spec.replace(name="action")
        given = np.zeros((1, *spec.shape), spec.dtype)
        pool.reset()
        for action in actions:
            given[0] = action  # overwrite the array, to check that the environment has a copy
            kept = pool.step(given).observation
        np.testing.assert_array_equal(kept[0], actions[0])


def test_start_of_a_discrete_space_is_added_to_actions():
    with SyncEnv(lambda: Echo(g.Discrete(3, start=-1)), 1) as pool:
        pool.reset()
        seen = [float(pool.step(np.array([action])).observation[0]) for action in (0, 2, 1)]
    assert seen == [0.0, -1.0, 1.0]


@pytest.mark.parametrize("space", [g.Dict(a=g.Discrete(2)), g.Tuple((g.Discrete(2),)), g.Text(5)])
def test_unsupported_action_space_is_refused(space):
    with pytest.raises(UsageError, match=f"action space {type(space).__name__}"):
        spaces.codec_of_spaces(g.Discrete(2), space)


def observed_in(space):
    return spaces.codec_of_spaces(space, g.Discrete(2)).observation_spec


def test_error_for_an_observation_space_without_a_fixed_shape_contains_its_path():
    with pytest.raises(UsageError, match=r"'observation\.a\.0', Text"):
        observed_in(g.Dict(a=g.Tuple((g.Text(5),))))


@pytest.mark.parametrize("keys", [(1, "a"), (None, "a"), ((1, 2), ("a", 2))])
def test_error_for_dict_keys_that_cannot_be_sorted_contains_the_path_of_the_space(keys):
    mixed = {key: g.Discrete(2) for key in keys}
    with pytest.raises(UsageError, match=r"The space of 'observation\.in' has the keys .*, which JAX cannot sort"):
        observed_in(g.Dict({"in": g.Dict(mixed)}))
    with pytest.raises(UsageError, match="The space of 'observation' has the keys"):
        spaces.codec_of_specs({key: specs.DiscreteArray(2) for key in keys}, specs.DiscreteArray(2))


def test_64_bit_dtypes_and_bounds_become_32_bit_dtypes_and_bounds():
    spec = observed_in(g.Box(-np.inf, np.finfo(np.float64).max, (2,), np.float64))
    assert spec.dtype == np.float32
    np.testing.assert_array_equal(spec.minimum, [-np.inf, -np.inf])
    np.testing.assert_array_equal(spec.maximum, [np.inf, np.inf])
    assert observed_in(g.Box(0, 255, (2,), np.uint8)).dtype == np.uint8
    wide = observed_in(g.Box(0, 2**40, (1,), np.int64))
    assert (wide.dtype, wide.maximum[0]) == (np.int32, 2**31 - 1)


class Floors(ScriptedEnv):
    """An environment whose observation is a floor number from -1 to 3. If `nested` is True, the number is in a tree."""

    def __init__(self, nested):
        self.nested = nested
        floor = g.Discrete(5, start=-1)
        self.observation_space = g.Dict(a=g.Tuple((g.Discrete(9), floor)), b=floor) if nested else floor

    def _observation(self):
        return {"b": self.t - 1, "a": (self.t, np.int64(self.t - 1))} if self.nested else self.t - 1


def test_discrete_observations_start_at_zero():
    floor = specs.DiscreteArray(5, np.int32, "observation")
    with SyncEnv(lambda: Floors(False), 1) as pool:
        assert pool.observation_spec == floor and type(pool.observation_spec) is specs.DiscreteArray
        seen = [pool.reset().observation[0], pool.step(np.zeros(1, np.int32)).observation[0]]
    assert seen == [0, 1]
    with SyncEnv(lambda: Floors(True), 1) as pool:
        assert pool.observation_spec["a"][1] == floor.replace(name="observation.a.1")
        pool.reset()
        observation = pool.step(np.zeros(1, np.int32)).observation
    assert (observation["a"][0][0], observation["a"][1][0], observation["b"][0]) == (1, 1, 1)


@pytest.mark.parametrize("type", ["loop", "envpool"])
def test_agent_gets_one_input_for_each_value_of_a_discrete_observation(type):
    with SyncEnv("FrozenLake-v1", 2, type) as pool:
        agent = PPO(PPOConfig(), pool.observation_spec, pool.action_spec)
        assert pool.reset().observation.shape == (2,)
    shapes = jax.eval_shape(agent.initial_params, jax.random.PRNGKey(0))
    assert shapes["torso0_dense0"]["w"].shape == (16, 64)


def test_dm_env_specs_are_converted():
    tree = specs.DiscreteArray(3, np.int64), specs.BoundedArray((), int, 0, 2)
    codec = spaces.codec_of_specs(tree, specs.BoundedArray((), np.int64, 3, 6))
    observed = codec.observation_spec
    assert [type(spec) for spec in observed] == [specs.DiscreteArray, specs.BoundedArray]
    assert observed[0] == specs.DiscreteArray(3, np.int32, "observation.0")
    assert codec.action_spec == specs.DiscreteArray(4, np.int32, "action") and codec.action.start == 3
    assert codec.decode(np.array([0, 3], np.int32)) == [3, 6]
    with pytest.raises(UsageError, match="StringArray"):
        spaces.codec_of_specs({"a": specs.StringArray(())}, specs.DiscreteArray(2))


def test_layout_flattens_and_unflattens_trees():
    layout = Layout({"a": specs.Array((), np.float32), "b": (specs.Array((2,), np.uint8),)})
    tree = {"b": (2,), "a": 1}
    assert layout.flatten(tree) == [1, 2]
    assert layout.unflatten([1, 2]) == {"a": 1, "b": (2,)}
    with pytest.raises(UsageError, match=r"'observation' must be a dict with the keys \['a', 'b'\], got .* \['a'\]"):
        layout.flatten({"a": 1})


def test_as_pool_accepts_pools_environments_and_builders():
    with SyncEnv(ScriptedEnv, 2) as pool:
        assert as_pool(pool) is pool
    for env in (ScriptedEnv(), ScriptedDmEnv(), ScriptedEnv, lambda: SyncEnv(ScriptedEnv, 1)):
        with as_pool(env, seed=3) as pool:
            assert pool.num_envs == 1 and pool.reset().observation.shape == (1, 3)
    marks = [float(as_pool(ScriptedDmEnv, seed=seed).reset().observation[0, 0]) for seed in (3, 3, 4)]
    assert marks == [3.0, 3.0, 4.0]
    with pytest.raises(UsageError, match="got int"):
        as_pool(3)


class CounterPool:
    """A user's pool with two environments, as for a batched simulator. Each observation is a counter of steps."""

    num_envs = 2
    observation_spec = specs.Array((), np.float32, "observation")
    action_spec = specs.DiscreteArray(2, np.int32, "action")

    def __init__(self):
        self.t = 0

    def reset(self):
        self.t = 0
        return self.timestep(FIRST)

    def step(self, actions):
        self.t += 1
        return self.timestep(MID)

    def timestep(self, step_type):
        ones = np.ones(2, np.float32)
        return TimeStep(np.full(2, step_type), ones * (self.t > 0), ones, ones * self.t)


class AsyncCounterPool(CounterPool):
    wait_num, step = 1, None

    def recv(self):
        return np.zeros(1, np.int32), self.timestep(FIRST)

    def send(self, env_ids, actions):
        self.t += 1


def test_user_pool_needs_only_the_required_methods_of_its_protocol():
    pool = as_pool(CounterPool)
    assert pool.is_sync and pool.num_envs == 2
    assert pool.reset().observation.tolist() == [0, 0] and pool.step(np.zeros(2)).observation.tolist() == [1, 1]
    assert pool.get_state() is None and pool.sums() == {}
    pool.close()
    assert not as_pool(AsyncCounterPool()).is_sync


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("CartPole-v1", r"the name of an environment: expected a pool. Pass SyncEnv\('CartPole-v1', size\)"),
        (types.SimpleNamespace(num_envs=3, reset=None), "SimpleNamespace. A pool also needs step"),
        (types.SimpleNamespace(single_observation_space=3), "is a vector environment of gymnasium.vector"),
    ],
)
def test_as_pool_refuses_other_objects(given, message):
    with pytest.raises(UsageError, match=message):
        as_pool(given)


def test_pool_refuses_an_environment_instead_of_a_builder():
    with pytest.raises(UsageError, match="ScriptedEnv is a single environment, but a pool needs a new environment"):
        SyncEnv(ScriptedEnv(), 2)


class Wrong(ScriptedEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (Wrong, "Gym before 0.26"),
        (lambda: 3, "returned int"),
        (lambda: SyncEnv(ScriptedEnv, 2), "several environments"),
    ],
)
def test_builder_that_does_not_return_an_environment_is_refused(builder, message):
    with pytest.raises(UsageError, match=message):
        SyncEnv(builder, 1).reset()


class Fractional(ScriptedDmEnv):
    """A dm_env environment with a discount of 0.5."""

    def step(self, action):
        return dm_env.TimeStep(dm_env.StepType.MID, None, 0.5, np.zeros(3))


def test_pool_returns_the_discount_of_a_dm_env_environment():
    with SyncEnv(Fractional, 1) as pool:
        pool.reset()
        timestep = pool.step(np.zeros(1, np.int32))
    assert (timestep.discount[0], timestep.reward[0]) == (0.5, 0.0)
