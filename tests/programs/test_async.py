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


def experiment(agent: str, **fields):
    return make_experiment(agent, **{**SMALL, "steps": 1_000, "log_every": 200, **fields})


class SlowEnv(gymnasium.Env):
    """Episodes of 20 steps, each of which takes 0 to 4 ms."""

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


def test_one_process_learns_from_the_environments_that_answer_first(tmp_path):
    described = experiment("impala", unroll_length=8, batch_size=4, wait_num=3)
    result = run_experiment(described, run_dir=tmp_path / "run")
    assert 1_000 <= result.env_steps < 1_003
    assert 26 <= result.learner_steps <= 36  # a batch is of 32 steps, and those in mid-unroll are in none yet
    assert load_experiment(tmp_path / "run") == described
    again = evaluate(tmp_path / "run", episodes=2)
    assert (again["return_mean"], again["params_version"]) == (result.return_mean, result.params_version)
    more = run_experiment(dataclasses.replace(described, steps=1_500), run_dir=tmp_path / "run", resume=True)
    assert more.env_steps >= 1_500 and more.learner_steps > result.learner_steps


@pytest.mark.parametrize("topology", ["heavy_env", pytest.param("light_env", marks=pytest.mark.system)])
def test_actors_of_a_topology_act_on_what_answers_first(tmp_path, monkeypatch, topology):
    waited = []
    recv = AsyncEnv.recv
    monkeypatch.setattr(AsyncEnv, "recv", lambda self: (waited.append((self.num_envs, self.wait_num)), recv(self))[1])
    described = experiment("dqn", topology=topology, engine="threads", env_type="thread", min_replay_size=100)
    result = run_experiment(described, run_dir=tmp_path / "run")
    assert result.env_steps >= 1_000 and result.learner_steps > 50
    assert set(waited) == {(4, 2)}


@pytest.mark.system
@pytest.mark.parametrize("which", WITH_ELASTIC)
def test_processes_of_a_topology_do_too(tmp_path, which):
    options = ["--agent", "impala", "--env", f"{__file__}:slow_env", "--preset", "none", "--batch-size", "4"]
    with RunningProgram(tmp_path / "run", *options, *PROCESSES, *options_of(which)) as program:
        code, result = program.finish()
    assert code == 0 and result is not None
    assert result["env_steps"] >= 3_000
    assert result["learner_steps"] >= 0.8 * result["env_steps"] / 32 - 8


def test_an_agent_that_needs_all_environments_in_step_is_refused_and_told_why(tmp_path):
    with pytest.raises(
        UsageError, match=r"ppo cannot learn from asynchronous .*max_staleness=0.* such as impala or dqn"
    ):
        run_experiment(experiment("ppo"), run_dir=tmp_path / "run")
    reinforce = f"{ROOT}/examples/custom_agent.py:Reinforce"
    with pytest.raises(UsageError, match="max_staleness=0, so actors wait"):  # from its replay_spec, not its name
        run_experiment(make_experiment(reinforce, async_envs=True, topology="heavy_env"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_options_that_do_not_go_with_asynchronous_environments_are_refused(capsys):
    with pytest.raises(UsageError, match="The env_type loop steps environments one after another"):
        experiment("impala", env_type="loop")
    with pytest.raises(
        UsageError, match="wait_num must be between 1 and 4, the number of environments per pool, got 5"
    ):
        experiment("impala", topology="heavy_env", wait_num=5)
    assert main(["train", "--agent", "impala", "--wait-num", "2"]) == 2
    assert "wait_num=2 is for asynchronous environments: add --async" in capsys.readouterr().err


@pytest.mark.parametrize(("num_envs", "wait_num"), [(1, 1), (2, 1), (4, 2), (8, 3), (16, 6), (64, 22)])
def test_a_third_of_the_environments_is_waited_for_unless_another_number_is_given(num_envs, wait_num):
    assert experiment("impala", num_envs=num_envs).num_awaited_envs == wait_num
    assert experiment("impala", num_envs=num_envs, wait_num=num_envs).num_awaited_envs == num_envs
    assert experiment("impala", num_envs=num_envs).synchronous.num_awaited_envs == num_envs


@pytest.mark.system
def test_a_pool_runs_in_the_quickest_way_that_can_be_asynchronous():
    for env, kind in ((slow_env, "AsyncProcesses"), ("CartPole-v1", "EnvPoolAdapter")):
        pool = make_pool(experiment("impala"), 4, {}, 1, env=env)
        assert (pool.wait_num, type(pool._pool).__name__) == (3, kind)
        pool.close()


def test_a_queue_has_room_for_the_unrolls_of_an_environment_that_is_four_times_as_slow():
    described = experiment("impala", unroll_length=8, batch_size=4)
    observation = specs.Array((1,), np.float32, "observation")
    agent = IMPALA(IMPALAConfig(unroll_length=8, batch_size=4), observation, specs.DiscreteArray(2, np.int32, "action"))
    buffer = ReplayBuffer(agent, capacity=replay_capacity(agent.replay_spec, described))
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


def test_the_command_line_takes_the_options():
    described, _, _ = read_arguments(["--agent", "impala", "--async", "--wait-num", "2", "--topology", "heavy_env"])
    assert (described.topology_config.async_envs, described.topology_config.wait_num, described.num_awaited_envs) == (
        True,
        2,
        2,
    )
