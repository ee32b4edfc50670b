"""Tests of the command line with closed standard streams and with an ASCII locale."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TRAIN = "train --agent ppo --steps 64 --num-envs 2 --unroll-length 16 --num-minibatches 2 --eval-episodes 2"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(command, cwd):
    line = f"{sys.executable} -c 'import sys; from rlframe.cli.main import main; sys.exit(main())' {command}"
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, env={**os.environ, **ASCII})


@pytest.mark.system
@pytest.mark.parametrize(
    "closed", ["2>&-", *(pytest.param(one, marks=pytest.mark.system) for one in (">&-", ">&- 2>&-", "<&- >&- 2>&-"))]
)
def test_command_works_with_closed_streams(closed, tmp_path):
    assert shell(f"envs CartPole {closed}", tmp_path).returncode == 0
    wrong = shell(f"nothing {closed}", tmp_path)
    assert wrong.returncode == 2 and wrong.stdout == b""


@pytest.mark.system
def test_run_works_with_closed_streams_in_ascii_locale(tmp_path):
    assert (
        shell(f"{TRAIN} --run-dir run >&- 2>&-", tmp_path).returncode == 0
    )  # The command prints "±", which is not ASCII.
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.system
def test_run_is_saved_although_the_reader_of_its_output_has_exited(tmp_path):
    done = shell(f"{TRAIN} --run-dir run --json --log-every 1 2>&1 | head -n 1; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.returncode == 0 and (tmp_path / "run" / "result.json").exists()
