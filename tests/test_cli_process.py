"""The command line as a process of its own: signals, titles, the module."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-m", "rlframe", "train", "--env-type", "loop", "--steps", "100000000", "--num-envs", "2"]
COMMAND += ["--unroll-length", "16", "--num-epochs", "1", "--json", "--log-every", "100"]


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_everything_and_says_how_to_go_on(tmp_path, number, code):
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
        out, err = process.communicate(timeout=30)
    assert process.returncode == code
    result = json.loads(out.splitlines()[-1])
    assert result["return_mean"] is None and result["signal"] == number
    assert f"rlframe train --resume --run-dir {run_dir}" in err
    assert "Traceback" not in err
    assert (run_dir / "learning_curve.png").exists()
    if number != signal.SIGINT:
        return
    resumed = [sys.executable, "-m", "rlframe", "train", "--resume", "--run-dir", str(run_dir), "--quiet", "--json"]
    resumed += ["--stop-at", str(result["env_steps"] + 50), "--eval-episodes", "1"]
    again = json.loads(subprocess.run(resumed, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert again["env_steps"] >= result["env_steps"] + 50
    assert again["learner_steps"] > result["learner_steps"] > 0


def test_a_closed_pipe_is_no_error(tmp_path):
    command = f"{sys.executable} -m rlframe envs | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert "BrokenPipe" not in done.stderr
