"""All types of pools meet the same requirements, with scripted environments, Gymnasium, EnvPool and JAX environments.

The tests with environments of gymnax and jumanji run with `make test-jax-suites`.
"""

from __future__ import annotations

import functools
import time

import jax
import numpy as np
import pytest

from rlframe.envs import AsyncEnv, SyncEnv
from rlframe.envs.jax_envs import SUITES
from rlframe.errors import UsageError
from rlframe.types import FIRST, LAST, MID
from tests.envs.scripted import NUM_ACTIONS, ScriptedDictEnv, ScriptedDmEnv, ScriptedEnv, Stream, rows
from tests.extras import needs

PYTHON_TYPES = ("loop", "thread", "process")
SIZE = 5


def numbers_of(observation):
    return observation["numbers"] if isinstance(observation, dict) else observation


@pytest.mark.parametrize("builder", [ScriptedEnv, ScriptedDictEnv, ScriptedDmEnv])
@pytest.mark.parametrize("type", PYTHON_TYPES)
def test_sync_pool_returns_every_step_of_each_environment(type, builder):
    twins = [Stream(7, i) for i in range(SIZE)]
    random = np.random.RandomState(0)
    with SyncEnv(builder, SIZE, type, seed=7, num_workers=2) as pool:
        timestep = pool.reset()
        assert rows(timestep, numbers_of(timestep.observation)) == [twin.step(0) for twin in twins]
        for _ in range(30):
            actions = random.randint(NUM_ACTIONS, size=SIZE)
            timestep = pool.step(actions)
            expected = [twin.step(int(action)) for twin, action in zip(twins, actions, strict=True)]
            assert rows(timestep, numbers_of(timestep.observation)) == expected
            if builder is ScriptedDictEnv:
                assert timestep.observation["more"][0].tolist() == [row[3][2] for row in expected]
                assert (timestep.observation["more"][1][:, 1, 0] == [row[3][1] for row in expected]).all()


@pytest.mark.parametrize("builder", [ScriptedEnv, ScriptedDictEnv])
@pytest.mark.parametrize("type", ["thread", "process"])
def test_async_pool_returns_every_step_of_each_environment(type, builder):
    twins = [Stream(7, i) for i in range(SIZE)]
    actions = np.zeros(SIZE, np.int64)
    random = np.random.RandomState(0)
    received = np.zeros(SIZE, np.int64)
    with AsyncEnv(builder, SIZE, 2, type, seed=7, num_workers=2) as pool:
        deadline = time.monotonic() + 60.0
        # The number of necessary calls is unknown, because the operating system decides which worker runs first.
        while received.sum() < 120 or received.min() < 3:
            assert time.monotonic() < deadline, (
                f"One environment was received too rarely. Number of timesteps for each environment: {received}."
            )
            env_ids, timestep = pool.recv()
            expected = [twins[i].step(int(actions[i])) for i in env_ids]
            assert rows(timestep, numbers_of(timestep.observation)) == expected
            received[env_ids] += 1
            actions[env_ids] = random.randint(NUM_ACTIONS, size=2)
            pool.send(env_ids, actions[env_ids])


@pytest.mark.parametrize("type", PYTHON_TYPES)
def test_timesteps_have_the_shapes_and_dtypes_of_the_specs(type):
    with SyncEnv(ScriptedDictEnv, 2, type, num_workers=2) as pool:
        timestep = pool.reset()
        spec = pool.observation_spec
        assert (pool.action_spec.num_values, pool.action_spec.dtype) == (NUM_ACTIONS, np.int32)
        assert (spec["numbers"].dtype, spec["more"][0].dtype, spec["more"][1].dtype) == (np.float32, np.int32, np.uint8)
        for leaf, array in [
            (spec["numbers"], timestep.observation["numbers"]),
            *zip(spec["more"], timestep.observation["more"], strict=True),
        ]:
            assert (array.dtype, array.shape) == (leaf.dtype, (2, *leaf.shape))
        assert [array.dtype.name for array in timestep[:3]] == ["uint8", "float32", "float32"]


def play(make, num_steps, action):
    """Step a sync pool with a constant action.

    Returns:
        Step types [T, B], rewards [T, B], discounts [T, B] and observations [T, B, ...].
    """
    with make() as pool:
        actions = np.full((pool.num_envs, *pool.action_spec.shape), action, pool.action_spec.dtype)
        steps = [pool.reset()] + [pool.step(actions) for _ in range(num_steps)]
    return [np.stack([step[field] for step in steps]) for field in range(4)]


def play_async(make, num_steps, action):
    """Step an async pool and return arrays like `play`. Row t has step t of each environment."""
    with make() as pool:
        actions = np.full((pool.wait_num, *pool.action_spec.shape), action, pool.action_spec.dtype)
        streams = [[] for _ in range(pool.num_envs)]
        while min(map(len, streams)) < num_steps + 1:
            env_ids, timestep = pool.recv()
            for k, i in enumerate(env_ids):
                streams[i].append([np.array(field[k]) for field in timestep])
            pool.send(env_ids, actions)
    return [np.stack([[stream[t][f] for stream in streams] for t in range(num_steps + 1)]) for f in range(4)]


MAKERS = {
    **{f"sync {t}": (play, functools.partial(SyncEnv, size=3, type=t, num_workers=2)) for t in PYTHON_TYPES},
    **{f"async {t}": (play_async, functools.partial(AsyncEnv, size=3, wait_num=2, type=t, num_workers=2))
       for t in ("thread", "process")},
    "sync envpool": (play, functools.partial(SyncEnv, size=3, type="envpool")),
    "async envpool": (play_async, functools.partial(AsyncEnv, size=3, wait_num=2, type="envpool")),
    "sync jax": (play, functools.partial(SyncEnv, size=3, type="jax")),
    "sync gymnax": (play, functools.partial(SyncEnv, size=3, type="jax")),
}  # fmt: skip


def params(names, system=()):
    """Return the parameters of a test, one for each kind of pool. Mark the kinds that need a suite."""
    return [
        pytest.param(
            name,
            marks=[pytest.mark.suites] * (name.split()[-1] in SUITES) + [pytest.mark.system] * (name in system),
        )
        for name in names
    ]


def name_for(maker, task):
    """Return the name of a task for a maker: with a prefix for JAX environments. Skip the test without the suite."""
    kind = maker.split()[-1]
    if kind in SUITES:
        needs(kind)
    return f"{kind}:{task}" if kind in ("jax", *SUITES) else task


@pytest.mark.parametrize("maker", params(MAKERS, system=["async process"]))
def test_cart_pole_terminates_with_discount_zero_and_resets_automatically(maker):
    run, make = MAKERS[maker]
    name = name_for(maker, "CartPole-v1")
    step_type, reward, discount, observation = run(functools.partial(make, name, seed=3), 60, 1)
    last = step_type == LAST
    assert (step_type[0] == FIRST).all() and last.sum() > 9 and not last[0].any()
    np.testing.assert_array_equal(step_type[1:] == FIRST, last[:-1])
    np.testing.assert_array_equal(discount, np.where(last, 0.0, 1.0))
    np.testing.assert_array_equal(reward, np.where(step_type == FIRST, 0.0, 1.0))
    assert (np.abs(observation[step_type == FIRST]) <= 0.05).all()
    # The observation at LAST is the final observation of the episode, in which the pole has fallen (over 12 degrees).
    assert (np.abs(observation[last][:, 2]) > 0.2095).all()


@pytest.mark.parametrize("maker", params(MAKERS, system=["async process"]))
def test_pendulum_is_truncated_at_its_time_limit_with_discount_one(maker):
    run, make = MAKERS[maker]
    name = name_for(maker, "Pendulum-v1")
    step_type, reward, discount, observation = run(functools.partial(make, name, seed=3), 202, 0.5)
    assert (step_type[200] == LAST).all() and (step_type[201] == FIRST).all() and (step_type[202] == MID).all()
    assert (step_type == LAST).sum() == 3
    assert (discount == 1.0).all()
    assert (reward[200] != 0.0).all() and (reward[201] == 0.0).all()
    assert observation.dtype == np.float32 and observation.shape == (203, 3, 3)


@pytest.mark.parametrize("maker", params(MAKERS, system=["sync process", "async process"]))
def test_equal_seeds_give_equal_episodes(maker):
    run, make = MAKERS[maker]
    name = name_for(maker, "CartPole-v1")
    first, again, other = [run(functools.partial(make, name, seed=seed), 25, 1) for seed in (1, 1, 2)]
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    starts, other_starts = first[3][0].tolist(), other[3][0].tolist()
    assert len({tuple(row) for row in starts + other_starts}) == 6
    if "envpool" not in maker and ":" not in name:
        np.testing.assert_array_equal(first[3], play(functools.partial(SyncEnv, "CartPole-v1", 3, seed=1), 25, 1)[3])


# Kind of pool -> (environment, type).
KINDS = {
    **{type: ("CartPole-v1", type) for type in (*PYTHON_TYPES, "envpool")},
    "jax": ("jax:CartPole-v1", "jax"),
    "gymnax": ("gymnax:CartPole-v1", "jax"),
    "jumanji": ("jumanji:Snake-v1", "jax"),
}


def open_pool(kind):
    """Open a pool of three environments. Skip the test if a suite is missing."""
    if kind in SUITES:
        needs(kind)
    name, type = KINDS[kind]
    return SyncEnv(name, 3, type, seed=1, num_workers=None if type == "jax" else 2)


@pytest.mark.parametrize("kind", params(KINDS))
def test_returned_timesteps_are_not_overwritten(kind):
    with open_pool(kind) as pool:
        kept = [pool.reset()]
        copies = [jax.tree.map(np.copy, kept[0])]
        for _ in range(15):
            kept.append(pool.step(np.ones(3, np.int32)))
            copies.append(jax.tree.map(np.copy, kept[-1]))
    jax.tree.map(np.testing.assert_array_equal, kept, copies)


@pytest.mark.parametrize("kind", params(KINDS))
def test_pool_does_not_overwrite_observations_while_the_caller_keeps_a_slice(kind):
    with open_pool(kind) as pool:
        pool.reset()
        slices = []
        for _ in range(8):
            leaves = jax.tree.leaves(pool.step(np.ones(3, np.int32)).observation)
            slices += [leaf[1:2, :2] if leaf.ndim > 1 else leaf[1:2] for leaf in leaves]
        values = [part.tolist() for part in slices]
        for _ in range(8):
            pool.step(np.ones(3, np.int32))
        assert [part.tolist() for part in slices] == values


@pytest.mark.parametrize("kind", params(KINDS))
def test_reset_starts_new_episodes(kind):
    with open_pool(kind) as pool:
        pool.reset()
        for _ in range(3):
            pool.step(np.ones(3, np.int32))
        timestep = pool.reset()
        assert (timestep.step_type == FIRST).all()
        if kind == "jumanji":
            assert (timestep.observation["step_count"] == 0).all()
        else:
            assert (np.abs(timestep.observation) <= 0.05).all()
            assert (pool.step(np.ones(3, np.int32)).step_type == MID).all()


@pytest.mark.parametrize("kind", params(KINDS))
def test_reset_and_step_of_a_closed_pool_raise(kind):
    pool = open_pool(kind)
    pool.reset()
    pool.step(np.zeros(3, np.int32))
    pool.close()
    pool.close()
    for call in (pool.reset, lambda: pool.step(np.zeros(3, np.int32))):
        with pytest.raises(UsageError, match="closed"):
            call()


@pytest.mark.parametrize("type", ["thread", "process", "envpool"])
def test_async_pool_refuses_calls_that_would_wait_forever(type):
    with AsyncEnv("CartPole-v1", 3, 2, type, num_workers=1) as pool:
        env_ids, _ = pool.recv()
        with pytest.raises(UsageError, match="number of environments that are stepping is 1"):
            pool.recv()
        pool.send(env_ids, np.zeros(2, np.int32))
        with pytest.raises(UsageError, match="is still stepping"):
            pool.send(env_ids[:1], np.zeros(1, np.int32))
