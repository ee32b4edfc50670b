"""A restored pool returns the same steps as the saved pool."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import EzPickle

from rlframe.envs import SyncEnv
from rlframe.errors import UsageError
from tests.envs.scripted import ScriptedEnv

CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "MountainCarContinuous-v0")


class Eager(ScriptedEnv, EzPickle):
    """An environment whose pickle omits the state: EzPickle pickles only the constructor's arguments."""


class HoldsEager(ScriptedEnv):
    def __init__(self):
        self.inner = Eager()


class HoldsSeveral(ScriptedEnv):
    def __init__(self, several: type):
        self.inner = {"a": Eager()} if several is dict else several([Eager()])


class Large(ScriptedEnv):
    """An environment whose pickled state does not fit into the buffer of a connection."""

    def __init__(self):
        self.board = np.zeros(1_000_000, np.uint8)


class Locked(ScriptedEnv):
    def __init__(self):
        self.lock = (x for x in ())  # a generator cannot be pickled


def act(pool, random, steps):
    spec = pool.action_spec
    out = []
    for _ in range(steps):
        if spec.dtype == np.int32:
            out.append(pool.step(random.randint(spec.num_values, size=pool.num_envs)))
        else:
            out.append(pool.step(random.uniform(-1, 1, (pool.num_envs, *spec.shape)).astype(np.float32)))
    return [np.stack(field) for field in zip(*out, strict=True)]


@pytest.mark.parametrize(
    ("name", "saved_by", "restored_by"),
    [(name, "loop", "loop") for name in CLASSIC]
    + [("CartPole-v1", "process", "process"), ("CartPole-v1", "loop", "process"), ("CartPole-v1", "thread", "loop")],
)
def test_restored_pool_returns_the_same_steps_as_the_saved_pool(name, saved_by, restored_by):
    with SyncEnv(name, 3, saved_by, seed=1, num_workers=2) as pool:
        pool.reset()
        act(pool, np.random.RandomState(0), 25)
        if name == "CartPole-v1":  # save while an environment is at LAST, so that its next step is a reset
            while not (act(pool, np.random.RandomState(0), 1)[0] == 2).any():
                pass
        state = pool.get_state()
        expected = act(pool, np.random.RandomState(1), 230)
    with SyncEnv(name, 3, restored_by, seed=99, num_workers=2) as pool:
        pool.set_state(state)
        for received, wanted in zip(act(pool, np.random.RandomState(1), 230), expected, strict=True):
            np.testing.assert_array_equal(received, wanted)
    # The steps must include a reset, which shows that the random state was restored. In two environments, the episodes
    # are too long for a reset.
    assert (expected[0] == 0).any() or name in ("Acrobot-v1", "MountainCarContinuous-v0")


def test_large_states_of_worker_processes_are_restored():
    with SyncEnv(Large, 2, "process", num_workers=1) as pool:
        pool.reset()
        state, after = pool.get_state(), pool.step(np.zeros(2, np.int32))
        pool.set_state(state)
        np.testing.assert_array_equal(pool.step(np.zeros(2, np.int32)).observation, after.observation)


def test_pool_saved_before_its_first_reset_starts_with_the_same_observation():
    with SyncEnv("CartPole-v1", 2, seed=5) as pool:
        state, start = pool.get_state(), pool.reset()
    with SyncEnv("CartPole-v1", 2, seed=6) as pool:
        pool.set_state(state)
        np.testing.assert_array_equal(pool.reset().observation, start.observation)


@pytest.mark.parametrize(
    ("builder", "type"),
    [(Eager, "loop"), (Locked, "loop"), (Locked, "process"), (HoldsEager, "loop")]
    + [(lambda: gymnasium.wrappers.TimeLimit(Eager(), 10), "process")]
    + [(functools.partial(HoldsSeveral, several), "loop") for several in (list, tuple, dict)],
)
def test_get_state_returns_none_for_environments_that_cannot_be_saved(builder, type):
    with SyncEnv(builder, 2, type, num_workers=1) as pool:
        pool.reset()
        assert pool.get_state() is None
        assert pool.step(np.zeros(2, np.int32)).step_type.tolist() == [1, 1]


def test_get_state_returns_none_for_envpool():
    with SyncEnv("CartPole-v1", 2, "envpool") as pool:
        assert pool.get_state() is None


def test_set_state_refuses_the_state_of_a_pool_with_another_size():
    with SyncEnv("CartPole-v1", 2) as pool:
        state = pool.get_state()
    with (
        SyncEnv("CartPole-v1", 3) as pool,
        pytest.raises(UsageError, match="holds 2 environments, but this pool has 3"),
    ):
        pool.set_state(state)
