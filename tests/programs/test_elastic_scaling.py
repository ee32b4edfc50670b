"""Elastic runs change their number of collectors automatically, also with custom agents and environments."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import psutil
import pytest

from tests.extras import needs
from tests.programs.elastic_program import ElasticProgram, last_status
from tests.programs.running_program import ROOT

needs("trajectories")

pytestmark = pytest.mark.system
LONG = ("--steps", "100000000", "--log-every", "500", "--num-actors", "1", "--max-actors", "2", "--quiet")
CANCEL_REASON = "seen enough"

SLOW_ENV = """
import time

import gymnasium

class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)

def make_env(**options):
    return Slow(gymnasium.make("CartPole-v1"))
"""

SLOW_AGENT = """
import time

from rlframe.agents import IMPALA

class Slow(IMPALA):
    jit_learner_step = False

    def learner_step(self, params, learner_state, batch):
        time.sleep(0.5)
        return super().learner_step(params, learner_state, batch)
"""


def cancel_and_check(program: ElasticProgram) -> dict[str, Any]:
    """Cancel the run, and check its final status and counters."""
    program.call(lambda client: client.cancel(CANCEL_REASON))
    code, _ = program.finish()
    assert code == 0, program.errors()
    status = last_status(program.run_dir)
    assert (status["job"]["state"], status["job"]["reason"]) == ("CLOSED", CANCEL_REASON)
    program.check_counters(status)
    return status


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a second collector needs a second core")
def test_collector_is_added_if_the_learner_waits_for_data(tmp_path: pathlib.Path) -> None:
    env = tmp_path / "env.py"
    env.write_text(SLOW_ENV)
    arguments = ["--agent", "impala", "--env", f"{env}:make_env", "--num-envs", "2", "--batch-size", "2", *LONG]
    with ElasticProgram(tmp_path / "run", *arguments) as program:
        status = program.wait_for(lambda status: status["wanted"]["collector"] == 2)
        assert status["scaling"] == "auto"
        program.wait_for_collectors(2)
        at = program.wait_for(lambda status: True)["job"]["seconds"]
        status = program.wait_for(
            lambda status: status["job"]["seconds"] > at + 21.0
        )  # 21 seconds are four intervals of the load measurement
        assert (status["wanted"]["collector"], status["scaling"]) == (2, "auto")
        cancel_and_check(program)


def test_collector_is_stopped_if_the_learner_is_slow(tmp_path: pathlib.Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(SLOW_AGENT)
    arguments = ["--agent", f"{agent}:Slow", "--env", "CartPole-v1", "--num-envs", "4", *LONG, "--num-actors", "2"]
    with ElasticProgram(tmp_path / "run", *arguments) as program:
        program.wait_for_collectors(2)
        status = program.wait_for(lambda status: status["wanted"]["collector"] == 1)
        assert status["scaling"] == "auto"
        program.wait_for_collectors(1)
        cancel_and_check(program)


@pytest.mark.parametrize(
    "agent",
    [
        ("--agent", f"{ROOT}/examples/custom_agent.py:Reinforce"),
        ("--agent", "dqn", "--prioritized"),
        ("--agent", "ppo"),
    ],
    ids=["custom", "prioritized", "ppo"],
)
def test_agent_keeps_learning_while_collectors_start_and_stop(tmp_path: pathlib.Path, agent: tuple[str, ...]) -> None:
    with ElasticProgram(tmp_path / "run", *agent, "--env", "CartPole-v1", *LONG) as program:
        program.wait_for_collectors(1)
        program.scale(2)
        program.kill_and_wait("collector/0", signal.SIGKILL)
        program.scale(1)
        at = program.wait_for(lambda status: True)["job"]
        later = program.wait_for(lambda status: status["job"]["learner_steps"] > at["learner_steps"] + 5, 30.0)["job"]
        assert later["seconds"] - at["seconds"] < 15.0
        program.scale(2)
        assert program.wait_for(lambda status: status["job"]["learner_steps"] > later["learner_steps"] + 5, 30.0)
        cancel_and_check(program)


def test_environment_processes_exit_after_their_collector_is_killed(tmp_path: pathlib.Path) -> None:
    arguments = ["--agent", "impala", "--env", "CartPole-v1", "--env-type", "process", "--num-workers", "2", *LONG]
    with ElasticProgram(tmp_path / "run", *arguments) as program:
        program.wait_for_collectors(1)
        collector = psutil.Process(program.worker("collector/0")["pid"])
        workers = collector.children(recursive=True)
        assert len(workers) >= 2
        program.kill_and_wait("collector/0", signal.SIGKILL)
        assert psutil.wait_procs(workers, 10.0)[1] == []
        program.worker("collector/0", above=0)
        more = psutil.Process(program.worker("collector/0")["pid"]).children(recursive=True)
        cancel_and_check(program)
        assert psutil.wait_procs(more, 10.0)[1] == []
