"""Elastic runs continue although their processes are killed or paused, and their collectors are scaled."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import pytest

from tests.extras import needs
from tests.programs.elastic_program import ElasticProgram, last_status
from tests.programs.running_program import stop_signal

needs("trajectories")

DQN = ("--agent", "dqn", "--env", "CartPole-v1")
STEADY_DQN = (*DQN, "--update-period", "4", "--target-update-period", "400", "--discount", "0.99")
IMPALA = ("--agent", "impala", "--env", "CartPole-v1")
FEW = ("--num-actors", "1", "--min-actors", "1", "--max-actors", "2", "--eval-episodes", "2")
LONG = ("--steps", "100000000", "--log-every", "500")


@pytest.mark.parametrize("replay", ["auto", pytest.param("service", marks=pytest.mark.system)])
def test_run_survives_killed_collector_and_coordinator(tmp_path: pathlib.Path, replay: str) -> None:
    # The number of steps is large, so that the run does not end during the test.
    with ElasticProgram(tmp_path / "run", *IMPALA, *FEW, *LONG, "--replay", replay) as program:
        program.wait_for_collectors(1)
        program.scale(2)
        os.kill(program.worker("collector/0")["pid"], signal.SIGKILL)
        program.wait_for(lambda status: status["job"]["restarts"] > 0)
        program.kill_coordinator()
        program.worker("collector/0", above=0)
        before = program.wait_for(lambda status: True)["job"]
        program.wait_for(
            lambda status: (
                status["job"]["env_steps"] > before["env_steps"]
                and status["job"]["learner_steps"] > before["learner_steps"]
            )
        )
        program.call(lambda client: client.cancel("seen enough"))
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result is not None and result["env_steps"] > before["env_steps"]
    status = last_status(program.run_dir)
    assert (status["job"]["state"], status["job"]["coordinator_restarts"]) == ("CLOSED", 1)
    assert status["job"]["restarts"] >= 1 and status["wanted"]["collector"] == 2
    program.check_counters(status)


@pytest.mark.system
def test_ctrl_c_saves_the_run_and_resume_continues_it(tmp_path: pathlib.Path) -> None:
    with ElasticProgram(tmp_path / "run", *DQN, *FEW, *LONG) as program:
        program.wait_for_steps(2_000)
        program.status()
        assert stop_signal(program) < 15.0
        code, first = program.finish()
    assert code == 130, program.errors()
    assert first is not None and first["return_mean"] is None and first["signal"] == signal.SIGINT
    program.check_counters(last_status(program.run_dir))
    before, rows = last_status(program.run_dir), program.rows()
    more = first["env_steps"] + 2_000
    with ElasticProgram(tmp_path / "run", "--resume", "--stop-at", str(more), "--eval-episodes", "2") as program:
        code, second = program.finish()
    assert code == 0, program.errors()
    assert second is not None and second["env_steps"] >= more
    assert second["learner_steps"] > first["learner_steps"]
    assert second["params_version"] > first["params_version"]
    after = last_status(program.run_dir)
    # rows without `steps_per_second` come from evaluations
    steps = [row["step"] for row in program.rows() if "steps_per_second" in row]
    assert after["replay"]["added"] > before["replay"]["added"] >= 2_000  # the replay has evicted no items
    assert program.rows()[: len(rows)] == rows
    assert steps == sorted(set(steps))


@pytest.mark.system
def test_all_processes_exit_after_the_launcher_is_killed(tmp_path: pathlib.Path) -> None:
    with ElasticProgram(tmp_path / "run", *IMPALA, *FEW, *LONG) as program:
        program.wait_for_collectors(1)
        program.scale(2)
        assert sorted(program.nodes()) == ["collector 0", "collector 1", "coordinator", "learner 0"]
        program.process.kill()
        program.process.wait()
        program.check_nothing_is_left()


@pytest.mark.system
def test_paused_run_makes_no_progress_until_unpaused(tmp_path: pathlib.Path) -> None:
    with ElasticProgram(tmp_path / "run", *IMPALA, *FEW, *LONG) as program:
        program.wait_for_collectors(1)
        program.call(lambda client: client.pause())
        program.wait_for(lambda status: status["job"]["state"] == "PAUSED")

        def counters(status: dict[str, Any]) -> tuple[int, ...]:
            job, replay = status["job"], status["replay"]
            return job["env_steps"], job["learner_steps"], job["params_version"], replay["added"]

        seen = [(0.0, (-1,))]  # (time at which the counters changed, new counters)

        def is_unchanged(status: dict[str, Any]) -> bool:
            if counters(status) != seen[-1][1]:
                seen.append((time.monotonic(), counters(status)))
            # A worker that does not answer is restarted earlier than after 25 s.
            return time.monotonic() - seen[-1][0] > 25.0

        paused = program.wait_for(is_unchanged)
        assert paused["job"]["state"] == "PAUSED" and paused["job"]["waits_for"] == "paused"
        assert seen[-1][0] - seen[1][0] < 5.0
        assert paused["job"]["restarts"] == 0
        program.call(lambda client: client.unpause())
        later = program.wait_for(lambda status: status["job"]["learner_steps"] > paused["job"]["learner_steps"] + 20)
        assert (later["job"]["state"], later["job"]["restarts"]) == ("RUNNING", 0)
        program.call(lambda client: client.cancel("seen enough"))
        code, result = program.finish()
    assert code == 0 and result is not None, program.errors()
    program.check_counters(last_status(program.run_dir))


def disrupt_run(program: ElasticProgram) -> None:
    """Scale to 4 collectors, kill or pause collectors, the learner and the coordinator, and scale to 2 collectors."""
    program.wait_for_collectors(1)
    program.scale(4)
    program.kill_and_wait("collector/1", signal.SIGKILL)
    program.kill_and_wait("learner/0", signal.SIGKILL)
    program.kill_and_wait("collector/2", signal.SIGSTOP)
    program.kill_coordinator()
    program.wait_for_collectors(4)
    program.scale(2)


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("agent", "steps", "wanted"), [(STEADY_DQN, 300_000, 475.0), (IMPALA, 2_000_000, 450.0)], ids=["dqn", "impala"]
)
def test_run_solves_the_task_despite_killed_and_paused_processes(
    tmp_path: pathlib.Path, agent: tuple[str, ...], steps: int, wanted: float
) -> None:
    arguments = [*agent, "--seed", "1", "--steps", str(steps), "--min-actors", "1", "--max-actors", "4"]
    arguments += ["--num-actors", "2", "--eval-every", str(steps // 10)]
    with ElasticProgram(tmp_path / "run", *arguments) as program:
        program.scale(1)
        disrupt_run(program)
        code, result = program.finish(600.0)
    status = last_status(program.run_dir)
    print(result, status["job"], status["accounts"], status["replay"])
    assert code == 0, program.errors()
    assert result is not None
    # Check the best evaluation, because the returns of DQN vary until the end.
    assert max(mean for _, mean, _ in status["evaluations"]) >= wanted
    assert result["return_mean"] == status["evaluations"][-1][1]
    assert result["env_steps"] >= steps
    assert status["job"]["state"] == "CLOSED"
    assert status["job"]["restarts"] >= 3  # two collectors and the learner were killed
    assert status["job"]["coordinator_restarts"] == 1
    program.check_counters(status)


@pytest.mark.system
def test_elastic_run_completes_with_launchpad(tmp_path: pathlib.Path) -> None:
    needs("launchpad")
    arguments = ("--agent", "ppo", "--env", "CartPole-v1", "--steps", "4000", "--max-actors", "2")
    with ElasticProgram(tmp_path / "run", *arguments, "--engine", "launchpad", "--eval-episodes", "2") as program:
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result is not None and result["env_steps"] >= 4000 and result["return_mean"] is not None
