"""Real programs whose nodes are killed, hang or raise exceptions, and runs that end with Ctrl-C."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from rlframe.cli.main import main
from rlframe.errors import UsageError
from rlframe.learners import Checkpointer
from rlframe.programs.run_dir.lock import RunLock
from tests.programs.running_program import GRID, IMPALA, PROGRAMS, RunningProgram, options_of, stop_signal

NODES = {
    "heavy_env": ("actor 1", "learner", "monitor"),
    "light_env": ("actor 0", "inferencer", "learner", "monitor"),
    "distributed": ("actor 1", "inferencer", "learner", "monitor", "replay"),
}
LONG = ["--steps", "100000000", "--checkpoint-every", "2000", "--log-every", "500"]


def steps_of(program: RunningProgram) -> int:
    rows = program.rows()
    return rows[-1]["step"] if rows else 0


@pytest.mark.system  # in `make test`, only elastic runs have killed nodes
@pytest.mark.parametrize("program_name", PROGRAMS)
def test_run_reaches_its_last_step_although_each_node_is_killed(tmp_path, program_name):
    steps = 200_000  # many steps, so that the run does not end before all nodes were killed
    arguments = [*IMPALA, *options_of(program_name), "--steps", str(steps), "--log-every", "500"]
    with RunningProgram(tmp_path / "run", *arguments, "--checkpoint-every", "1000", "--eval-episodes", "2") as program:
        at = 0
        for name in NODES[program_name.split()[1]]:
            program.wait_for_steps(at + 1_000)
            program.kill(name)
            at = steps_of(program)
            assert at < steps, "the run ended before all nodes were killed"
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result is not None and result["env_steps"] >= steps and result["episodes"] == 2
    for name in NODES[program_name.split()[1]]:
        assert f"[{name.replace(' ', '/')}] was killed by SIGKILL: restart 1 of 3" in program.errors()
    versions = [row["params_version"] for row in program.rows() if "params_version" in row]
    assert versions == sorted(versions)


@pytest.mark.system
@pytest.mark.parametrize("program_name", [one for one in PROGRAMS if "light_env" in one])
def test_recurrent_states_are_correct_after_an_inferencer_is_killed(tmp_path, program_name):
    agent = ["--agent", "tests/programs/counting_agent.py:Counting", "--network", "gru", "--unroll-length", "8"]
    options = [*options_of(program_name), "--num-envs", "8", "--num-actors", "2", "--batch-size", "4"]
    arguments = [*agent, *options, "--steps", "40000", "--log-every", "200", "--eval-episodes", "1"]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        program.wait_for_steps(1_000)
        program.kill("inferencer")
        assert steps_of(program) < 30_000, "the run was nearly complete"
        code, result = program.finish()
    assert code == 0, program.errors()  # the learner raises if a recurrent state is wrong
    assert "[inferencer] was killed by SIGKILL: restart 1 of 3" in program.errors()
    assert result is not None and result["env_steps"] >= 40_000 and result["learner_steps"] > 100


@pytest.mark.system
@pytest.mark.parametrize("program_name", GRID)
def test_paused_actor_does_not_stall_the_run(tmp_path, program_name):
    arguments = [*IMPALA, *options_of(program_name), "--steps", "20000", "--log-every", "500", "--eval-episodes", "2"]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        program.wait_for_steps(1_000)
        program.node("actor 0").send_signal(signal.SIGSTOP)
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result is not None and result["env_steps"] >= 20_000


@pytest.mark.system
@pytest.mark.parametrize("program_name", GRID)
def test_program_ends_after_max_restarts_with_an_error_about_the_failed_node(tmp_path, program_name):
    with RunningProgram(tmp_path / "run", *IMPALA, *LONG, *options_of(program_name), "--max-restarts", "0") as program:
        program.wait_for_steps(500)
        began = time.monotonic()
        program.node("actor 1").kill()
        code, result = program.finish(15.0)
    assert code == 1 and result is None
    assert time.monotonic() - began < 15.0
    assert "rlframe: The node actor/1 was killed by SIGKILL." in program.errors()


@pytest.mark.system
@pytest.mark.parametrize("program_name", GRID)
def test_ctrl_c_saves_the_run_and_resume_continues_it(tmp_path, program_name):
    with RunningProgram(tmp_path / "run", *IMPALA, *LONG, *options_of(program_name)) as program:
        program.wait_for_steps(2_000)
        assert stop_signal(program) < 10.0
        code, result = program.finish()
    assert code == 130, program.errors()
    assert result is not None and result["return_mean"] is None and result["signal"] == signal.SIGINT
    assert result["env_steps"] >= 2_000 and result["learner_steps"] > 0
    more = ["--resume", "--stop-at", str(result["env_steps"] + 2_000), "--eval-episodes", "2"]
    with RunningProgram(tmp_path / "run", *more) as program:
        code, resumed = program.finish()
    assert code == 0, program.errors()
    assert resumed is not None and resumed["env_steps"] >= result["env_steps"] + 2_000
    assert resumed["learner_steps"] > result["learner_steps"]
    assert resumed["params_version"] > result["params_version"]


@pytest.mark.system
def test_learner_killed_during_exit_is_reported_with_the_newest_checkpoint(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(
        f"""
import pathlib
import time

from rlframe.agents import IMPALA

PATH = pathlib.Path({str(tmp_path)!r})

class Slow(IMPALA):
    jit_learner_step = False

    def learner_step(self, params, learner_state, batch):
        if (PATH / "become slow").exists():
            (PATH / "is slow").touch()
            time.sleep(30.0)
        return super().learner_step(params, learner_state, batch)
"""
    )
    arguments = ["--agent", f"{agent}:Slow", "--num-envs", "8", *LONG, "--checkpoint-every", "100"]
    with RunningProgram(tmp_path / "run", *arguments, "--topology", "heavy_env") as program:
        checkpoints = Checkpointer(tmp_path / "run" / "checkpoints")
        program.wait_until(checkpoints.steps)
        (tmp_path / "become slow").touch()
        program.wait_until((tmp_path / "is slow").exists)
        newest = checkpoints.steps()[-1]
        assert stop_signal(program) < 12.0
        code, result = program.finish()
    assert code == 1 and result is None
    assert "The node learner was killed by SIGKILL while the program ended: its unsaved work" in program.errors()
    assert f"The last checkpoint is {tmp_path}/run/checkpoints/{newest}. Resume with: " in program.errors()
    assert "everything is saved" not in program.errors()


@pytest.mark.system
@pytest.mark.parametrize("program_name", GRID)
def test_all_processes_exit_after_the_launcher_is_killed(tmp_path, program_name):
    with RunningProgram(tmp_path / "run", *IMPALA, *LONG, *options_of(program_name)) as program:
        program.wait_for_steps(500)
        nodes = program.nodes()
        # NODES has only one of the two actors, so there is one more node.
        assert len(nodes) == 1 + len(NODES[program_name.split()[1]])
        with pytest.raises(UsageError, match=f"is in use by process {program.process.pid} on "):
            RunLock(tmp_path / "run").__enter__()
        program.process.kill()
        program.process.wait()
        with RunLock(tmp_path / "run"):  # the run can be locked again, because the launcher is dead
            program.check_nothing_is_left()


@pytest.mark.parametrize("program_name", GRID)
def test_learner_exception_ends_the_program_and_prints_its_traceback(tmp_path, program_name):
    agent = tmp_path / "agent.py"
    agent.write_text(
        """
from rlframe.agents import IMPALA

class Failing(IMPALA):
    jit_learner_step = False

    def learner_step(self, params, learner_state, batch):
        raise ValueError("the update failed")
"""
    )
    arguments = ["--agent", f"{agent}:Failing", "--num-envs", "8", *options_of(program_name), "--max-restarts", "0"]
    with RunningProgram(tmp_path / "run", *arguments, "--quiet") as program:
        code, result = program.finish()
    assert code == 1 and result is None
    assert "The node learner failed with exit code 1" in program.errors()
    assert "ValueError: the update failed" in program.errors().split("rlframe: The node learner")[1]


@pytest.mark.system
def test_non_finite_loss_ends_the_program_without_a_restart(tmp_path):
    arguments = [*IMPALA, *LONG, "--topology", "heavy_env", "--learning-rate", "1e30", "--quiet"]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        code, result = program.finish()
    assert code == 1 and result is None
    assert "NonFiniteLossError" in program.errors() and "restart" not in program.errors()


def test_too_large_replay_is_refused_before_processes_start(tmp_path, capsys):
    arguments = ["train", "--agent", "dqn", "--env", "CartPole-v1", "--topology", "heavy_env"]
    before = psutil.Process().children()
    assert main([*arguments, "--run-dir", str(tmp_path / "run"), "--replay-capacity", str(10**12)]) == 2
    output = capsys.readouterr()
    assert "memory" in output.err and not output.out and psutil.Process().children() == before
    assert not (tmp_path / "run").exists()


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "light_env", "elastic"])
def test_local_program_opens_no_network_sockets(tmp_path, topology):
    options = ["--engine", "local", "--topology", topology, "--http", "None", "--env-type", "process"]
    with RunningProgram(tmp_path / "run", *IMPALA, *LONG, *options) as program:
        program.wait_for_steps(1_000)
        processes = [psutil.Process(program.process.pid), *psutil.Process(program.process.pid).children(recursive=True)]
        found = {each.pid: each.net_connections("inet") for each in processes if each.is_running()}
        assert len(found) > len(program.nodes()) > 3, "the environments should run in separate processes"
        assert not any(found.values()), found
        assert stop_signal(program) < 10.0
        program.finish()
