"""Elastic runs with the engine `ray`. Each run starts its own Ray cluster, which starts the workers."""

from __future__ import annotations

import pathlib

import pytest

from tests.extras import needs
from tests.programs.elastic_program import ElasticProgram, last_status

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

needs("ray")
needs("trajectories")

PPO = ("--agent", "ppo", "--env", "CartPole-v1", "--engine", "ray", "--max-actors", "2", "--eval-episodes", "2")
LONG = ("--steps", "100000000", "--log-every", "500")


def test_ppo_learns_despite_killed_collector_learner_and_coordinator(tmp_path: pathlib.Path) -> None:
    with ElasticProgram(tmp_path / "run", *PPO, *LONG) as program:
        program.wait_for_collectors(2)
        assert sorted(program.nodes()) == ["collector 0", "collector 1", "coordinator", "learner 0"]
        program.kill_and_wait("collector/0")
        program.kill_and_wait("learner/0")
        program.kill_coordinator()
        # The new coordinator continues with collector/1, which was not killed.
        assert program.worker("collector/1")["incarnation"] == 0
        before = len(program.rows())
        program.wait_until(lambda: any(row.get("episode_return", 0.0) > 100.0 for row in program.rows()[before:]))
        program.call(lambda client: client.cancel("seen enough"))
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result is not None
    status = last_status(program.run_dir)
    assert (status["job"]["state"], status["job"]["coordinator_restarts"]) == ("CLOSED", 1)
    assert status["job"]["restarts"] >= 2
    program.check_counters(status)
    assert "was killed by SIGKILL" in program.errors()


def test_workers_of_the_local_operator_survive_a_killed_coordinator(tmp_path: pathlib.Path) -> None:
    with ElasticProgram(tmp_path / "run", *PPO, *LONG, "--operator", "local") as program:
        program.wait_for_collectors(2)
        program.kill_coordinator()
        assert [program.worker(name)["incarnation"] for name in ("learner/0", "collector/0", "collector/1")] == [0] * 3
        program.call(lambda client: client.cancel("seen enough"))
        code, _ = program.finish()
    assert code == 0, program.errors()


def test_all_processes_exit_after_the_launcher_is_killed(tmp_path: pathlib.Path) -> None:
    with ElasticProgram(tmp_path / "run", *PPO, *LONG) as program:
        program.wait_for_collectors(2)
        program.process.kill()
        program.process.wait()
        program.check_nothing_is_left()
