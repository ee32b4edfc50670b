"""With `quiet=True`, nodes print nothing. Warnings go to the log files and to the caller's log handlers."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.extras import needs

NOISY = """
import logging
import os
import warnings

import gymnasium


class Noisy(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        logging.getLogger("rlframe.envs").warning("a warning of the logger")
        warnings.warn("a warning of Python")
        if os.getpid() != int(os.environ["CALLER"]):
            print("printed by a node", flush=True)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.count += 1
        return self.observation_space.sample(), 1.0, self.count >= 20, False, {}
"""
SCRIPT = """
import logging
import os
import sys

os.environ["CALLER"] = str(os.getpid())
import rlframe

if "--handler" in sys.argv:
    logging.basicConfig(filename="caller.log")
topology, engine = sys.argv[1:3]
options = {} if topology == "single_process" else {"engine": engine}
result = rlframe.train("impala", "noisy.py:Noisy", topology=topology, run_dir="run", num_envs=2, steps=128,
                       unroll_length=8, batch_size=2, eval_episodes=1, preset="none", quiet=True, **options)
assert result.env_steps >= 128
"""


def train(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "noisy.py").write_text(NOISY)
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    command = [sys.executable, "script.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def logged(folder: pathlib.Path) -> str:
    return "".join(path.read_text() for path in (folder / "run" / "logs").iterdir())


@pytest.mark.parametrize(
    ("topology", "engine", "extras"),
    [
        pytest.param("heavy_env", "threads", (), marks=pytest.mark.system),
        pytest.param("heavy_env", "local", (), marks=pytest.mark.system),
        pytest.param("light_env", "local", (), marks=pytest.mark.system),
        pytest.param("elastic", "local", ("trajectories",), marks=pytest.mark.system),
        pytest.param("elastic", "ray", ("trajectories", "ray"), marks=pytest.mark.system),
        pytest.param("light_env", "ray", ("ray",), marks=pytest.mark.system),
        pytest.param("distributed", "launchpad", ("launchpad", "reverb"), marks=pytest.mark.system),
    ],
)
def test_quiet_run_prints_nothing_and_writes_warnings_to_log_files(topology, engine, extras, tmp_path):
    needs(*extras)
    done = train(tmp_path, topology, engine)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert "WARNING" in logged(tmp_path) and "a warning of the logger" in logged(tmp_path)
    if engine != "threads":
        assert "printed by a node" in logged(tmp_path)


@pytest.mark.system
def test_quiet_single_process_passes_warnings_to_the_callers_handlers(tmp_path):
    done = train(tmp_path, "single_process", "-", "--handler")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert "WARNING" in logged(tmp_path) and "a warning of the logger" in logged(tmp_path)
    caller = (tmp_path / "caller.log").read_text()
    assert "WARNING:rlframe.envs:a warning of the logger" in caller
    assert "WARNING:py.warnings:" in caller and "UserWarning: a warning of Python" in caller
