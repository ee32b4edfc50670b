"""Complete runs with stacked frames, repeated actions and clipped rewards."""

from __future__ import annotations

import json

import rlframe
from rlframe.programs import evaluate, load_experiment, run_experiment
from tests.programs.test_single_process import assert_same_arrays, dqn

WRAPPED = {"frame_stack": 3, "action_repeat": 2, "clip_rewards": 0.5}


def test_wrapper_options_are_saved_and_evaluations_use_unclipped_rewards(tmp_path):
    experiment = dqn(**WRAPPED)
    whole = run_experiment(experiment, run_dir=tmp_path / "whole")
    run_experiment(experiment, run_dir=tmp_path / "parts", stop_at=215)  # in the middle of an episode
    run_experiment(load_experiment(tmp_path / "parts"), run_dir=tmp_path / "parts", resume=True)
    assert_same_arrays(tmp_path / "whole", tmp_path / "parts")
    # The policy `single` gets one frame at a time and stacks the frames. The policy `batched` gets stacked frames.
    single, batched = rlframe.load(tmp_path / "whole"), rlframe.load(tmp_path / "whole")
    with rlframe.SyncEnv("gymnasium:CartPole-v1", 1, frame_stack=3) as pool:
        timestep = pool.reset()
        for _ in range(9):
            action = batched.act(timestep)
            assert single.act(timestep.observation[0, -1]) == action[0]
            timestep = pool.step(action)
    evaluated = evaluate(tmp_path / "parts", episodes=2)
    assert evaluated["return_mean"] == whole.return_mean
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["episode_return"] > 1.5 * row["episode_length"] for row in rows if "episode_return" in row)
    # A step of CartPole has the reward 1. With action_repeat=2, a step has the reward 2, but the last can have 1.
    assert 2 * evaluated["length_mean"] - 1 <= evaluated["return_mean"] <= 2 * evaluated["length_mean"]
