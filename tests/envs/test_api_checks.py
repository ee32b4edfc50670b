"""Pools check the values that environments return from `reset` and `step`."""

from __future__ import annotations

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from rlframe.agents.distributions import default_distribution
from rlframe.envs import AsyncEnv, SyncEnv, as_pool
from rlframe.errors import EnvError, UsageError


class Env(gymnasium.Env):
    """An environment with two actions, whose step returns the values of its class attributes."""

    observation_space: spaces.Space = spaces.Box(-1, 1, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)
    reward, terminated, truncated, info = 1.0, False, False, {}

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), self.reward, self.terminated, self.truncated, self.info


def make(**attributes):
    return type("Changed", (Env,), attributes)


def step(builder, size=2, type="loop", **options):
    with SyncEnv(builder, size, type, **options) as pool:
        pool.reset()
        return pool.step(np.zeros((size, *pool.action_spec.shape), pool.action_spec.dtype))


@pytest.mark.parametrize("options", [{}, {"action_repeat": 2}])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reward", [None, "2", b"2", np.str_("2"), 1j, np.complex64(1), [1.0], np.ones(1), {}])
def test_error_for_an_invalid_reward_contains_environment_and_value(reward, size, options):
    with pytest.raises(UsageError, match="Environment 0 gave .* as its reward: expected one number") as caught:
        step(make(reward=reward), size, **options)
    assert repr(reward) in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"action_repeat": 2}])
def test_error_for_an_invalid_reward_of_the_second_environment_contains_its_id(options):
    made = iter([make(), make(reward=None)])
    with pytest.raises(UsageError, match="Environment 1 gave None as its reward"):
        step(lambda: next(made)(), **options)


@pytest.mark.parametrize(
    "reward", [True, np.bool_(True), 1, np.int64(1), np.float16(1), np.float64(1), np.array(1.0), np.array(True)]
)
def test_booleans_and_numbers_of_all_dtypes_are_valid_rewards(reward):
    assert step(make(reward=reward)).reward.tolist() == [1.0, 1.0]
    assert step(make(reward=reward), action_repeat=3).reward.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("reward", [1e300, -1e39, 10**400])
def test_error_for_a_reward_too_large_for_float32_contains_the_original_value(reward):
    with pytest.raises(UsageError, match=r"Environment 0 gave -?1.* as its reward: expected at most 3\.4e\+38"):
        step(make(reward=reward))


def test_check_finite_false_allows_infinite_rewards():
    assert step(make(reward=-np.inf), check_finite=False).reward.tolist() == [-np.inf, -np.inf]
    with pytest.raises(EnvError, match="gave 'reward' with -inf"):
        step(make(reward=-np.inf))


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize("value", [None, "False", "", 2, 0.5, np.array([True]), np.array([True, False])])
def test_terminated_and_truncated_must_be_true_or_false(name, value):
    with pytest.raises(UsageError, match=f"Environment 0 gave .* as '{name}': expected True or False"):
        step(make(**{name: value}))


@pytest.mark.parametrize("yes", [True, 1, np.bool_(True), np.int64(1), np.array(True)])
def test_terminated_and_truncated_may_be_python_booleans_numpy_booleans_or_zero_and_one(yes):
    assert step(make(terminated=yes)).discount.tolist() == [0.0, 0.0]
    ended = step(make(truncated=yes))
    assert ended.discount.tolist() == [1.0, 1.0] and ended.step_type.tolist() == [2, 2]


def test_step_info_must_be_a_dict_or_none():
    assert step(make(info=None)).reward.tolist() == [1.0, 1.0]
    for info, received in ((5, "5"), (np.zeros(2), r"array\(\[0\., 0\.\]\)"), ([], r"\[\]")):
        with pytest.raises(UsageError, match=f"Environment 0 gave {received} as the info of a step: expected a dict"):
            step(make(info=info))


@pytest.mark.parametrize(
    ("result", "received"),
    [
        ((np.zeros(2), 1.0, False, {}), r"4 values .*API of Gym before 0\.26\. Replace `done` by `terminated, trunc"),
        ((np.zeros(2), 1.0, False), "3 values"),
        (np.zeros(5), "ndarray"),
        (None, "NoneType"),
    ],
)
def test_step_without_five_values_is_refused_and_four_values_are_reported_as_the_old_gym_api(result, received):
    with pytest.raises(UsageError, match="Environment 0 returned " + received.replace(" .*", r" from step\(\).*")):
        step(make(step=lambda self, action: result))


@pytest.mark.parametrize("info", [None, 5])
def test_reset_without_an_info_dict_is_reported_as_the_old_gym_api(info):
    with pytest.raises(UsageError, match=rf"returned \(observation, {info}\) from reset\(\).*dict.*Gym before 0\.26"):
        step(make(reset=lambda self, seed=None, options=None: (np.zeros(2), info)))


@pytest.mark.parametrize("result", [(), (np.zeros(2),), (np.zeros(2), {}, 0), (np.zeros(2), 0.0, False, False, {})])
def test_reset_with_a_wrong_number_of_values_is_not_reported_as_the_old_gym_api(result):
    with pytest.raises(UsageError, match=rf"returned {len(result)} values? from reset\(\): expected \(obs") as caught:
        step(make(reset=lambda self, seed=None, options=None: result))
    assert "Gym before" not in str(caught.value) and "Return `observation, {}`." in str(caught.value)


@pytest.mark.parametrize("result", [np.zeros(2), [0.0, 0.0], [0.0] * 3, {"a": 1}, None])
def test_reset_that_returns_only_an_observation_is_reported_as_the_old_gym_api(result):
    with pytest.raises(UsageError, match=r"from reset\(\).*Gym before 0\.26"):
        step(make(reset=lambda self, seed=None, options=None: result))


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: gymnasium.wrappers.TimeLimit(env, 5)])
def test_reset_without_a_seed_argument_is_reported_as_the_old_gym_api(wrap):
    old = make(reset=lambda self: np.zeros(2))
    with pytest.raises(UsageError, match=r"Environment 0 has a reset\(\) without `seed`.*Gym before 0\.26"):
        step(lambda: wrap(old()))


def test_type_error_inside_reset_is_reported_as_an_environment_error():
    def reset(self, *, seed=None, options=None):
        return None + 1

    game = make(reset=lambda self: None)  # has a `reset` without `seed`, which is not called
    for builder in (make(reset=reset), lambda: type("Raises", (Holds,), {"reset": reset})(game())):
        with pytest.raises(EnvError, match=r"raised TypeError in reset\(\): unsupported operand"):
            step(builder)


@pytest.mark.parametrize("type", ["loop", "thread"])
def test_error_in_an_automatic_reset_contains_the_method_name_reset(type):
    class Once(Env):
        terminated, resets = True, 0

        def reset(self, *, seed=None, options=None):
            self.resets += 1
            if self.resets > 1:
                raise RuntimeError("once only")
            return super().reset()

    with SyncEnv(Once, 2, type) as pool:
        pool.reset()
        pool.step(np.zeros(2, np.int32))
        with pytest.raises(EnvError, match=r"Environment 0 raised RuntimeError in reset\(\): once only"):
            pool.step(np.zeros(2, np.int32))


@pytest.mark.parametrize("attribute", ["observation_space", "action_space"])
def test_space_of_the_old_package_gym_is_refused_and_the_error_contains_its_replacement(attribute):
    old = pytest.importorskip("gym").spaces
    for space in (old.Box(-1, 1, (2,)), old.Dict(a=old.Discrete(2)), spaces.Tuple((spaces.Discrete(2),))):
        if isinstance(space, spaces.Tuple):
            space.spaces = (old.Discrete(2),)
        with pytest.raises(UsageError, match=r"comes from the old package gym: expected gymnasium\.spaces\."):
            step(make(**{attribute: space}))


@pytest.mark.parametrize(
    "space",
    [spaces.Box(-1, 1, (0,)), spaces.Box(-1, 1, (3, 0)), spaces.MultiDiscrete([]), spaces.Dict({}), spaces.Tuple(())],
)
def test_empty_space_is_refused(space):
    with pytest.raises(UsageError, match="The space of 'observation' (is empty|has the shape .*holds no value)"):
        step(make(observation_space=space))
    with pytest.raises(UsageError, match=r"The (space of 'action'|action space (Dict|Tuple)\(\) is not supported)"):
        step(make(action_space=space))


def test_error_contains_the_path_of_an_empty_leaf():
    inside = spaces.Dict(a=spaces.Box(-1, 1, (0,)), b=spaces.Discrete(2))
    with pytest.raises(UsageError, match=r"The space of 'observation\.a' has the shape \(0,\)"):
        step(make(observation_space=inside))


def test_policy_for_a_uint8_box_action_space_is_categorical_over_all_values():
    with SyncEnv(make(action_space=spaces.Box(0, 255, (2,), np.uint8)), 1) as pool:
        policy = default_distribution(pool.action_spec)
        assert policy.num_params == 2 * 256
        action = np.array([[255, 0]], np.uint8)
        pool.reset()
        assert pool.step(action).reward.tolist() == [1.0]


class Dm(dm_env.Environment):
    """A dm_env environment that returns the given timesteps."""

    def __init__(self, *steps):
        self._steps = iter(steps)

    def reset(self):
        return dm_env.restart(np.zeros(2))

    def step(self, action):
        return next(self._steps)

    def observation_spec(self):
        return specs.Array((2,), np.float64)

    def action_spec(self):
        return specs.DiscreteArray(2)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (dm_env.TimeStep(dm_env.StepType.MID, "2", 1.0, np.zeros(2)), "Environment 0 gave '2' as its reward"),
        (dm_env.TimeStep(dm_env.StepType.MID, 1.0, 1.5, np.zeros(2)), "gave 1.5 as its discount: .* from 0 to 1"),
        (dm_env.restart(np.zeros(2)), r"returned FIRST from step\(\) in the middle of an episode"),
        ((np.zeros(2), 1.0, False), r"returned tuple from step\(\): expected a dm_env.TimeStep"),
    ],
)
def test_invalid_dm_env_timestep_is_refused(result, message):
    with pytest.raises(UsageError, match=message):
        step(lambda: Dm(result), 1)


class Holds(Env):
    """A wrapper: an environment that has another object in an attribute."""

    def __init__(self, inner, name="inner"):
        self.__dict__[name] = inner


@pytest.mark.parametrize("type", ["loop", "thread"])
@pytest.mark.parametrize(
    "wrap",
    [lambda env: env, lambda env: gymnasium.wrappers.TimeLimit(env, 5), Holds, lambda env: Holds(Holds(env, "_game"))],
)
def test_builder_that_returns_the_same_object_twice_is_refused(type, wrap):
    env = Env()
    with pytest.raises(UsageError, match=r"Environments 0 and 1 are the same object \(Env\)"):
        SyncEnv(lambda: wrap(env), 2, type, num_workers=2)
    with pytest.raises(UsageError, match="are the same object"):
        AsyncEnv(lambda: wrap(env), 2, 1, "thread", num_workers=2)


class FunctionalEnv:
    """An environment that stores no state: `step` takes the state as an argument, as in Brax."""

    def reset(self, rng): ...

    def step(self, state, action): ...


class Clock:
    def reset(self): ...

    def step(self): ...


@pytest.mark.parametrize("shared", [Env, FunctionalEnv(), Clock(), gymnasium])
def test_environments_may_share_objects_that_the_pool_does_not_step(shared):
    assert step(lambda: Holds(shared, "env")).reward.tolist() == [1.0, 1.0]


@pytest.mark.system
def test_builder_that_returns_the_same_object_twice_is_refused_in_a_worker_process():
    env = Env()
    made = [Env(), Env(), env, env]
    with pytest.raises(UsageError, match="Environments 2 and 3 are the same object"):
        SyncEnv(lambda: made.pop(0), 4, "process", num_workers=1)


def test_two_pools_cannot_step_the_same_environment_alternately():
    env = Env()
    first, second = as_pool(lambda: env), as_pool(lambda: env)
    first.reset()
    second.reset()
    assert second.step(np.zeros(1, np.int32)).reward.tolist() == [1.0]
    with pytest.raises(UsageError, match=r"Two pools step the same environment \(Env\) at the same time"):
        first.step(np.zeros(1, np.int32))


def test_second_pool_may_use_an_environment_after_the_first_pool():
    env = Env()
    for _ in range(2):
        pool = as_pool(env)
        pool.reset()
        assert pool.step(np.zeros(1, np.int32)).reward.tolist() == [1.0]
    old, new = as_pool(env), as_pool(env)
    for pool in (old, new, old):
        pool.reset()
        assert pool.step(np.zeros(1, np.int32)).reward.tolist() == [1.0]


class Levels(Env):
    """A wrapper that creates a new inner environment at each reset. Each episode has one step."""

    terminated = True
    env = None

    def reset(self, *, seed=None, options=None):
        self.env = Env()  # the new object can have the `id` of a deleted environment
        return super().reset()


def test_pools_whose_environments_create_new_inner_environments_at_each_reset_are_accepted():
    with (
        SyncEnv(Levels, 2) as first,
        SyncEnv(Levels, 2) as second,
        SyncEnv(Levels, 2, "thread", num_workers=2) as third,
    ):
        pools = (first, second, third)
        for pool in pools:
            pool.reset()
        for _ in range(20):
            for pool in pools:
                pool.step(np.zeros(2, np.int32))


def test_two_pools_cannot_share_a_wrapped_environment():
    inner = Env()
    first, second = as_pool(lambda: Holds(inner)), as_pool(lambda: Holds(inner, "game"))
    first.reset()
    second.reset()
    with pytest.raises(UsageError, match=r"Two pools step the same environment \(Env\) at the same time"):
        first.step(np.zeros(1, np.int32))
