"""Test runs with paths that are not valid UTF-8, and with ASCII as Python's encoding of paths."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from rlframe.interprocess.files import NativePath, printable
from rlframe.programs.options.object_names import load_object
from tests.extras import needs
from tests.programs.running_program import WITH_ELASTIC, options_of

ENV = """
import os
import gymnasium, numpy as np
from near import REWARD

print("directory", os.getcwd(), "file", __file__, flush=True)

class Env(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, render_mode=None):
        self.render_mode = render_mode
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), REWARD, self.t == 5, False, {}
    def render(self):
        return np.zeros((32, 32, 3), np.uint8)
"""
# This script is in the environment's directory, so that JAX writes a path that is not UTF-8 into compiled code.
SCRIPT = """
import os, sys
import numpy as np
import rlframe
from rlframe.cli.main import main

def command(*arguments):
    assert main(arguments) == 0, arguments

if __name__ == "__main__":
    run, video, picture = (os.fsdecode(name) for name in (b"run\\xfd", b"video\\xfc.mp4", b"picture\\xfc.png"))
    environment = os.fsdecode(b"own\\xfe.py") + ":Env"
    command("train", "--env", environment, "--run-dir", run, "--steps", "160", "--json", *sys.argv[1:])
    command("train", "--run-dir", run, "--resume", "--steps", "320", "--json")
    command("evaluate", run, "--video", video)
    command("plot", run, "--out", picture)
    command("status", run)
    assert rlframe.load(run).act(np.zeros(2, np.float32)) in (0, 1)
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}  # makes ASCII Python's encoding of paths
PPO = ["--agent", "ppo", "--num-envs", "2", "--unroll-length", "16", "--num-minibatches", "2", "--eval-episodes", "1"]
DQN = ["--agent", "dqn", "--num-envs", "2", "--min-replay-size", "32", "--batch-size", "8", "--eval-episodes", "1"]


def directory_of(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\xc3\xa9"))
    directory.mkdir()
    (directory / os.fsdecode(b"own\xfe.py")).write_text(ENV)
    (directory / "near.py").write_text("REWARD = 3.0\n")
    (directory / "script.py").write_text(SCRIPT)
    return directory


def check_runs(tmp_path, options, variables):
    directory = directory_of(tmp_path)
    root = str(pathlib.Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, **variables}
    done = subprocess.run([sys.executable, "script.py", *options], cwd=directory, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    said = (done.stdout + done.stderr).decode(errors="replace")
    assert "Traceback" not in said and "UnicodeEncodeError" not in said
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    assert [result["return_mean"] for result in results] == [15.0] * 2
    # Python's encoding of paths determines how Python escapes these bytes.
    assert results[1]["run_dir"].encode(errors="surrogateescape") == os.fsencode(directory) + b"/run\xfd"
    run_dir = directory / os.fsdecode(b"run\xfd")
    assert {"config.json", "checkpoints", "metrics.jsonl", "learning_curve.png"} <= set(os.listdir(run_dir))
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert steps == sorted(steps) and steps[-1] == results[1]["env_steps"] >= 320
    assert {b"video\xfc.mp4", b"picture\xfc.png"} <= set(os.listdir(os.fsencode(directory)))
    return run_dir


@pytest.mark.system
@pytest.mark.parametrize("variables", [ASCII, {}], ids=["ascii", "utf-8"])
def test_single_process_run_works_with_non_utf_8_paths(variables, tmp_path):
    needs("gymnasium")
    check_runs(tmp_path, PPO, variables)


@pytest.mark.system
@pytest.mark.parametrize("variables", [ASCII, {}], ids=["ascii", "utf-8"])
@pytest.mark.parametrize("program", [one for one in WITH_ELASTIC if "ray" not in one])
def test_run_with_several_processes_works_with_non_utf_8_paths(program, variables, tmp_path):
    needs("gymnasium")
    run_dir = check_runs(tmp_path, [*DQN, *options_of(program)], variables)
    logs = b"".join(log.read_bytes() for log in (run_dir / "logs").iterdir())
    assert rb"own\udcfe.py" in logs and b"Traceback" not in logs


@pytest.mark.system
def test_ray_refuses_a_non_utf_8_directory(tmp_path):
    needs("ray")
    (directory := pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff"))).mkdir()
    command = [sys.executable, "-m", "rlframe", "train", "--env", "CartPole-v1", "--topology", "heavy_env"]
    env = {**os.environ, "HOME": str(tmp_path)}  # Ray stores its token in HOME.
    done = subprocess.run([*command, "--engine", "ray"], cwd=directory, env=env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "Ray supports only directories with a UTF-8 path: got" in done.stderr and "Traceback" not in done.stderr


def test_file_in_a_directory_with_non_utf_8_path_is_loaded(tmp_path):
    (directory := pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff"))).mkdir()
    (directory / "own.py").write_text("VALUE = 7\n")
    assert load_object(f"{directory}/own.py:VALUE", "thing") == 7


def test_non_utf_8_bytes_are_printed_as_escapes():
    assert printable(os.fsdecode(b"a\xff\xc3\xa9")) == r"a\xffé"
    assert printable("aé") == "aé"


@pytest.mark.parametrize("name", [b"a\xff", "é".encode(), b"plain"])
def test_native_path_is_ascii_and_exists_until_it_is_closed(name, tmp_path):
    directory = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    os.mkdir(directory)
    before = len(os.listdir("/proc/self/fd"))
    native = NativePath(directory)
    assert native.path.isascii() and os.path.samefile(native.path, directory)
    native.close()
    native.close()
    assert len(os.listdir("/proc/self/fd")) == before
