"""The Evaluator plays the requested number of full episodes, evenly distributed over its environments."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rlframe import SyncEnv
from rlframe.actors import Evaluator
from rlframe.errors import EnvError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.interprocess.heartbeat import STARTING, ThreadProgress
from tests.fakes import CountingEnv, FixedParams, counting_agent


def evaluator(lengths, episodes, **kwargs) -> Evaluator:
    remaining = list(lengths)
    inferencer = Inferencer(InferencerConfig(greedy=True), counting_agent(), FixedParams({"w": np.float32(0.0)}))
    builder = lambda: SyncEnv(lambda: CountingEnv(remaining.pop(0)), len(lengths), "loop")  # noqa: E731
    return Evaluator(builder, inferencer, episodes, **kwargs)


def test_environments_play_equal_numbers_of_episodes_regardless_of_length():
    uneven = evaluator([2, 10], episodes=4)
    logs = uneven.evaluate()
    assert sorted(logs["returns"]) == [2.0, 2.0, 10.0, 10.0]
    assert logs["return_mean"] == 6.0 and logs["return_std"] == 4.0 and logs["length_mean"] == 6.0
    assert logs["episodes"] == 4 and logs["params_version"] == 1
    uneven.close()


def test_evaluator_plays_exactly_the_requested_number_of_episodes_if_it_does_not_divide_evenly():
    three = evaluator([2, 5], episodes=3)
    assert sorted(three.evaluate()["returns"]) == [2.0, 2.0, 5.0]
    three.close()


def test_evaluate_can_be_called_again():
    repeated = evaluator([4], episodes=2)
    assert repeated.evaluate()["return_mean"] == repeated.evaluate()["return_mean"] == 4.0
    repeated.close()


def test_returns_are_sums_of_rewards_before_clipping():
    inferencer = Inferencer(InferencerConfig(greedy=True), counting_agent(), FixedParams({"w": np.float32(0.0)}))
    clipped = Evaluator(lambda: SyncEnv(lambda: CountingEnv(4), 1, "loop", clip_rewards=0.5), inferencer, 2)
    assert clipped.evaluate()["returns"].tolist() == [4.0, 4.0]
    clipped.close()


def test_endless_episode_raises_an_error_that_names_the_environment():
    endless = evaluator([3, 10**9], episodes=2, max_episode_length=50)
    with pytest.raises(EnvError, match="environment 1 has run for 51 steps"):
        endless.evaluate()
    endless.close()


def test_zero_episodes_are_rejected():
    with pytest.raises(UsageError, match="at least 1"):
        evaluator([1], episodes=0)


def test_environment_constructors_run_in_the_starting_phase():
    seen = []

    def make_env() -> CountingEnv:
        seen.append(ThreadProgress().look(0.0, threading.get_ident()))
        return CountingEnv(2)

    inferencer = Inferencer(InferencerConfig(greedy=True), counting_agent(), FixedParams({"w": np.float32(0.0)}))
    Evaluator(lambda: SyncEnv(make_env, 1, "loop"), inferencer, 1).close()
    assert [stay.phase for stay in seen] == [STARTING]
