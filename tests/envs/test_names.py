"""Environment names select the library and the default type. Unknown names are refused with a suggestion."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from rlframe.envs import AsyncEnv, SyncEnv, default_type, list_envs
from rlframe.envs.names import backend
from rlframe.errors import UsageError
from tests.extras import needs


def test_backend_prefers_envpool_to_gymnasium():
    assert backend("CartPole-v1") == "envpool"
    assert backend("Pong-v5") == "envpool"
    assert backend("Ant-v2") == "gymnasium"
    assert backend("gymnasium:CartPole-v1") == "gymnasium"
    assert backend("dm_control:cartpole-swingup") == "dm_control"


def test_default_type_is_envpool_for_envpool_tasks():
    assert default_type("Pong-v5", 1) == "envpool"
    assert default_type("CartPole-v1", 16) == "envpool"
    assert default_type("gymnasium:CartPole-v1", 16) == "loop"
    assert default_type("Ant-v2", 16) == "loop"
    assert default_type(lambda: None, 16) == "loop"


def test_default_type_is_loop_for_small_pools_of_light_environments():
    assert default_type("CartPole-v1", 8) == "loop"
    assert default_type("Acrobot-v1", 8) == "envpool"
    assert default_type("envpool:CartPole-v1", 1) == "envpool"


def test_prefix_selects_the_library():
    with SyncEnv("gymnasium:CartPole-v1", 1) as pool:
        assert "gymnasium" in type(pool._pool._groups[0].envs[0].env.unwrapped).__module__
    with SyncEnv("envpool:CartPole-v1", 2, "envpool") as pool:
        assert pool.reset().observation.shape == (2, 4)


@pytest.mark.parametrize("type", ["loop", pytest.param("process", marks=pytest.mark.system)])
def test_dm_control_tasks_are_stepped_and_seeded(type):
    needs("dm_control")
    starts = []
    for seed in (0, 0, 1):
        with SyncEnv("dm_control:point_mass-easy", 2, type, seed=seed, num_workers=1) as pool:
            assert pool.observation_spec["position"].dtype == np.float32
            np.testing.assert_array_equal(pool.action_spec.maximum, [1.0, 1.0])
            pool.reset()
            starts.append(pool.step(np.ones((2, 2), np.float32)).observation["position"])
    np.testing.assert_array_equal(starts[0], starts[1])
    assert len({tuple(row) for start in starts[1:] for row in start.tolist()}) == 4


@pytest.mark.parametrize(
    ("name", "type", "message"),
    [
        ("CartPol-v1", "loop", "Unknown environment 'CartPol-v1'. Did you mean 'CartPole-v1'?"),
        ("CartPol-v1", "envpool", "Did you mean 'CartPole-v1'?"),
        ("Pong-v5", "loop", "use type 'envpool'"),
        ("gymnasium:Surround-v5", "loop", "Unknown environment 'Surround-v5'. `rlframe envs`"),
        ("envpool:CartPole-v1", "process", "use type 'envpool'"),
        ("Ant-v2", "envpool", "EnvPool has no task 'Ant-v2'"),
        ("dm_control:cartpole-swingip", "loop", "Did you mean 'cartpole-swingup'?"),
        ("ALE/Pong-v5", "loop", "ale-py"),
    ],
)
def test_unknown_name_is_refused_with_a_suggestion(name, type, message):
    if name.startswith("dm_control:"):
        needs("dm_control")
    with pytest.raises(UsageError) as caught:
        SyncEnv(name, 1, type)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(size=0), "size must be"),
        (dict(size=2, type="proces"), "Did you mean 'process'?"),
        (dict(size=2, seed=-1), "seed must be"),
        (dict(size=2, num_workers=0), "num_workers must be"),
        (dict(size=2, type="envpool", env_kwargs={"no_such_option": 1}), "no_such_option"),
        (dict(size=2, type="loop", env_kwargs={"no_such_option": 1}), "no_such_option"),
        (dict(size=2, type="envpool", env_kwargs={"seed": 1}), "the pool sets itself"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(UsageError) as caught:
        SyncEnv("CartPole-v1", **arguments)
    assert message in str(caught.value)


def test_async_pool_refuses_an_invalid_wait_num():
    for wait_num in (0, 4):
        with pytest.raises(UsageError, match="wait_num must be between 1 and the size, 3"):
            AsyncEnv("CartPole-v1", 3, wait_num)


def test_envpool_type_refuses_a_builder():
    with pytest.raises(UsageError, match="not a builder"):
        SyncEnv(lambda: None, 1, "envpool")


def test_env_kwargs_reach_the_environment():
    with SyncEnv("CartPole-v1", 1, env_kwargs={"max_episode_steps": 2}) as pool:
        pool.reset()
        steps = [pool.step(np.zeros(1, np.int32)) for _ in range(2)]
    assert [(int(step.step_type[0]), float(step.discount[0])) for step in steps] == [(1, 1.0), (2, 1.0)]


def test_list_envs_returns_each_name_with_its_backend():
    rows = list_envs()
    assert ("CartPole-v1", "envpool") in rows and ("CartPole-v1", "gymnasium") in rows
    assert rows == sorted(rows)


def test_error_for_a_box2d_environment_without_box2d_contains_the_missing_extra(monkeypatch):
    needs("gymnasium")
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"LunarLander-v3 needs the extra 'box2d': pip install 'rlframe\[box2d\]'"):
        SyncEnv("LunarLander-v3", 1, "loop", seed=1)
