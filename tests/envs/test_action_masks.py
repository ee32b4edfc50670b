"""Tests of action masks in environments: how they are found and checked."""

from __future__ import annotations

import pickle
import re

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from rlframe.envs import AsyncEnv, SyncEnv
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.errors import EnvError, UsageError
from rlframe.types import LAST, ActionMaskArray
from tests import masked_game
from tests.masked_game import MaskedGame, MaskedJaxGame


class Fixed(gymnasium.Env):
    """An environment with a given mask space. Its episodes are truncated after two steps."""

    def __init__(self, mask_space, action_space, mask=None, key="action_mask", terminates=False):
        vector = {"vector": Box(-1, 1, (2,), np.float32)} if mask_space is not None else {}
        self.observation_space = Dict({**vector, key: mask_space or Box(0, 1, (3,), np.int8)})
        self.action_space, self._mask, self._key, self._terminates = action_space, mask, key, terminates

    def reset(self, *, seed=None, options=None):
        self._time = 0
        return self._observed(), {}

    def step(self, action):
        self._time += 1
        is_last = self._time == 2
        return self._observed(), 0.0, is_last and self._terminates, is_last and not self._terminates, {}

    def _observed(self):
        mask = np.zeros(3, np.int8) if self._time == 2 else self._mask
        return {"vector": np.zeros(2, np.float32), self._key: mask}


@pytest.mark.parametrize(
    ("mask_space", "action_space", "num_values"),
    [
        (MultiBinary(3), Discrete(3, start=5), [3]),
        (Box(0, 1, (3,), np.uint8), Discrete(3), [3]),
        (Box(0, 1, (3,), bool), Discrete(3), [3]),
        (Box(0, 1, (5,), np.int64), MultiDiscrete([2, 3]), [2, 3]),
    ],
)
def test_mask_is_found_by_its_key(mask_space, action_space, num_values):
    with SyncEnv(lambda: Fixed(mask_space, action_space, key="legal"), 1, action_mask="legal") as pool:
        spec = pool.observation_spec["legal"]
        assert type(spec) is ActionMaskArray and spec.shape == mask_space.shape
        assert repr(pickle.loads(pickle.dumps(spec))) == repr(spec) and f"num_values={num_values}" in repr(spec)
    with SyncEnv(lambda: Fixed(mask_space, action_space), 1, action_mask=None) as pool:
        assert type(pool.observation_spec["action_mask"]) is not ActionMaskArray


@pytest.mark.parametrize(
    ("mask_space", "action_space", "options", "message"),
    [
        (MultiBinary(4), Discrete(3), {}, r"'action_mask' must be a bool array of shape \(3,\).* MultiBinary\(3\)"),
        (Box(0, 1, (3,), np.float32), Discrete(3), {}, "got BoundedArray.*float32.*set action_mask .* to None"),
        (Box(0, 9, (3,), np.int8), Discrete(3), {}, "integers from 0 to 1"),
        (MultiDiscrete([2, 2, 2]), Discrete(3), {}, "must be a bool array"),
        (Dict(a=MultiBinary(3)), Discrete(3), {}, "must be a bool array"),
        (MultiBinary(3), Box(-1, 1, (3,), np.float32), {}, "only Discrete .* got BoundedArray"),
        (MultiBinary(3), MultiDiscrete([3, 4]), {}, r"shape \(7,\)"),
        (MultiBinary(3), Discrete(3), {"action_mask": "legal"}, "'legal' must be a key .* action_mask, vector"),
        (MultiBinary(3), Discrete(3), {"action_repeat": 2}, "action_repeat=2 repeats an action that may be illegal"),
        (None, Discrete(3), {}, "has only the action mask 'action_mask'"),
    ],
)
def test_array_that_cannot_be_a_mask_is_refused(mask_space, action_space, options, message):
    with pytest.raises(UsageError, match=message):
        SyncEnv(lambda: Fixed(mask_space, action_space), 1, **options)


def test_observation_without_a_dict_has_no_mask():
    with pytest.raises(UsageError, match=re.escape("action_mask='legal' must be a key of the observation")):
        SyncEnv("gymnasium:CartPole-v1", 1, action_mask="legal")
    with SyncEnv("gymnasium:CartPole-v1", 1) as pool:
        assert pool.observation_spec.shape == (4,)


@pytest.mark.parametrize("pool_type", ["loop", "process", "jax"])
def test_environment_without_a_legal_action_is_named(pool_type):
    game = MaskedJaxGame if pool_type == "jax" else MaskedGame
    with SyncEnv(game, 3, pool_type, env_kwargs={"blocked": 2}) as pool:
        timestep = pool.reset()
        with pytest.raises(EnvError, match=r"Environment \d gave an action mask without a legal action"):
            for _ in range(2):
                timestep = pool.step(timestep.observation["action_mask"].argmax(axis=1))


def test_asynchronous_environment_without_a_legal_action_is_named():
    builders = iter([{}, {}, {"blocked": 0}])
    with (
        AsyncEnv(lambda: MaskedGame(**next(builders)), 3, 3) as pool,
        pytest.raises(EnvError, match="Environment 2 gave an action mask"),
    ):
        pool.recv()


@pytest.mark.parametrize("terminates", [True, False])
def test_only_a_terminated_episode_may_end_without_a_legal_action(terminates):
    make = lambda: Fixed(MultiBinary(3), Discrete(3), np.ones(3, np.int8), terminates=terminates)  # noqa: E731
    with SyncEnv(make, 1) as pool:
        pool.reset()
        pool.step(np.array([0]))
        if terminates:
            assert pool.step(np.array([0])).step_type == LAST
        else:
            with pytest.raises(EnvError, match="Environment 0 gave an action mask"):
                pool.step(np.array([0]))


def test_mask_of_stacked_frames_is_the_newest_one():
    with SyncEnv(MaskedGame, 2, frame_stack=3, seed=1) as stacked, SyncEnv(MaskedGame, 2, seed=1) as plain:
        ours, theirs = stacked.reset(), plain.reset()
        envs = BatchedJaxEnv(MaskedJaxGame(), frame_stack=3, action_mask="action_mask")
        carry = envs.init(jax.random.split(jax.random.PRNGKey(0)))
        step = jax.jit(envs.step)
        _, on_device = step(carry, np.zeros(2, np.int32))
        for timestep in (ours, on_device):
            assert timestep.observation["observation"].shape == (2, 3, masked_game.SIZE)
            assert timestep.observation["action_mask"].shape == (2, masked_game.NUM_ACTIONS)
        assert stacked.observation_spec["action_mask"] == plain.observation_spec["action_mask"]
        for _ in range(10):
            np.testing.assert_array_equal(ours.observation["action_mask"], theirs.observation["action_mask"])
            np.testing.assert_array_equal(ours.observation["observation"][:, -1], theirs.observation["observation"])
            action = theirs.observation["action_mask"].argmax(axis=1)
            ours, theirs = stacked.step(action), plain.step(action)


@pytest.mark.parametrize("pool_type", ["loop", "jax"])
def test_both_versions_of_the_game_have_the_computed_optimal_return(pool_type):
    """Play the best policy: the mean return is close to the one from dynamic programming."""
    game, total, num_envs = MaskedJaxGame if pool_type == "jax" else MaskedGame, 0.0, 300
    with SyncEnv(game, num_envs, pool_type, seed=3) as pool:
        timestep = pool.reset()
        for t in range(masked_game.STEPS):
            level = timestep.observation["observation"][:, masked_game.STEPS + 1 :][:, :3].argmax(axis=1)
            scores = np.where(timestep.observation["action_mask"], masked_game.optimal_values()[t, level], -1.0)
            timestep = pool.step(scores.argmax(axis=1))
            total += timestep.reward.mean()
    assert (timestep.step_type == LAST).all() and (timestep.discount == 0.0).all()
    assert abs(total - masked_game.optimal_return()) < 0.12
