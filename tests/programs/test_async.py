"""`rlframe train --async`: asynchronous environments in every topology."""

from __future__ import annotations

import dataclasses
import time

import gymnasium
import numpy as np
import pytest

from rlframe.agents import IMPALA, IMPALAConfig
from rlframe.agents.networks import MLPConfig
from rlframe.cli import main
from rlframe.cli.train_options import read_arguments
from rlframe.envs import AsyncEnv
from rlframe.errors import UsageError
from rlframe.programs import evaluate, load_experiment, make_experiment, run_experiment
from rlframe.programs.topologies.makers import make_pool, replay_capacity
from rlframe.replay import ReplayBuffer
from rlframe.types import FIRST, MID, AgentOutput, Step, TimeStep, global_env_ids, specs
from tests.programs.running_program import ROOT, WITH_ELASTIC, RunningProgram, options_of

SMALL = {"network": "mlp", "network_config": MLPConfig((16,)), "eval_episodes": 2, "num_envs": 8, "async_envs": True}
PROCESSES = ["--async", "--wait-num", "1", "--steps", "3000", "--num-envs", "8", "--unroll-length", "8"]


def small_experiment(agent: str, **fields):
    return make_experiment(agent, **{**SMALL, "steps": 1_000, "log_every": 200, **fields})


class SlowEnv(gymnasium.Env):
    """An environment with episodes of 20 steps. A step takes 1 ms on average."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(self.np_random.exponential(0.001))
        self.steps += 1
        return np.full(2, self.steps / 20, np.float32), float(action), self.steps == 20, False, {}


def slow_env():
    return SlowEnv()


def test_single_process_learns_from_the_environments_that_answer_first(tmp_path):
    experiment = small_experiment("impala", unroll_length=8, batch_size=4, wait_num=3)
    result = run_experiment(experiment, run_dir=tmp_path / "run")
    assert 1_000 <= result.env_steps < 1_003
    assert 26 <= result.learner_steps <= 36  # about 1,000 / 32, because a batch has 32 steps
    assert load_experiment(tmp_path / "run") == experiment
    again = evaluate(tmp_path / "run", episodes=2)
    assert (again["return_mean"], again["params_version"]) == (result.return_mean, result.params_version)
    more = run_experiment(dataclasses.replace(experiment, steps=1_500), run_dir=tmp_path / "run", resume=True)
    assert more.env_steps >= 1_500 and more.learner_steps > result.learner_steps


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "light_env"])
def test_actors_act_on_the_environments_that_answer_first(tmp_path, monkeypatch, topology):
    waited = []
    recv = AsyncEnv.recv
    monkeypatch.setattr(AsyncEnv, "recv", lambda self: (waited.append((self.num_envs, self.wait_num)), recv(self))[1])
    experiment = small_experiment("dqn", topology=topology, engine="threads", env_type="thread", min_replay_size=100)
    result = run_experiment(experiment, run_dir=tmp_path / "run")
    assert result.env_steps >= 1_000 and result.learner_steps > 50
    assert set(waited) == {(4, 2)}


@pytest.mark.system
@pytest.mark.parametrize("program_name", WITH_ELASTIC)
def test_async_environments_work_in_every_engine_and_topology(tmp_path, program_name):
    options = ["--agent", "impala", "--env", f"{__file__}:slow_env", "--preset", "none", "--batch-size", "4"]
    with RunningProgram(tmp_path / "run", *options, *PROCESSES, *options_of(program_name)) as program:
        code, result = program.finish()
    assert code == 0 and result is not None
    assert result["env_steps"] >= 3_000
    assert result["learner_steps"] >= 0.8 * result["env_steps"] / 32 - 8


def test_async_is_refused_for_an_agent_that_needs_synchronous_environments(tmp_path):
    with pytest.raises(
        UsageError, match=r"ppo cannot learn from asynchronous .*max_staleness=0.* such as impala or dqn"
    ):
        run_experiment(small_experiment("ppo"), run_dir=tmp_path / "run")
    reinforce = f"{ROOT}/examples/custom_agent.py:Reinforce"
    # A user's agent is also refused, because the check reads its `replay_spec`.
    with pytest.raises(UsageError, match="max_staleness=0, so actors wait"):
        run_experiment(make_experiment(reinforce, async_envs=True, topology="heavy_env"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_option_that_conflicts_with_async_is_refused(capsys):
    with pytest.raises(UsageError, match="The env_type loop steps environments one after another"):
        small_experiment("impala", env_type="loop")
    with pytest.raises(
        UsageError, match="wait_num must be between 1 and 4, the number of environments per pool, got 5"
    ):
        small_experiment("impala", topology="heavy_env", wait_num=5)
    assert main(["train", "--agent", "impala", "--wait-num", "2"]) == 2
    assert "wait_num=2 is for asynchronous environments: add --async" in capsys.readouterr().err


@pytest.mark.parametrize(("num_envs", "wait_num"), [(1, 1), (2, 1), (4, 2), (8, 3), (16, 6), (64, 22)])
def test_wait_num_defaults_to_a_third_of_the_environments(num_envs, wait_num):
    assert small_experiment("impala", num_envs=num_envs).num_awaited_envs == wait_num
    assert small_experiment("impala", num_envs=num_envs, wait_num=num_envs).num_awaited_envs == num_envs
    assert small_experiment("impala", num_envs=num_envs).synchronous.num_awaited_envs == num_envs


@pytest.mark.system
def test_env_type_auto_selects_the_fastest_asynchronous_pool():
    for env, kind in ((f"{__file__}:slow_env", "AsyncProcesses"), ("CartPole-v1", "EnvPoolAdapter")):
        pool = make_pool(small_experiment("impala", env=env), 4, {}, 1)
        assert (pool.wait_num, type(pool._pool).__name__) == (3, kind)
        pool.close()


def test_queue_has_room_for_unrolls_of_an_environment_that_is_four_times_slower():
    experiment = small_experiment("impala", unroll_length=8, batch_size=4)
    observation = specs.Array((1,), np.float32, "observation")
    agent = IMPALA(
        IMPALAConfig(unroll_length=8, batch_size=4, learning_rate=6e-4),
        observation,
        specs.DiscreteArray(2, np.int32, "action"),
    )
    buffer = ReplayBuffer(agent, capacity=replay_capacity(agent.replay_spec, experiment))
    rank, _ = buffer.claim_rank(8)
    counts, slow = np.zeros(8, np.int64), 0
    for round in range(4 * 8 * 10):
        envs = np.arange(8) if round % 4 == 0 else np.arange(1, 8)
        now = counts[envs]
        counts[envs] += 1
        before, after = (
            TimeStep(
                np.where(at == 0, FIRST, MID), *np.ones((2, len(at)), np.float32), envs[:, None].astype(np.float32)
            )
            for at in (now, now + 1)
        )
        output = AgentOutput(np.zeros(len(envs), np.int32), {"log_prob": np.zeros(len(envs), np.float32)})
        buffer.add(global_env_ids(rank, envs), Step(before, output, (), 1, after))
        while (batch := buffer.sample()) is not None:
            slow += int((batch.data.observation[:, 0, 0] == 0).sum())
    assert slow == 10


def test_command_line_reads_async_options():
    experiment, _, _ = read_arguments(["--agent", "impala", "--async", "--wait-num", "2", "--topology", "heavy_env"])
    assert (
        experiment.topology_config.async_envs,
        experiment.topology_config.wait_num,
        experiment.num_awaited_envs,
    ) == (
        True,
        2,
        2,
    )
