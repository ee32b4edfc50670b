"""Evaluations during and after training: their number of environments, and their failures."""

from __future__ import annotations

import json
import pathlib

import pytest

import rlframe
from rlframe.cli import main
from rlframe.errors import EnvError, UsageError
from rlframe.metrics import read_jsonl
from rlframe.programs import make_experiment
from rlframe.programs.policies.evaluation import describe_evaluation, make_largest
from rlframe.programs.run_dir.directory import Result, RunDir

# An environment that needs a license. There are `most` licenses, so at most `most` environments can be open. In
# evaluations, `fails` makes the start of an environment fail, and `endless` makes its episodes endless.
ENV = """
import pathlib

import gymnasium
import numpy as np


class Licensed(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder=None, most=None, fails=None, endless=False):
        if fails == "build":
            raise OSError("the port 5000 is in use")
        self.fails, self.endless, self.slot = fails, endless, None
        for i in range(most or 0):
            try:
                self.slot = pathlib.Path(folder) / f"slot-{i}"
                self.slot.touch(exist_ok=False)
                return
            except FileExistsError:
                self.slot = None
        if most is not None:
            raise RuntimeError(f"all {most} licenses are in use")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fails == "reset":
            raise OSError("the port 5000 is in use")
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == 5 and not self.endless, False, {}

    def close(self):
        if self.slot is not None:
            self.slot.unlink()
            self.slot = None
"""
SMALL = {"steps": 64, "num_envs": 2, "env_type": "loop", "unroll_length": 16, "num_epochs": 1, "preset": "none"}
THREADS = {"topology": "heavy_env", "engine": "threads"}


@pytest.fixture
def env(tmp_path) -> str:
    (tmp_path / "env.py").write_text(ENV)
    return f"{tmp_path}/env.py:Licensed"


def train(env: str, tmp_path: pathlib.Path, **options) -> Result:
    return rlframe.train("ppo", env, run_dir=tmp_path / "run", quiet=True, **{**SMALL, **options})


def licensed(tmp_path: pathlib.Path, most: int) -> dict:
    return {"env_kwargs": {"folder": str(tmp_path), "most": most}}


def evaluation_rows(tmp_path: pathlib.Path) -> list[dict]:
    return [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "return_mean" in row]


@pytest.mark.parametrize(("works", "wanted"), [(4, 20), (1, 20), (19, 20), (20, 20), (1, 2), (1, 1)])
def test_make_largest_finds_the_largest_pool_that_can_be_made(works, wanted):
    open_now = set()

    class Pool:
        def __init__(self, size: int) -> None:
            assert not open_now, "two pools are open at the same time"
            if size > works:
                raise EnvError(f"Building environment {works} failed")
            self.size = size
            open_now.add(self)

        def close(self) -> None:
            open_now.remove(self)

    pool, problem = make_largest(Pool, wanted)
    assert pool.size == min(works, wanted) and (problem is None) == (works >= wanted)


def test_first_error_is_raised_if_no_environment_can_be_made():
    def fail(size: int) -> None:
        raise EnvError(f"no {size}")

    with pytest.raises(EnvError, match="no 20"):
        make_largest(fail, 20)


@pytest.mark.parametrize("topology", [{}, pytest.param(THREADS, marks=pytest.mark.system)])
def test_evaluation_uses_only_environments_that_can_be_built(env, tmp_path, caplog, topology):
    result = train(env, tmp_path, eval_episodes=7, **licensed(tmp_path, 5), **topology)
    assert (result.episodes, result.return_mean, result.evaluation_error) == (7, 5.0, None)
    assert result.evaluation == {"return_mean": 5.0, "return_std": 0.0, "length_mean": 5.0, "episodes": 7}
    assert "The evaluation uses only 3 of 7 environments" in caplog.text
    assert "all 5 licenses are in use" in caplog.text
    again = rlframe.evaluate(tmp_path / "run", episodes=7)
    assert again["episodes"] == 7 and not list(tmp_path.glob("slot-*"))


@pytest.mark.system
@pytest.mark.parametrize("topology", [{}, THREADS])
def test_training_environments_are_closed_for_the_final_evaluation(env, tmp_path, topology):
    result = train(env, tmp_path, eval_episodes=3, **licensed(tmp_path, 2), **topology)
    assert (result.episodes, result.return_mean) == (3, 5.0)
    assert not list(tmp_path.glob("slot-*"))


@pytest.mark.system
def test_eval_num_envs_limits_the_number_of_evaluation_environments(env, tmp_path, caplog):
    options = {"eval_episodes": 5, "eval_num_envs": 2, **licensed(tmp_path, 4)}
    assert train(env, tmp_path, **options).episodes == 5
    assert "more could not be started" not in caplog.text


def test_default_evaluation_has_20_episodes_of_at_most_108_000_steps():
    """Do not change these settings, because the recorded benchmark results depend on them."""
    said = "The evaluation after training: 20 episodes, each of at most 108,000 steps, in 20 more environments."
    assert describe_evaluation(make_experiment("ppo", "CartPole-v1")) == said


@pytest.mark.system
@pytest.mark.parametrize("topology", [{}, THREADS])
def test_run_without_evaluations_builds_no_evaluation_environment(env, tmp_path, topology):
    result = train(env, tmp_path, eval_episodes=0, eval_env_kwargs={"fails": "build"}, **topology)
    assert (result.return_mean, result.evaluation, result.evaluation_error, result.episodes) == (None, None, None, 0)
    assert result.env_steps >= 64 and not evaluation_rows(tmp_path)
    assert rlframe.load(tmp_path / "run").version > 1


def test_eval_every_is_refused_without_eval_episodes():
    with pytest.raises(UsageError, match="eval_every=100 requests evaluations .* eval_episodes=0 turns"):
        rlframe.train("ppo", "CartPole-v1", eval_every=100, eval_episodes=0)


@pytest.mark.parametrize("topology", [{}, pytest.param(THREADS, marks=pytest.mark.system)])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"eval_env_kwargs": {"fails": "build"}}, "Building environment 0 failed: OSError: the port 5000 is in use"),
        pytest.param({"eval_env_kwargs": {"fails": "reset"}}, "the port 5000 is in use", marks=pytest.mark.system),
        pytest.param(
            {"eval_env_kwargs": {"endless": True}, "eval_max_episode_length": 30},
            "has run for 31 steps without ending",
            marks=pytest.mark.system,
        ),
        pytest.param({"eval_env_kwargs": {"color": "red"}}, "color", marks=pytest.mark.system),
    ],
)
def test_message_about_a_failed_final_evaluation_contains_the_checkpoint(env, tmp_path, topology, options, why):
    result = train(env, tmp_path, eval_episodes=2, **options, **topology)
    checkpoint = max(int(path.name) for path in RunDir(tmp_path / "run").checkpoints.iterdir() if path.name.isdigit())
    assert result.env_steps >= 64 and result.return_mean is None and result.evaluation is None
    assert why in result.evaluation_error
    assert f"saved in {tmp_path}/run/checkpoints/{checkpoint}." in result.evaluation_error
    assert f"rlframe evaluate {tmp_path}/run" in result.evaluation_error
    assert Result.read(tmp_path / "run" / "result.json") == result
    assert not evaluation_rows(tmp_path) and rlframe.load(tmp_path / "run").version > 1


@pytest.mark.system
@pytest.mark.parametrize("topology", [{}, pytest.param(THREADS, marks=pytest.mark.system)])
def test_failed_evaluation_during_training_does_not_end_the_run(env, tmp_path, caplog, topology):
    options = {"eval_episodes": 1, "eval_every": 64, "steps": 1_024, "eval_env_kwargs": {"fails": "build"}}
    result = train(env, tmp_path, **options, **topology)
    assert result.env_steps >= 1_024 and "port 5000" in result.evaluation_error
    assert "failed; training continues. Building environment 0 failed" in caplog.text


@pytest.mark.system
def test_elastic_run_succeeds_although_its_evaluation_fails(env, tmp_path):
    common = {"topology": "elastic", "num_actors": 2, "max_actors": 2}
    result = train(env, tmp_path, **common, eval_env_kwargs={"fails": "build"})
    assert result.return_mean is None and "port 5000" in result.evaluation_error
    assert "rlframe evaluate" in result.evaluation_error
    other = rlframe.train("ppo", env, run_dir=tmp_path / "other", quiet=True, **SMALL, **common, eval_episodes=0)
    assert (other.return_mean, other.evaluation_error) == (None, None)


def test_exit_code_is_1_if_only_the_evaluation_failed(env, tmp_path, capsys):
    arguments = ["train", "--env", env, "--run-dir", f"{tmp_path}/run", "--preset", "none", "--steps", "64"]
    arguments += ["--num-envs", "2", "--env-type", "loop", "--unroll-length", "16", "--eval-episodes", "2"]
    arguments += ["--eval-max-episode-length", "40", "--eval-num-envs", "1", "--json"]
    assert main([*arguments, "--eval-env-kwargs", '{"endless": true}']) == 1
    said = capsys.readouterr()
    assert "2 episodes, each of at most 40 steps, in 1 more environment." in said.err
    assert "The evaluation after training failed: Evaluation: environment 0 has run for 41 steps" in said.err
    assert "not evaluated, 64 steps" in said.err and "Traceback" not in said.err
    result = json.loads(said.out.splitlines()[-1])
    assert result["return_mean"] is None and "41 steps" in result["evaluation_error"]
    assert main(["evaluate", f"{tmp_path}/run", "--max-episode-length", "20"]) == 1
    assert "has run for 21 steps" in capsys.readouterr().err
    assert main(["evaluate", f"{tmp_path}/run", "--num-envs", "0"]) == 2
    assert "--num-envs must be at least 1" in capsys.readouterr().err


def test_seeds_option_is_refused_without_evaluations(tmp_path, capsys):
    assert main(["train", "--eval-episodes", "0", "--seeds", "1,2", "--run-dir", f"{tmp_path}/run"]) == 2
    assert (
        "--seeds compares evaluation returns, but --eval-episodes 0 turns evaluations off." in capsys.readouterr().err
    )
