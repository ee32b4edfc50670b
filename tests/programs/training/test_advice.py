"""Tests of the advice after `--profile`: it follows the largest parts, and names only options that the run accepts."""

from __future__ import annotations

import gymnasium
import pytest

import rlframe
from rlframe.errors import UsageError
from rlframe.programs import make_experiment
from rlframe.programs.topologies.makers import make_agent
from rlframe.programs.training.profile import (
    COMPILATION,
    ENVIRONMENT,
    INFERENCE,
    LEARNER,
    LOOP,
    SAMPLE,
    ProfileRow,
    advise,
)


class Slow(gymnasium.Env):
    """The environment of a user. The tests do not step it."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        raise NotImplementedError

    def step(self, action):
        raise NotImplementedError


def advice(
    agent="ppo",
    env="CartPole-v1",
    *,
    microseconds=8_000.0,
    cores=4,
    monkeypatch,
    options=None,
    seconds_of_env=0.0,
    **seconds,
):
    """Return the advice for a run whose parts take these seconds. A call of the pool takes `microseconds`."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    names = {
        "compiling": COMPILATION,
        "env": ENVIRONMENT,
        "act": INFERENCE,
        "learn": LEARNER,
        "draw": SAMPLE,
        "loop": LOOP,
    }
    experiment = make_experiment(agent, env, **{"num_envs": 8, **(options or {})})
    seconds["env"] = seconds_of_env
    rows = [
        ProfileRow(name, 10, seconds.get(key, 0.0), microseconds if key == "env" else 1.0, 0.0)
        for key, name in names.items()
    ]
    replay = make_agent(experiment.with_topology_options(env_type="auto", num_workers=None)).replay_spec
    return advise(rows, experiment, replay)


PROCESS = {"env_type": "process"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"env": Slow},
            "environment 80%: try --env-type process --num-workers 4: a step takes 1,000 us, and a loop uses one core",
        ),
        ({"env": Slow, "microseconds": 80.0}, None),
        ({"env": Slow, "cores": 1}, None),
        (
            {"env": Slow, "options": {**PROCESS, "num_workers": 2}},
            "environment 80%: try --num-workers 4: 2 of 4 cores step environments",
        ),
        ({"env": Slow, "options": PROCESS}, None),
        ({"env": Slow, "agent": "dqn", "options": PROCESS}, "environment 80%: try --async: the agent acts in"),
        (
            {"options": {"env_type": "loop"}, "microseconds": 80.0},
            "try --env jax:CartPole-v1 --env-type auto --topology",
        ),
        ({"options": {"env_type": "loop", "num_envs": 64}}, "environment 80%: try --env-type envpool: EnvPool has"),
        ({"env": "jax:CartPole-v1"}, "environment 80%: try --topology fused: it compiles"),
    ],
)
def test_advice_for_a_run_that_waits_for_its_environments(monkeypatch, arguments, expected):
    lines = advice(monkeypatch=monkeypatch, act=2.0, **{"seconds_of_env": 8.0, **arguments})
    if expected is None:
        assert lines == []
    else:
        assert len(lines) == 1 and expected in lines[0]


@pytest.mark.parametrize(
    ("agent", "seconds", "expected"),
    [
        (
            "dqn",
            {"learn": 6.0, "act": 4.0},
            ["learner 60%: try --topology heavy_env", "inference 40%: try --num-envs 16"],
        ),
        ("dqn", {"learn": 8.0, "act": 2.0}, ["learner 80%: try --update-period"]),
        ("ppo", {"learn": 8.0, "act": 2.0}, ["learner 80%: try --num-epochs"]),
        ("dqn", {"draw": 6.0, "learn": 2.0, "act": 2.0}, ["replay sample 60%: try --batch-size 32"]),
        ("ppo", {"loop": 6.0, "learn": 2.0, "act": 2.0}, ["rlframe (loop, actor, logs) 60%: try --num-envs 16"]),
        (
            "ppo",
            {"compiling": 30.0, "learn": 2.5, "act": 2.5, "draw": 2.5, "loop": 2.5},
            ["compilation 75%: it runs only once"],
        ),
    ],
)
def test_advice_follows_the_largest_parts(monkeypatch, agent, seconds, expected):
    lines = advice(agent, monkeypatch=monkeypatch, options={"batch_size": 64} if agent == "dqn" else {}, **seconds)
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected):
        assert line.startswith(start)


def test_advice_leaves_out_options_that_the_run_refuses(monkeypatch):
    options = {"num_envs": 7, "batch_size": 64}  # two actors cannot share seven environments
    lines = advice("dqn", monkeypatch=monkeypatch, options=options, learn=6.0, act=4.0)
    assert lines[0].startswith("learner 60%: try --update-period")


@pytest.mark.system
def test_profile_prints_advice_in_one_process_and_is_refused_in_several(tmp_path, capsys):
    options = {"env_type": "loop", "num_envs": 64, "unroll_length": 16, "eval_episodes": 0}
    rlframe.train("ppo", "CartPole-v1", steps=30_000, profile=True, run_dir=tmp_path / "run", **options)
    printed = capsys.readouterr().err.partition("time of each part")[2]
    assert "environment" in printed and "try --" in printed
    with pytest.raises(UsageError, match="profile needs the topology single_process"):
        rlframe.train("ppo", "CartPole-v1", topology="heavy_env", profile=True, run_dir=tmp_path / "other", **options)
    assert not (tmp_path / "other").exists()
