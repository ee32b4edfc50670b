"""Elastic runs whose workers, learner and coordinator are killed and paused while they are scaled."""

from __future__ import annotations

import pathlib
import signal

import pytest

from tests.programs.elastic import ElasticProgram, last_status

DQN = ("--agent", "dqn", "--env", "CartPole-v1")
IMPALA = ("--agent", "impala", "--env", "CartPole-v1")


def strike_all(program: ElasticProgram) -> None:
    """All that may happen to a run: 1 → 4 → 2 collectors, and everybody is killed or paused once."""
    program.wait_for_collectors(1)
    program.scale(4)
    program.strike("collector/1", signal.SIGKILL)
    program.strike("learner/0", signal.SIGKILL)
    program.strike("collector/2", signal.SIGSTOP)
    program.kill_coordinator()
    program.wait_for_collectors(4)
    program.scale(2)


@pytest.mark.system
@pytest.mark.parametrize(
    ("agent", "steps", "wanted"), [(DQN, 200_000, 475.0), (IMPALA, 2_000_000, 450.0)], ids=["dqn", "impala"]
)
def test_a_run_learns_whatever_becomes_of_its_processes(
    tmp_path: pathlib.Path, agent: tuple[str, ...], steps: int, wanted: float
) -> None:
    arguments = [*agent, "--seed", "1", "--steps", str(steps), "--min-actors", "1", "--max-actors", "4"]
    with ElasticProgram(tmp_path / "run", *arguments, "--num-actors", "2") as program:
        program.scale(1)
        strike_all(program)
        code, result = program.finish(600.0)
    status = last_status(program.run_dir)
    print(result, status["job"], status["accounts"], status["replay"])
    assert code == 0, program.errors()
    assert result is not None
    assert result["return_mean"] >= wanted
    assert result["env_steps"] >= steps
    assert status["job"]["state"] == "CLOSED"
    assert status["job"]["restarts"] >= 3  # two collectors and the learner
    assert status["job"]["coordinator_restarts"] == 1
    program.check_counters(status)
