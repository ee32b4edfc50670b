"""If a node hangs because of SIGSTOP, the launcher restarts the node, and the run completes."""

from __future__ import annotations

import re
import signal

import pytest

from tests.programs.running_program import IMPALA, PROGRAMS, RunningProgram, options_of
from tests.programs.test_failures import NODES, steps_of

# The environment sleeps in each step, so that the run does not end before all nodes have hung.
STEPS = 120_000
ENV = """
import time

import gymnasium

class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.002)
        return super().step(action)

def make_env():
    return Slow(gymnasium.make("CartPole-v1"))
"""
OVERSHOOT = 1.05  # a run can exceed its last step by 5 %, because the counts arrive late
QUICK = ["--hang-timeout", "10", "--eval-episodes", "2", "--log-every", "500"]


@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program_name", PROGRAMS)
def test_run_completes_its_steps_although_each_node_hangs_once(tmp_path, program_name):
    env = tmp_path / "env.py"
    env.write_text(ENV)
    arguments = [
        *IMPALA[:2],
        "--num-envs",
        "8",
        "--env",
        f"{env}:make_env",
        *options_of(program_name),
        "--steps",
        str(STEPS),
        *QUICK,
    ]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        at = 0
        for name in NODES[program_name.split()[1]]:
            program.wait_for_steps(at + 1_000, 400.0)
            program.kill(name, signal.SIGSTOP)
            at = steps_of(program)
            assert at < STEPS, "the run ended before all nodes hung"
        code, result = program.finish(600.0)
    assert code == 0, program.errors()
    assert result is not None and STEPS <= result["env_steps"] <= OVERSHOOT * STEPS
    restarts = re.findall(r"\[(\S+)\] (.*): restart (\d) of 3", program.errors())
    assert [(name, number) for name, _, number in restarts] == [
        (name.replace(" ", "/"), "1") for name in NODES[program_name.split()[1]]
    ]
    assert all(re.match(r"hung: no heartbeat for \d+ s, and was killed", how) for _, how, _ in restarts)


@pytest.mark.system
@pytest.mark.timeout(900)
def test_actors_obey_the_step_limit_while_the_monitor_hangs(tmp_path):
    arguments = [*IMPALA, "--topology", "heavy_env", "--steps", "8000", *QUICK]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        program.wait_until(lambda: "monitor" in program.nodes() and program.rows(), 400.0)
        program.kill("monitor", signal.SIGSTOP)
        code, result = program.finish(600.0)
    assert code == 0, program.errors()
    assert result is not None and 8000 <= result["env_steps"] <= OVERSHOOT * 8000
    assert "[monitor] hung: no heartbeat for " in program.errors()


AGENT = """
import pathlib
import time

from rlframe.agents import IMPALA

class SlowToCompile(IMPALA):
    def learner_step(self, params, learner_state, batch):  # called during tracing
        slow = pathlib.Path(__file__).with_name("compiled")
        if not slow.exists():
            time.sleep(180.0)
            slow.touch()
        return super().learner_step(params, learner_state, batch)
"""
SLOW_ENV = """
import pathlib
import time

import gymnasium

class SlowOnce(gymnasium.Wrapper):
    def step(self, action):
        slow = pathlib.Path(__file__).with_name("stepped")
        if not slow.exists():
            time.sleep(300.0)
            slow.touch()
        return super().step(action)

def make_env():
    return SlowOnce(gymnasium.make("CartPole-v1"))
"""


@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("topology", ["heavy_env", "elastic"])
def test_node_is_not_killed_during_a_slow_compilation_or_a_slow_step(tmp_path, topology):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "env.py").write_text(SLOW_ENV)
    arguments = ["--agent", f"{tmp_path}/agent.py:SlowToCompile", "--env", f"{tmp_path}/env.py:make_env"]
    arguments += ["--num-envs", "2", "--num-actors", "1", "--steps", "5000", "--eval-episodes", "2"]
    arguments += ["--topology", topology, "--batch-size", "8", "--max-restarts", "0"]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        code, result = program.finish(1500.0)
    assert code == 0, program.errors()
    assert (tmp_path / "compiled").exists() and (tmp_path / "stepped").exists()
    assert result is not None and result["env_steps"] >= 5000 and result["learner_steps"] > 0
    assert not re.search("hung|restart|is lost", program.errors()), program.errors()
