"""Tests of `check_env`: each problem of an environment is found, and correct environments have no problems."""

from __future__ import annotations

import dataclasses
import gc
import json
import mmap
import shlex
import textwrap
import threading
import time

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

import rlframe
from rlframe.cli import main
from rlframe.errors import UsageError
from rlframe.programs import load_experiment
from rlframe.programs.env_check.check import check_env
from rlframe.programs.env_check.report import CheckReport, Problem


@pytest.fixture(autouse=True, scope="module")
def unaffected_by_other_tests():
    """Leave the objects of other tests out of garbage collections, and allow for memory that their threads allocate."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlframe.programs.env_check.speed._MIN_GROWTH", 8 << 20)
        yield


class Walk(gymnasium.Env):
    """A correct environment: episodes end with probability 0.1, or at a time limit of 30 steps."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), float(action), self.np_random.random() < 0.1, self.t >= 30, {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


class GlobalRandom(Walk):
    def observe(self):
        return np.random.uniform(-1, 1, 3).astype(np.float32)


class SharedState(Walk):
    count = 0

    def observe(self):
        SharedState.count += 1
        return np.full(3, self.count % 7 / 7, np.float32)


class ConstantSeed(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else 1)


class Nan(Walk):
    def observe(self):
        return np.full(3, np.nan, np.float32)


class InfiniteReward(Walk):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, np.inf, *rest


class OtherShape(Walk):
    def observe(self):
        return super().observe()[:2]


class OtherDtype(Walk):
    def observe(self):
        return super().observe().astype(np.float64)


class Outside(Walk):
    def observe(self):
        return np.array([0.0, 0.0, 3.0], np.float32) + super().observe() / 10


class OneStep(Walk):
    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, True, False, info


class WrongTimeLimit(Walk):
    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t >= 50, False, {}


class NoReward(Walk):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 0.0, *rest


class ResetsItself(Walk):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            observation, info = self.reset()
        return observation, reward, terminated, truncated, info


class Unbounded(Walk):
    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def step(self, action):
        return super().step(action[0])


class Raises(Walk):
    def step(self, action):
        raise RuntimeError("no simulator")


class OldReset(Walk):
    def reset(self):
        return self.observe()


class DictActions(Walk):
    action_space = spaces.Dict(first=spaces.Discrete(2))


class CloseRaises(Walk):
    def close(self):
        raise RuntimeError("closed twice")


class Masked(Walk):
    """An environment that refuses illegal actions."""

    observation_space = spaces.Dict(place=Walk.observation_space, action_mask=spaces.MultiBinary(3))

    def step(self, action):
        assert self.mask[action], f"action {action} is illegal"
        return super().step(action)

    def observe(self):
        self.mask = self.np_random.permutation([1, 0, 0]).astype(np.int8)
        return {"place": super().observe(), "action_mask": self.mask}


class Robot(dm_env.Environment):
    """A dm_env environment with bounds for its rewards."""

    def __init__(self, seed=0):
        self._rng = np.random.default_rng(seed)

    def observation_spec(self):
        return {"joints": specs.BoundedArray((2,), np.float64, -2, 2)}

    def action_spec(self):
        return specs.BoundedArray((1,), np.float64, -1, 1)

    def reward_spec(self):
        return specs.BoundedArray((), np.float64, 0, 1)

    def reset(self):
        self._t = 0
        return dm_env.restart({"joints": self._rng.uniform(-2, 2, 2)})

    def step(self, action):
        self._t += 1
        step = dm_env.truncation if self._t == 9 else dm_env.transition
        return step(1.5, {"joints": self._rng.uniform(-2, 2, 2)})


class Sleeps(Walk):
    """An environment that waits without the GIL, so threads are faster than a loop."""

    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


def check(env, **options) -> CheckReport:
    return check_env(env, seconds=0.1, **options)


@pytest.fixture(autouse=True)
def enough_steps_on_a_busy_machine(monkeypatch):
    for module in ("episodes", "speed"):
        monkeypatch.setattr(f"rlframe.programs.env_check.{module}._MIN_STEPS", 60)


def only_problem(report: CheckReport) -> Problem:
    assert len(report.problems) == 1, report
    return report.problems[0]


@pytest.mark.parametrize("env", [Walk, Walk(), Masked], ids=["class", "object", "masked"])
def test_correct_environment_has_no_problems(env):
    report = check(env)
    assert report.problems == () and report.ok and "No problems." in str(report)
    measured = report.measurements
    assert measured["episodes"] == measured["terminated"] + measured["truncated"] > 0
    low, mean, high = measured["length"]
    assert 1 <= low <= mean <= high <= 30
    assert 0 < measured["seconds_per_step"] < 0.1 and measured["steps_per_second"]["loop"] > 100
    assert report.recommendation.env_type == "loop" and report.recommendation.num_workers is None


@pytest.mark.parametrize(
    ("env", "level", "part", "texts"),
    [
        (GlobalRandom, "error", "seed", ("equal seeds and equal actions", "another observation after 0 steps")),
        (SharedState, "error", "seed", ("equal seeds and equal actions", "state that copies share")),
        (ConstantSeed, "warning", "seed", ("different seeds gave the same episodes",)),
        (Nan, "error", "observation", ("NaN", "nan after 0 steps")),
        (InfiniteReward, "error", "reward", ("NaN or infinity", "inf after 1 steps")),
        (OtherShape, "error", "episodes", ("float32 of shape (2,)", "requires float32 of shape (3,)")),
        (OtherDtype, "warning", "observation", ("expected: float32", "received: float64", "np.asarray")),
        (Outside, "warning", "observation", ("expected: -1 to 1 at (2,)", "after 0 steps")),
        (OneStep, "warning", "end", ("every episode ended at its first step",)),
        (WrongTimeLimit, "warning", "end", ("same length", "episodes of 50 steps", "truncated=True")),
        (NoReward, "warning", "reward", ("random actions got no reward",)),
        (ResetsItself, "warning", "end", ("step() calls reset()", "last observation of the episode")),
        (Unbounded, "warning", "action", ("no bounds", "bounds from -inf to inf")),
        (Raises, "error", "episodes", ("RuntimeError in step(): no simulator", "test_env_check.py")),
        (OldReset, "error", "episodes", ("reset() without `seed`", "Gym before 0.26")),
        (DictActions, "error", "spaces", ("is not supported: expected Discrete",)),
        (CloseRaises, "error", "close", ("RuntimeError: closed twice",)),
        (Robot, "warning", "reward", ("outside the bounds", "expected: 0 to 1", "received: 1.5")),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_problem_is_reported(env, level, part, texts):
    report = check(env)
    problem = only_problem(report)
    assert (problem.level, problem.check) == (level, part)
    for text in texts:
        assert text in str(problem)
    assert report.ok == (level == "warning") == (report.recommendation is not None)


def test_normalization_is_recommended_if_observations_are_large():
    class Large(Walk):
        observation_space = spaces.Box(-1000.0, 1000.0, (3,), np.float32)

        def observe(self):
            return 1000.0 * super().observe()

    assert "normalize_observations=True" in check(Large).recommendation.command
    assert "normalize_observations" not in check(Walk).recommendation.command


def test_environment_without_an_end_is_reported(monkeypatch):
    monkeypatch.setattr("rlframe.programs.env_check.episodes._LONG", 20)

    class Endless(Walk):
        def step(self, action):
            return self.observe(), 1.0, False, False, {}

    assert "no episode ended" in str(only_problem(check(Endless)))


KEPT = []


class Grows(Walk):
    def step(self, action):
        KEPT.append(mmap.mmap(-1, 80_000))  # new pages, because the process may reuse freed pages of the heap
        KEPT[-1].write(bytes(80_000))
        return super().step(action)


def test_growing_memory_is_reported():
    problem = only_problem(check(Grows))
    assert problem.check == "memory"
    assert 60_000 < int(problem.received.split()[0].replace(",", "")) < 100_000  # 80,000 bytes and noise
    KEPT.clear()


def test_environment_that_cannot_be_pickled_is_reported():
    lock = threading.Lock()

    def make():
        assert lock is not None
        return Walk()

    problem = only_problem(check(make))
    assert problem.check == "workers" and problem.level == "warning" and "cannot be sent" in problem.received


@pytest.mark.system
def test_threads_are_recommended_for_an_environment_that_waits(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    report = check(Sleeps)
    speeds = report.measurements["steps_per_second"]
    assert list(speeds) == ["loop", "thread", "process"] and speeds["thread"] > 1.5 * speeds["loop"]
    pool = report.recommendation
    assert pool.env_type in ("thread", "process") and pool.num_workers == 4
    assert f"--env-type {pool.env_type} --num-workers 4" in pool.command and pool.agent == "dqn"


@pytest.mark.parametrize(
    ("env", "options", "expected"),
    [
        pytest.param(
            *("jax:CartPole-v1", {}, "--agent ppo --env jax:CartPole-v1 --topology fused --steps"),
            marks=pytest.mark.system,
        ),
        ("CartPole-v1", {"num_envs": 64}, "--agent ppo --env CartPole-v1 --num-envs 64 --env-type envpool --steps"),
    ],
)
def test_recommended_command_for_a_library(env, options, expected):
    report = check(env, **options)
    assert report.problems == () and expected in report.recommendation.command


def test_environment_of_a_session_gets_python_code():
    report = check(lambda: Walk())
    assert report.recommendation.command.startswith("rlframe.train('ppo', make_env, env_type='loop', steps=")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "CartPol-v1"}, "Unknown environment 'CartPol-v1'"),
        ({"env": Walk(), "env_kwargs": {"size": 3}}, "are for a name, class or function"),
        ({"env": Walk, "seconds": 0.0}, "seconds must be above 0"),
        ({"env": Walk, "num_envs": 0}, "num_envs must be at least 1"),
        ({"env": Walk, "seed": -1}, "seed must be between 0"),
    ],
)
def test_wrong_argument_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        rlframe.check_env(**options)


@pytest.fixture
def env_file(tmp_path):
    path = tmp_path / "my_env.py"
    path.write_text(
        textwrap.dedent("""
        import gymnasium, numpy as np

        class Line(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
            action_space = gymnasium.spaces.Discrete(2)

            def __init__(self, scale=1.0):
                self.scale = scale

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                return self.observe(), {}

            def step(self, action):
                return self.observe(), float(action), self.np_random.random() < 0.1, False, {}

            def observe(self):
                return self.np_random.uniform(-self.scale, self.scale, 2).astype(np.float32)
        """)
    )
    return f"{path}:Line"


def test_command_prints_the_report_and_its_exit_code_depends_on_errors(env_file, capsys):
    assert main(["check-env", env_file, "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "No problems." in shown and f"rlframe train --agent ppo --env {env_file}" in shown
    assert main(["check-env", env_file, "--seconds", "0.1", "--env-kwargs", '{"scale": 1e39}', "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and report["problems"][0]["level"] == "error"
    assert set(report) == {"ok", *(field.name for field in dataclasses.fields(CheckReport))}


@pytest.mark.system
@pytest.mark.parametrize("topology", ["single_process", "heavy_env"])
def test_recommended_command_trains(env_file, tmp_path, topology):
    command = check(env_file, env_kwargs={"scale": 0.5}).recommendation.command
    _, *words = shlex.split(command)
    small = ["--topology", topology, "--run-dir", str(tmp_path / "run"), "--steps", "200", "--unroll-length", "8"]
    assert main([*words, *small, "--quiet", "--eval-episodes", "1"]) == 0
    experiment = load_experiment(tmp_path / "run")
    assert experiment.env == env_file and experiment.env_kwargs == {"scale": 0.5}
