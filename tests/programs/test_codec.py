"""Every space works in training, `act`, `evaluate`, `export` and `EnvServer`, because they use the same codec."""

from __future__ import annotations

import collections
import pickle

import jax
import jax.export
import numpy as np
import pytest
from gymnasium import spaces as g
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rlframe
from rlframe.agents.networks import MLPConfig
from rlframe.envs import EnvServer, as_pool
from rlframe.envs.codec import Codec
from rlframe.envs.spaces import codec_of_spaces
from rlframe.errors import UsageError
from rlframe.programs.policies.exported import check_codec
from tests.envs.test_server import served

ENVIRONMENT = """
import collections
import pathlib
import pickle

import gymnasium
import numpy as np

OBSERVED, TAKEN = pickle.loads((pathlib.Path(__file__).parent / "spaces.pickle").read_bytes())


def reordered(value):
    if isinstance(value, dict):
        return collections.OrderedDict((key, reordered(value[key])) for key in reversed(sorted(value)))
    return [reordered(one) for one in value] if isinstance(value, tuple) else value


class Strict(gymnasium.Env):
    # Returns random observations, and accepts only actions in its action space.
    observation_space, action_space = OBSERVED, TAKEN

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return reordered(self.observation_space.sample()), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        self.steps += 1
        return reordered(self.observation_space.sample()), 1.0, False, self.steps == 5, {}
"""

bounds = st.floats(-10, 10).flatmap(lambda low: st.tuples(st.just(low), st.floats(low + 0.01, low + 9)))
boxes = st.builds(
    lambda bound, shape, dtype: g.Box(dtype(bound[0]), dtype(bound[1]), shape, dtype),
    bounds,
    st.sampled_from([(1,), (2,), (2, 3)]),
    st.sampled_from([np.float32, np.float64]),
)
discretes = st.builds(lambda n, start: g.Discrete(n, start=start), st.integers(1, 5), st.integers(-9, 2**20))
multi_discretes = st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9)), min_size=1, max_size=3).map(
    lambda parts: g.MultiDiscrete([n for n, _ in parts], start=[start for _, start in parts])
)
integers = st.sampled_from([g.Box(0, 255, (3,), np.uint8), g.Box(-(2**31), 2**31 - 1, (2,), np.int64)])
leaves = st.one_of(boxes, discretes, multi_discretes, integers, st.just(g.MultiBinary(2)))
observed = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2).map(g.Dict),
        st.lists(inner, min_size=1, max_size=2).map(g.Tuple),
    ),
    max_leaves=3,
)
taken = st.one_of(boxes, discretes, multi_discretes, st.just(g.MultiBinary(2)))
cases = {"observation_space": observed, "action_space": taken, "frame_stack": st.sampled_from([1, 2])}


def narrow(value):
    """Return the value as a batch of size 1. Convert 64-bit numbers to 32 bits, because JAX uses 32 bits."""
    array = np.asarray(value)[None]
    return array.astype({"float64": np.float32, "int64": np.int32}.get(array.dtype.name, array.dtype))


def trained(folder, observation_space, action_space, **options):
    """Train for 16 steps in an environment with these spaces. Return the run directory and the environment's class."""
    (folder / "spaces.pickle").write_bytes(pickle.dumps((observation_space, action_space)))
    file = folder / "strict.py"
    file.write_text(ENVIRONMENT)
    rlframe.train("ppo", f"{file}:Strict", run_dir=folder / "run", steps=16, num_envs=2, preset="none", quiet=True,
                  unroll_length=4, num_epochs=1, num_minibatches=2,
                  eval_episodes=1, network="mlp", network_config=MLPConfig((8,)),
                  **options)  # fmt: skip
    names: dict = {"__file__": str(file)}
    exec(ENVIRONMENT, names)
    return folder / "run", names["Strict"]


def check(folder, observation_space, action_space, frame_stack):
    run, make = trained(folder, observation_space, action_space, frame_stack=frame_stack)
    assert rlframe.evaluate(run, episodes=2)["return_mean"] == 5.0
    policy, env = rlframe.load(run), make()
    exported = jax.export.deserialize(rlframe.export(run, folder / "policy").read_bytes())
    avals = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0][2]
    state, begins = [np.ones((1, *aval.shape[1:]), aval.dtype) for aval in avals], np.ones(1, bool)
    observation, _ = env.reset(seed=1)
    for _ in range(5):
        action, layout = policy.act(observation), policy.codec.layout
        given = layout.unflatten([narrow(leaf) for leaf in layout.flatten(observation)])
        (compiled,), state = exported.call(given, begins, state, np.uint32(0))
        compiled = np.asarray(compiled)
        np.testing.assert_allclose(compiled.astype(float), np.asarray(action, float), rtol=1e-4, atol=1e-5)
        assert env.action_space.contains(compiled.astype(env.action_space.dtype)[()])
        begins = np.zeros(1, bool)
        observation = env.step(action)[0]
    handle, node = served(EnvServer(lambda: rlframe.SyncEnv(make, 2, frame_stack=frame_stack)))
    pool, policy = as_pool(handle), rlframe.load(run)
    timestep = pool.reset()
    for _ in range(7):
        timestep = pool.step(policy.act(timestep))
    node.stop()


@pytest.mark.system
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(**cases)
def test_policy_actions_are_valid_in_the_training_environment(tmp_path_factory, **case):
    check(tmp_path_factory.mktemp("run"), **case)


@pytest.mark.system
@pytest.mark.timeout(900)  # 60 whole runs
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(**cases)
def test_policy_actions_are_valid_for_many_random_spaces(tmp_path_factory, **case):
    check(tmp_path_factory.mktemp("run"), **case)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (g.Dict(a=g.Dict({1: g.Discrete(2)})), "has the key 1, but keys in an exported file must be strings"),
        (g.Dict({("a", 1): g.Discrete(2)}), r"has the key \('a', 1\), but keys"),
        (g.Discrete(3, start=2**31 - 2), "'observation' starts at 2147483646"),
    ],
)
def test_spaces_that_export_does_not_support_are_refused(space, message):
    check_codec(codec_of_spaces(g.Dict(a=g.Tuple((g.Discrete(3, start=2**31 - 3),))), g.Discrete(2)))
    with pytest.raises(UsageError, match=message):
        check_codec(codec_of_spaces(space, g.Discrete(2)))


@pytest.mark.system
def test_policy_refuses_observations_outside_its_space(tmp_path):
    space = g.Dict(a=g.Discrete(3, start=-1), b=g.Box(-1, 1, (2,), np.float64))
    run, make = trained(tmp_path, space, g.Discrete(3, start=-1))
    policy, good = rlframe.load(run), collections.OrderedDict(b=[0.5, 0.5], a=-1)
    assert isinstance(policy.codec, Codec) and make().action_space.contains(policy.act(good))
    for change, message in [
        ({"a": 7}, "'observation.a' must be whole numbers from -1 to 1, got 7"),
        ({"a": 1.0}, r"'observation.a' must be int32 of shape \(\), got float64"),
        ({"b": [np.nan, 0]}, r"'observation.b' must be finite numbers, got nan at \(0,\)"),
        ({"b": [0, 1e300]}, r"'observation.b' must be numbers that fit float32, got 1e\+300 at \(1,\)"),
        ({"b": [[0], [1, 2]]}, "'observation.b' must be float32 of shape"),
        ({"c": 1}, "'observation' must be a dict with the keys"),
    ]:
        with pytest.raises(UsageError, match=message):
            policy.act({**good, **change})
    exported = jax.export.deserialize(rlframe.export(run, tmp_path / "policy").read_bytes())
    observation = {"a": np.array([0, 7, 0], np.int32), "b": np.array([[0, 0], [0, 0], [0, np.nan]], np.float32)}
    action, _ = exported.call(observation, np.ones(3, bool), [], np.uint32(0))
    # The exported function returns the smallest integer for an invalid observation.
    assert action[0] in (-1, 0, 1) and action[1] == action[2] == -(2**31)
