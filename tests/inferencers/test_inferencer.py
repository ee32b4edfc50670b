"""Test the parameter versions, the recurrent state and the random numbers of an Inferencer."""

from __future__ import annotations

import numpy as np
import pytest

from rlframe.agents import PPO, PPOConfig
from rlframe.errors import UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.types import FIRST, TimeStep
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, FixedParams, RecordingBuffer, counting_agent


def timestep(batch_size: int, observation=None) -> TimeStep:
    ones = np.ones(batch_size, np.float32)
    if observation is None:
        observation = np.zeros((batch_size, 2), np.float32)
    return TimeStep(np.full(batch_size, FIRST), ones, ones, observation)


def make(learner=None, **config) -> Inferencer:
    return Inferencer(InferencerConfig(**config), counting_agent(), learner or FixedParams({"w": np.float32(0.5)}))


def test_outputs_are_writable_numpy_arrays_with_the_parameters_version():
    output, _ = make().inference(np.arange(3), timestep(3), {"seen": np.zeros(3, np.float32)})
    assert output.params_version == 1
    assert output.action.dtype == np.int32 and output.action.flags.writeable
    np.testing.assert_array_equal(output.extras["w"], np.full(3, 0.5, np.float32))


def test_returned_state_can_be_passed_to_the_next_call():
    inferencer = make()
    state = inferencer.initial_state(2)
    for _ in range(3):
        _, state = inferencer.inference(np.arange(2), timestep(2), state)
    np.testing.assert_array_equal(state["seen"], [3.0, 3.0])


def test_newer_parameters_are_fetched_only_at_the_sync_interval():
    learner = FixedParams({"w": np.float32(0.5)})
    inferencer = make(learner, sync_interval=3)
    seen = []
    for call in range(6):
        learner.version, learner.params = call + 1, {"w": np.float32(call)}
        output, _ = inferencer.inference(np.arange(1), timestep(1), inferencer.initial_state(1))
        seen.append((output.params_version, float(output.extras["w"][0])))
    assert seen == [(1, 0.0)] * 3 + [(4, 3.0)] * 3
    assert learner.asked == 2


def test_batch_size_can_change_between_calls():
    inferencer = make()
    for size in (2, 5, 2):
        output, state = inferencer.inference(np.arange(size), timestep(size), inferencer.initial_state(size))
        assert output.action.shape == (size,) and state["seen"].shape == (size,)


def test_wrong_observation_error_names_the_expected_and_received_shapes():
    inferencer = make()
    with pytest.raises(UsageError, match=r"observation should be \[B, 2\] float32, got \[4, 3\] float32"):
        inferencer.inference(np.arange(4), timestep(4, np.zeros((4, 3), np.float32)), inferencer.initial_state(4))


def ppo_actions(calls: int, resume_at: int | None = None, **config) -> list:
    agent = PPO(PPOConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    learner = Learner(LearnerConfig(), agent, RecordingBuffer())
    inferencer, actions = Inferencer(InferencerConfig(**config), agent, learner), []
    for call in range(calls):
        if call == resume_at:
            state = inferencer.get_state()
            inferencer = Inferencer(InferencerConfig(**config), agent, learner)
            inferencer.set_state(state)
        output, _ = inferencer.inference(np.arange(8), timestep(8), ())
        actions.append(output.action.tolist())
    return actions


@pytest.mark.system
def test_equal_seeds_give_equal_actions_and_different_seeds_different_actions():
    assert ppo_actions(4, seed=1) == ppo_actions(4, seed=1)
    assert ppo_actions(4, seed=1) != ppo_actions(4, seed=2)
    assert len({str(actions) for actions in ppo_actions(4, seed=1)}) > 1


@pytest.mark.system
@pytest.mark.parametrize("sync_interval", [pytest.param(1, marks=pytest.mark.system), 3])
def test_resumed_inferencer_continues_with_the_same_actions(sync_interval):
    assert ppo_actions(6, resume_at=4, sync_interval=sync_interval) == ppo_actions(6, sync_interval=sync_interval)


def test_sync_interval_below_one_is_refused():
    with pytest.raises(UsageError, match="sync_interval"):
        InferencerConfig(sync_interval=0)
