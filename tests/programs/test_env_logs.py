"""A value NAME that an environment logs is in the column `env/NAME` of metrics.jsonl."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics

from rlframe.cli import main
from rlframe.metrics import read_jsonl

OPTIONS = ["--agent", "dqn", "--env", f"{__file__}:make_env", "--preset", "none", "--network", "mlp", "--num-envs", "4"]
OPTIONS += ["--min-replay-size", "100", "--steps", "800", "--log-every", "200", "--eval-episodes", "1", "--quiet"]


class CountingEnv(gymnasium.Env):
    """An environment whose episodes have 5 and 10 steps in turn. It logs a constant and the length of the episode."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        ends = self.t == 5 * (1 + self.episode % 2)
        return (
            np.zeros(2, np.float32),
            1.0,
            ends,
            False,
            {"log": {"always": 2.5} | ({"length": self.t} if ends else {})},
        )


def make_env():
    return RecordEpisodeStatistics(CountingEnv())


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--env-type", "loop"], id="loop"),
        pytest.param(["--env-type", "process", "--num-workers", "2"], id="process", marks=pytest.mark.system),
    ],
)
def test_row_of_a_single_process_contains_means_of_environment_values(tmp_path, more):
    assert main(["train", *OPTIONS, *more, "--run-dir", str(tmp_path / "run")]) == 0
    rows = check_rows(tmp_path / "run")
    assert [row["env/length"] for row in rows] == pytest.approx([row["episode_length"] for row in rows])
    assert len(rows) == 4


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "light_env"])
def test_row_of_a_program_contains_means_of_environment_values(tmp_path, topology):
    more = ["--topology", topology, "--engine", "threads", "--run-dir", str(tmp_path / "run")]
    assert main(["train", *OPTIONS, *more]) == 0
    # If the monitor polls in the middle of a step, two counts of one actor can differ by one episode.
    check_rows(tmp_path / "run", within=1.0)


def check_rows(path, within=0.0):
    rows = [row for row in read_jsonl(path / "metrics.jsonl") if "episode_length" in row]
    if within:  # ignore rows with few episodes, because one episode changes their means too much
        rows = [row for row in rows if row["episodes"] > 4]
    assert len(rows) >= 1
    for row in rows:
        assert row["env/always"] == 2.5
        # The means from the environment and from Gymnasium's wrapper are over the same episodes.
        assert row["env/length"] == pytest.approx(row["env/episode_length"], abs=within)
        assert row["env/length"] == pytest.approx(row["env/episode_return"], abs=within)
        assert 5.0 <= row["env/length"] <= 10.0 and row["env/episode_seconds"] > 0.0
    return rows
