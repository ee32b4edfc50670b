"""The command line with closed standard streams, and with paths that are not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlframe.programs import naming

TRAIN = "train --agent ppo --steps 64 --num-envs 2 --unroll-length 16 --num-minibatches 2 --eval-episodes 1"


def shell(command, cwd):
    line = f"{sys.executable} -c 'import sys; from rlframe.cli.main import main; sys.exit(main())' {command}"
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_closed_streams(closed, tmp_path):
    assert shell(f"envs CartPole {closed}", tmp_path).returncode == 0
    wrong = shell(f"nothing {closed}", tmp_path)
    assert wrong.returncode == 2 and wrong.stdout == b""


def test_a_run_works_with_closed_streams(tmp_path):
    assert shell(f"{TRAIN} --run-dir run >&- 2>&-", tmp_path).returncode == 0
    assert (tmp_path / "run" / "result.json").exists()


def test_a_run_directory_that_is_not_utf_8_is_refused_before_the_run(tmp_path):
    refused = shell(f"{TRAIN} --run-dir $'run\\xfe'", tmp_path)
    assert refused.returncode == 2
    assert b"run\\xfe' is not UTF-8" in refused.stderr and not os.listdir(tmp_path)


def test_a_file_whose_path_is_not_utf_8_is_loaded(tmp_path):
    directory = os.fsencode(tmp_path) + b"/b\xff"
    os.mkdir(directory)
    with open(directory + b"/own.py", "w") as file:
        file.write("VALUE = 7\n")
    assert naming.load_object(f"{os.fsdecode(directory)}/own.py:VALUE", "thing") == 7
