"""Elastic runs that fail report the reason, keep their checkpoints, and leave no processes."""

from __future__ import annotations

import pathlib
import time

import pytest

from rlframe.learners import Checkpointer
from tests.extras import needs
from tests.programs.elastic_program import ElasticProgram, last_status

needs("trajectories")

FEW = ("--num-actors", "1", "--min-actors", "1", "--max-actors", "2", "--num-envs", "2")
LONG = ("--steps", "100000000", "--log-every", "500", "--quiet")

ENV = """
import pathlib

import gymnasium

class Failing(gymnasium.Wrapper):
    def step(self, action):
        if (pathlib.Path(__file__).parent / "fail in step").exists():
            raise ValueError("step failed")
        return super().step(action)

def make_env(**options):
    if (pathlib.Path(__file__).parent / "fail in make").exists():
        raise ValueError("make failed")
    return Failing(gymnasium.make("CartPole-v1"))
"""


@pytest.mark.system
def test_non_finite_loss_fails_the_run_without_a_retry(tmp_path: pathlib.Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        f"""
import pathlib

import jax.numpy as jnp

from rlframe.agents import IMPALA

class Diverges(IMPALA):
    jit_learner_step = False

    def learner_step(self, params, learner_state, batch):
        params, state, *rest = super().learner_step(params, learner_state, batch)
        if pathlib.Path({str(tmp_path / "diverge")!r}).exists():
            rest[0] = {{**rest[0], "loss": jnp.float32("nan")}}
        return (params, state, *rest)
"""
    )
    arguments = ["--agent", f"{agent}:Diverges", *FEW, *LONG, "--checkpoint-every", "500"]
    with ElasticProgram(tmp_path / "run", *arguments) as program:
        checkpoints = Checkpointer(tmp_path / "run" / "checkpoints")
        program.wait_until(checkpoints.steps)
        began = time.monotonic()
        (tmp_path / "diverge").touch()
        code, result = program.finish()
        assert time.monotonic() - began < 30.0
    assert code == 1 and result is None
    assert "NonFiniteLossError: The loss of learner step" in program.errors(), program.errors()
    assert f"The last checkpoint is {tmp_path}/run/checkpoints/{checkpoints.steps()[-1]}" in program.errors()
    assert last_status(program.run_dir)["job"]["state"] == "FAILED"


@pytest.mark.system
@pytest.mark.parametrize(
    ("cause", "message", "failed_task"),
    [("fail in step", "step failed", "collect/2"), ("fail in make", "make failed", "collect/3")],
)
def test_environment_that_always_raises_fails_the_run(
    tmp_path: pathlib.Path, cause: str, message: str, failed_task: str
) -> None:
    env = tmp_path / "env.py"
    env.write_text(ENV)
    with ElasticProgram(tmp_path / "run", "--agent", "impala", "--env", f"{env}:make_env", *FEW, *LONG) as program:
        program.wait_for_collectors(1)
        began = time.monotonic()
        (tmp_path / cause).touch()
        if cause == "fail in make":
            program.call(lambda client: client.scale("collector", 2))
        code, result = program.finish()
        assert time.monotonic() - began < 120.0
    assert code == 1 and result is None
    tracebacks, _, last = program.errors().partition("rlframe: The node coordinator failed")
    assert f"ValueError: {message}" in tracebacks and f'File "{env}", line' in tracebacks, program.errors()
    assert f"The job failed: {failed_task}" in last and message in last, program.errors()
    assert last_status(program.run_dir)["job"]["state"] == "FAILED"
