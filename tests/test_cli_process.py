"""Tests of the command line in a separate process: signals, process titles, closed pipes and locks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from rlframe.cli import listings
from rlframe.cli.main import COMMANDS, main
from rlframe.learners import Checkpointer
from tests.pipes import run_with_closed_pipe
from tests.waiting import wait_until

COMMAND = [sys.executable, "-m", "rlframe", "train", "--env-type", "loop", "--steps", "100000000", "--num-envs", "2"]
COMMAND += ["--unroll-length", "16", "--num-epochs", "1", "--json", "--log-every", "100"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.system)]
)
def test_signal_saves_the_run_and_prints_the_resume_command(tmp_path, number, code, capsys):
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        [*COMMAND, "--run-dir", str(run_dir)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        metrics = run_dir / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 500)
        title = pathlib.Path(f"/proc/{process.pid}/cmdline")
        if title.exists():
            assert title.read_text().rstrip("\0") == "rlframe: train"
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == code
    result = json.loads(out.splitlines()[-1])
    assert result["return_mean"] is None and result["signal"] == number
    assert f"rlframe train --resume --run-dir {run_dir}" in err
    assert "Traceback" not in err
    assert (run_dir / "learning_curve.png").exists()
    if number != signal.SIGINT:
        return
    resumed = ["train", "--resume", "--run-dir", str(run_dir), "--quiet", "--json", "--eval-episodes", "1"]
    assert main([*resumed, "--stop-at", str(result["env_steps"] + 50)]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["env_steps"] >= result["env_steps"] + 50
    assert again["learner_steps"] > result["learner_steps"] > 0


@contextlib.contextmanager
def killed_at_the_end(*args, **kwargs) -> Iterator[subprocess.Popen]:
    with subprocess.Popen(*args, **kwargs) as process:
        try:
            yield process
        finally:
            process.kill()


SLOW = """
import pathlib, time
import gymnasium

HERE = pathlib.Path(__file__).parent

class Slow(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        self.steps += 1
        # Be slow between two checkpoints, because directly after a checkpoint there is nothing to lose.
        if self.steps % 100 == 50 and (HERE / "be slow").exists():
            (HERE / "is slow").touch()
            for _ in range(600):  # Sleep many times, because a signal just before a long sleep would not interrupt it.
                time.sleep(0.1)
        return self.env.step(action)

def make():
    return Slow(gymnasium.make("CartPole-v1"))
"""


@pytest.mark.system
def test_second_signal_before_saving_ends_the_run_with_an_error_that_names_the_last_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    (tmp_path / "slow.py").write_text(SLOW)
    command = [*COMMAND, "--env", f"{tmp_path / 'slow.py'}:make", "--checkpoint-every", "200", "--quiet"]
    with killed_at_the_end([*command, "--run-dir", str(run_dir)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        checkpoints = Checkpointer(run_dir / "checkpoints")
        wait_until(checkpoints.steps)
        (tmp_path / "be slow").touch()
        wait_until((tmp_path / "is slow").exists)
        process.send_signal(signal.SIGINT)
        assert "SIGINT: saving after the current step" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    newest = run_dir / "checkpoints" / str(checkpoints.steps()[-1])
    assert err.splitlines()[-1] == (
        f"rlframe: The run was interrupted before it could save. The last checkpoint is {newest}. "
        f"Resume with: rlframe train --resume --run-dir {run_dir}"
    )


@pytest.mark.system
@pytest.mark.parametrize("topology", ["single_process", "heavy_env"])
def test_closing_the_terminal_saves_the_run(tmp_path, topology):
    run_dir = tmp_path / "run"
    ours, theirs = pty.openpty()
    with killed_at_the_end(
        [*COMMAND, "--topology", topology, "--run-dir", str(run_dir)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.close(theirs)

        def rows() -> list[dict]:
            while select.select([ours], [], [], 0.0)[0]:
                os.read(ours, 2**16)
            path = run_dir / "metrics.jsonl"
            return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

        wait_until(lambda: any(row.get("learner_steps", 0) > 0 for row in rows()))
        os.close(ours)
        assert process.wait(timeout=120) == 128 + signal.SIGHUP
    result = json.loads((run_dir / "result.json").read_text())
    assert result["signal"] == signal.SIGHUP
    assert Checkpointer(run_dir / "checkpoints").steps()[-1] >= result["learner_steps"] > 0


@pytest.mark.system
def test_run_with_nohup_ignores_sighup(tmp_path):
    run_dir = tmp_path / "run"
    with killed_at_the_end(
        ["nohup", *COMMAND, "--quiet", "--run-dir", str(run_dir)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        metrics = run_dir / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 500)
        process.send_signal(signal.SIGHUP)
        size = metrics.stat().st_size
        wait_until(lambda: metrics.stat().st_size > size + 500)
        process.terminate()
        assert process.wait(timeout=120) == 143


@pytest.mark.system
def test_run_of_another_process_is_resumed_only_with_option_take_over(tmp_path):
    run_dir = tmp_path / "run"
    resume = [sys.executable, "-m", "rlframe", "train", "--resume", "--run-dir", str(run_dir), "--quiet", "--json"]
    with subprocess.Popen(
        [*COMMAND, "--run-dir", str(run_dir)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        metrics = run_dir / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 500)
        second = subprocess.run(resume, capture_output=True, text=True)
        assert second.returncode == 2
        (sentence,) = second.stderr.splitlines()
        assert sentence.startswith(f"rlframe: {run_dir} is in use by process {process.pid} on ")
        subprocess.run([sys.executable, "-m", "rlframe", "plot", str(run_dir)], check=True, capture_output=True)
        third = subprocess.run([*resume, "--take-over", "--stop-at", "1"], capture_output=True, text=True)
        result = json.loads(process.communicate(timeout=120)[0].splitlines()[-1])
    assert process.returncode == 143 and result["learner_steps"] > 0
    assert third.returncode == 0, third.stderr
    assert json.loads(third.stdout.splitlines()[-1])["env_steps"] == result["env_steps"]
    assert not (run_dir / "run.lock").exists()


@pytest.mark.parametrize(
    "command", ["--help", *(pytest.param(one, marks=pytest.mark.system) for one in ("train --help", "envs"))]
)
def test_command_ends_silently_if_the_reader_of_its_output_exits(command):
    assert run_with_closed_pipe([sys.executable, "-m", "rlframe", *command.split()]) == (0, "")


@pytest.mark.system
@pytest.mark.parametrize("command", [*(f"{name} --help" for name in COMMANDS), "agents", "serve policy --help"])
def test_every_command_ends_silently_if_the_reader_of_its_output_exits(command):
    assert run_with_closed_pipe([sys.executable, "-m", "rlframe", *command.split()]) == (0, "")


def test_error_has_the_same_exit_code_if_stderr_is_closed():
    assert run_with_closed_pipe([sys.executable, "-m", "rlframe", "trian"], errors_too=True) == (2, "")


def test_broken_pipe_that_is_not_stdout_is_an_error(monkeypatch, capsys):
    def lost_connection(arguments):
        raise BrokenPipeError("the peer is gone")

    monkeypatch.setattr(listings, "envs", lost_connection)
    assert main(["envs"]) == 1
    assert "BrokenPipeError: the peer is gone" in capsys.readouterr().err
