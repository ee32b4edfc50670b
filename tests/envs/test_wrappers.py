"""Frame stacking, action repeat and reward clipping have the same results in every type of pool."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from rlframe.envs import AsyncEnv, SyncEnv
from rlframe.envs.wrappers import FrameStack
from rlframe.errors import UsageError
from rlframe.types import FIRST, LAST, MID, TimeStep, specs
from tests.envs.scripted import NUM_ACTIONS, ScriptedEnv, Stream

SIZE = 3
OPTIONS = {"frame_stack": 3, "action_repeat": 2, "clip_rewards": 30.0}


class Twin:
    """Computes the steps that a pool with OPTIONS must return for one environment."""

    def __init__(self, index):
        self.stream = Stream(7, index)
        self.frames = collections.deque(maxlen=3)

    def step(self, action):
        """Return the expected (step type, reward, discount, stacked observation [3, 3] as lists)."""
        step_type, reward, discount, observation = self.stream.step(action)
        if step_type == MID:
            step_type, more, discount, observation = self.stream.step(action)
            reward += more
        self.frames.extend([observation] * (3 if step_type == FIRST else 1))
        return step_type, min(reward, 30.0), discount, list(self.frames)


def rows(timestep):
    parts = (timestep.step_type, timestep.reward, timestep.discount, timestep.observation)
    return [tuple(row) for row in zip(*(part.tolist() for part in parts))]


@pytest.mark.parametrize("type", ["loop", "thread", "process"])
def test_sync_pool_with_options_returns_the_expected_steps_of_each_environment(type):
    twins, random = [Twin(i) for i in range(SIZE)], np.random.RandomState(0)
    kinds = set()
    with SyncEnv(ScriptedEnv, SIZE, type, seed=7, num_workers=2, **OPTIONS) as pool:
        assert pool.observation_spec.shape == (3, 3)
        timestep = pool.reset()
        assert rows(timestep) == [twin.step(0) for twin in twins]
        for _ in range(30):
            actions = random.randint(NUM_ACTIONS, size=SIZE)
            timestep, kept = pool.step(actions), timestep.observation.copy()
            expected = [twin.step(int(action)) for twin, action in zip(twins, actions, strict=True)]
            assert rows(timestep) == expected
            kinds.update((row[0], row[1]) for row in expected)
            assert kept is not timestep.observation
    assert {kind for kind, _ in kinds} == {FIRST, MID, LAST} and max(reward for _, reward in kinds) == 30.0


@pytest.mark.parametrize("type", ["thread", "process"])
def test_async_pool_with_options_returns_the_expected_steps_of_each_environment(type):
    twins, random, actions = [Twin(i) for i in range(SIZE)], np.random.RandomState(0), np.zeros(SIZE, np.int64)
    with AsyncEnv(ScriptedEnv, SIZE, 2, type, seed=7, num_workers=2, **OPTIONS) as pool:
        for _ in range(40):
            env_ids, timestep = pool.recv()
            assert rows(timestep) == [twins[i].step(int(actions[i])) for i in env_ids]
            actions[env_ids] = random.randint(NUM_ACTIONS, size=2)
            pool.send(env_ids, actions[env_ids])


def test_restored_pool_continues_with_its_stacked_frames():
    with SyncEnv(ScriptedEnv, 2, seed=7, **OPTIONS) as pool, SyncEnv(ScriptedEnv, 2, seed=9, **OPTIONS) as other:
        pool.reset()
        for _ in range(4):
            pool.step(np.ones(2, np.int64))
        state = pool.get_state()
        other.set_state(state)
        for _ in range(9):
            assert rows(pool.step(np.ones(2, np.int64))) == rows(other.step(np.ones(2, np.int64)))


@pytest.mark.parametrize("is_sync", [True, False])
def test_envpool_repeats_an_action_until_the_episode_ends(is_sync):
    pytest.importorskip("envpool")
    plain = SyncEnv("CartPole-v1", SIZE, "envpool", seed=3)
    options = {"type": "envpool", "seed": 3, "action_repeat": 4}
    repeating = SyncEnv("CartPole-v1", SIZE, **options) if is_sync else AsyncEnv("CartPole-v1", SIZE, SIZE, **options)
    ends = set()
    with plain, repeating:
        before = plain.reset()
        # The timesteps of a pool that steps with the same constant action, but without action repeat.
        stream = [before] + [plain.step(np.ones(SIZE, np.int32)) for _ in range(60)]
        places = [0] * SIZE
        for number in range(12):
            if is_sync:
                env_ids = np.arange(SIZE)
                timestep = repeating.step(np.ones(SIZE, np.int32)) if number else repeating.reset()
            else:
                env_ids, timestep = repeating.recv()
                repeating.send(env_ids, np.ones(SIZE, np.int32))
            for row, i in enumerate(env_ids):
                step, rewards = stream[places[i]], [stream[places[i]].reward[i]]
                while step.step_type[i] == MID and len(rewards) < 4:
                    step = stream[places[i] + len(rewards)]
                    rewards.append(step.reward[i])
                places[i] += len(rewards)
                ends.add((int(step.step_type[i]), len(rewards)))
                assert (timestep.step_type[row], timestep.reward[row]) == (step.step_type[i], sum(rewards))
                assert timestep.discount[row] == step.discount[i]
                np.testing.assert_array_equal(timestep.observation[row], step.observation[i])
    assert (MID, 4) in ends and any(kind == LAST and times < 4 for kind, times in ends)


@pytest.mark.parametrize(
    ("shape", "stacked", "row"),
    [
        ((), (2,), lambda old, new: np.array([old, new])),
        ((3,), (2, 3), lambda old, new: np.stack([old, new])),
        ((5, 4), (2, 5, 4), lambda old, new: np.stack([old, new])),
        ((1, 5, 4), (2, 5, 4), lambda old, new: np.concatenate([old, new])),
        ((7, 4, 3), (7, 4, 6), lambda old, new: np.concatenate([old, new], axis=-1)),
        ((3, 3, 3), (3, 3, 6), lambda old, new: np.concatenate([old, new], axis=-1)),
    ],
)
def test_frame_stack_shape_depends_on_the_channel_axis(shape, stacked, row):
    stack = FrameStack(2, specs.BoundedArray(shape, np.uint8, 0, 200), 2)
    assert stack.observation_spec.shape == stacked and stack.observation_spec.dtype == np.uint8
    assert np.shape(stack.observation_spec.maximum) in ((), stacked) and np.all(stack.observation_spec.maximum == 200)
    random, ones = np.random.RandomState(0), np.ones(2, np.float32)
    old, new = (random.randint(200, size=(2, *shape)).astype(np.uint8) for _ in range(2))
    stack(TimeStep(np.full(2, FIRST), ones, ones, old))
    after = stack(TimeStep(np.array([MID, FIRST]), ones, ones, new))
    np.testing.assert_array_equal(after.observation[0], row(old[0], new[0]))
    np.testing.assert_array_equal(after.observation[1], row(new[1], new[1]))


@pytest.mark.parametrize("shape", [(10, 20, 3), (2, 6, 7)])
def test_stack_of_images_whose_channel_axis_becomes_ambiguous_is_refused(shape):
    with pytest.raises(UsageError, match=r"frame_stack=4 makes the image .* of shape .* an image of shape \("):
        FrameStack(4, specs.BoundedArray(shape, np.uint8, 0, 200, "image"), 2)


@pytest.mark.parametrize("options", [{"frame_stack": 0}, {"action_repeat": 0}, {"clip_rewards": 0.0}])
def test_invalid_wrapper_options_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        SyncEnv(ScriptedEnv, 1, **options)
