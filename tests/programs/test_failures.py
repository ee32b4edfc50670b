"""What real machines do to a program: nodes die, hang and raise, and people press Ctrl-C."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

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


@pytest.mark.system  # in `make test` recovery, and the elastic run, have nodes killed
@pytest.mark.parametrize("which", PROGRAMS)
def test_a_run_reaches_its_last_step_whichever_nodes_are_killed(tmp_path, which):
    steps = 200_000  # seconds longer than it takes to kill them
    arguments = [*IMPALA, *options_of(which), "--steps", str(steps), "--log-every", "500"]
    with RunningProgram(tmp_path / "run", *arguments, "--checkpoint-every", "1000", "--eval-episodes", "2") as program:
        at = 0
        for name in NODES[which.split()[1]]:
            program.wait_for_steps(at + 1_000)
            program.kill(name)
            at = steps_of(program)
            assert at < steps, "it was over before all nodes had been killed"
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result is not None and result["env_steps"] >= steps and result["episodes"] == 2
    for name in NODES[which.split()[1]]:
        assert f"[{name.replace(' ', '/')}] was killed by SIGKILL: restart 1 of 3" in program.errors()
    versions = [row["params_version"] for row in program.rows() if "params_version" in row]
    assert versions == sorted(versions)


@pytest.mark.system
@pytest.mark.parametrize("which", [one for one in PROGRAMS if "light_env" in one])
def test_an_inferencer_that_is_killed_leaves_no_wrong_state(tmp_path, which):
    agent = ["--agent", "tests/programs/counting_agent.py:Counting", "--network", "gru", "--unroll-length", "8"]
    options = [*options_of(which), "--num-envs", "8", "--num-actors", "2", "--batch-size", "4"]
    arguments = [*agent, *options, "--steps", "40000", "--log-every", "200", "--eval-episodes", "1"]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        program.wait_for_steps(1_000)
        program.kill("inferencer")
        assert steps_of(program) < 30_000, "it was nearly over"
        code, result = program.finish()
    assert code == 0, program.errors()  # a state that is wrong ends the learner
    assert "[inferencer] was killed by SIGKILL: restart 1 of 3" in program.errors()
    assert result is not None and result["env_steps"] >= 40_000 and result["learner_steps"] > 100


@pytest.mark.system
@pytest.mark.parametrize("which", GRID)
def test_a_paused_actor_does_not_stall_the_rest(tmp_path, which):
    arguments = [*IMPALA, *options_of(which), "--steps", "20000", "--log-every", "500", "--eval-episodes", "2"]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        program.wait_for_steps(1_000)
        program.node("actor 0").send_signal(signal.SIGSTOP)
        code, result = program.finish()
    assert code == 0, program.errors()
    assert result is not None and result["env_steps"] >= 20_000


@pytest.mark.system
@pytest.mark.parametrize("which", GRID)
def test_past_the_limit_of_restarts_the_program_stops_and_names_the_node(tmp_path, which):
    with RunningProgram(tmp_path / "run", *IMPALA, *LONG, *options_of(which), "--max-restarts", "0") as program:
        program.wait_for_steps(500)
        began = time.monotonic()
        program.node("actor 1").kill()
        code, result = program.finish(15.0)
    assert code == 1 and result is None
    assert time.monotonic() - began < 15.0
    assert "rlframe: The node actor/1 was killed by SIGKILL." in program.errors()


@pytest.mark.system
@pytest.mark.parametrize("which", GRID)
def test_ctrl_c_saves_and_the_run_goes_on_from_there(tmp_path, which):
    with RunningProgram(tmp_path / "run", *IMPALA, *LONG, *options_of(which)) as program:
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
def test_a_learner_that_does_not_end_in_time_is_told_with_what_was_saved_last(tmp_path):
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
        if (PATH / "be slow").exists():
            (PATH / "is slow").touch()
            time.sleep(30.0)
        return super().learner_step(params, learner_state, batch)
"""
    )
    arguments = ["--agent", f"{agent}:Slow", "--num-envs", "8", *LONG, "--checkpoint-every", "100"]
    with RunningProgram(tmp_path / "run", *arguments, "--topology", "heavy_env") as program:
        checkpoints = Checkpointer(tmp_path / "run" / "checkpoints")
        program.wait_until(checkpoints.steps)
        (tmp_path / "be slow").touch()
        program.wait_until((tmp_path / "is slow").exists)
        newest = checkpoints.steps()[-1]
        assert stop_signal(program) < 12.0
        code, result = program.finish()
    assert code == 1 and result is None
    assert "The node learner was killed by SIGKILL while the program ended: its unsaved work" in program.errors()
    assert f"The last checkpoint is {tmp_path}/run/checkpoints/{newest}. Resume with: " in program.errors()
    assert "everything is saved" not in program.errors()


@pytest.mark.system
@pytest.mark.parametrize("which", GRID)
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path, which):
    with RunningProgram(tmp_path / "run", *IMPALA, *LONG, *options_of(which)) as program:
        program.wait_for_steps(500)
        nodes = program.nodes()
        assert len(nodes) == 1 + len(NODES[which.split()[1]])  # the second actor
        with pytest.raises(UsageError, match=f"is in use by process {program.process.pid} on "):
            RunLock(tmp_path / "run").__enter__()
        program.process.kill()
        program.process.wait()
        with RunLock(tmp_path / "run"):  # the launcher's alone
            program.check_nothing_is_left()


@pytest.mark.parametrize("which", GRID)
def test_a_learner_that_raises_ends_the_program_with_its_traceback(tmp_path, which):
    agent = tmp_path / "agent.py"
    agent.write_text(
        """
from rlframe.agents import IMPALA

class Unhappy(IMPALA):
    jit_learner_step = False

    def learner_step(self, params, learner_state, batch):
        raise ValueError("the agent is unhappy")
"""
    )
    arguments = ["--agent", f"{agent}:Unhappy", "--num-envs", "8", *options_of(which), "--max-restarts", "1"]
    with RunningProgram(tmp_path / "run", *arguments, "--quiet") as program:
        code, result = program.finish()
    assert code == 1 and result is None
    assert "The node learner failed with exit code 1 (and 1 times before)" in program.errors()
    assert "ValueError: the agent is unhappy" in program.errors().split("rlframe: The node learner")[1]


@pytest.mark.system
def test_a_loss_that_is_not_finite_is_not_tried_again(tmp_path):
    arguments = [*IMPALA, *LONG, "--topology", "heavy_env", "--learning-rate", "1e30", "--quiet"]
    with RunningProgram(tmp_path / "run", *arguments) as program:
        code, result = program.finish()
    assert code == 1 and result is None
    assert "NonFiniteLossError" in program.errors() and "restart" not in program.errors()


def test_memory_that_is_not_there_is_told_before_a_process_is_started(tmp_path):
    arguments = ["--agent", "dqn", "--env", "CartPole-v1", "--topology", "heavy_env"]
    with RunningProgram(tmp_path / "run", *arguments, "--replay-capacity", str(10**12)) as program:
        code, result = program.finish()
        assert not program.nodes()
    assert code == 2 and result is None
    assert "memory" in program.errors() and "Traceback" not in program.errors()
    assert not (tmp_path / "run").exists()


@pytest.mark.system
@pytest.mark.parametrize("topology", ["heavy_env", "light_env", "elastic"])
def test_no_process_of_a_local_program_listens_on_a_network(tmp_path, topology):
    options = ["--engine", "local", "--topology", topology, "--http", "None", "--env-type", "process"]
    with RunningProgram(tmp_path / "run", *IMPALA, *LONG, *options) as program:
        program.wait_for_steps(1_000)
        everyone = [psutil.Process(program.process.pid), *psutil.Process(program.process.pid).children(recursive=True)]
        found = {each.pid: each.net_connections("inet") for each in everyone if each.is_running()}
        assert len(found) > len(program.nodes()) > 3, "the environments have processes of their own"
        assert not any(found.values()), found
        assert stop_signal(program) < 10.0
        program.finish()
