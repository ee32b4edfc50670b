"""Test that changed user files are reloaded between runs, and found after a change of the working directory."""

from __future__ import annotations

import importlib
import json
import os
import sys

import pytest

import rlframe
from rlframe.errors import UsageError
from rlframe.programs.options.object_names import load_object
from rlframe.user_code.directories import import_path
from rlframe.user_code.files import forget_changed, keep_files

ENV = """
import os
import gymnasium, numpy as np
from rewards_{name} import REWARD

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    t = 0
    def __init__(self):
        os.chdir({elsewhere!r})
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {{}}
    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), REWARD * {factor}, self.t == 2, False, {{}}
"""


def write(directory, reward, factor, name):
    (directory / f"rewards_{name}.py").write_text(f"REWARD = {reward}\n")
    text = ENV.format(name=name, elsewhere=str(directory / "elsewhere"), factor=factor)
    (directory / "env.py").write_text(text)


def run(**options):
    return rlframe.train(
        "ppo", "env.py:Env", num_envs=2, steps=64, unroll_length=8, num_minibatches=2, quiet=True, **options
    )


@pytest.mark.system
def test_next_run_uses_changed_files_in_any_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path, 1, 1, "a")
    returns = []
    for reward, factor in ((1, 1), (1, 3), (5, 3)):
        monkeypatch.chdir(tmp_path)
        write(tmp_path, reward, factor, "a")
        result = run(run_dir=f"run-{reward}-{factor}")
        returns.append(result.return_mean)
        assert os.getcwd() == str(tmp_path / "elsewhere")
        assert result.run_dir == str(tmp_path / f"run-{reward}-{factor}")
        saved = json.loads((tmp_path / f"run-{reward}-{factor}" / "config.json").read_text())
        assert saved["experiment"]["env"] == f"{tmp_path}/env.py:Env"
    assert returns == [2.0, 6.0, 30.0]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    result = rlframe.train(run_dir=tmp_path / "run-5-3", resume=True, steps=128, quiet=True)
    assert result.env_steps == 128 and list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.system
def test_default_run_directory_is_in_the_initial_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path, 1, 1, "b")
    monkeypatch.chdir(tmp_path)
    assert run().run_dir.startswith(f"{tmp_path}/runs/ppo-")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_paths_are_relative_to_the_initial_working_directory(tmp_path, monkeypatch):
    (tmp_path / "moves.py").write_text("import os\nfrom rlframe.agents.ppo import PPO\nos.chdir('/')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"There is no file {tmp_path}/own.py for the topology"):
        rlframe.train("moves.py:PPO", "CartPole-v1", topology="own.py:Own")


def test_import_path_has_all_directories_of_imported_modules(tmp_path, monkeypatch):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "own_module.py").write_text("")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path / "own_package")
    importlib.import_module("own_module")
    monkeypatch.chdir(tmp_path)
    importlib.import_module("own_package")
    monkeypatch.chdir("/")
    assert import_path()[0] == "/" and {str(tmp_path), f"{tmp_path}/own_package"} <= set(import_path())


@pytest.mark.parametrize("what", ["agent", "network", "topology"])
def test_changed_files_are_reloaded_between_runs(what, tmp_path):
    path = tmp_path / f"{what}.py"
    path.write_text("VALUE = 1\n")
    assert load_object(f"{path}:VALUE", what) == 1
    path.write_text("VALUE = 2\n")
    assert load_object(f"{path}:VALUE", what) == 1  # Only `forget_changed` makes later calls load the changed file.
    with keep_files():
        forget_changed()
        assert load_object(f"{path}:VALUE", what) == 1
    forget_changed()
    assert load_object(f"{path}:VALUE", what) == 2


def test_unchanged_file_is_not_reloaded(tmp_path):
    (tmp_path / "own.py").write_text("class Own: ...\n")
    before = load_object(f"{tmp_path}/own.py:Own", "agent")
    forget_changed()
    assert load_object(f"{tmp_path}/own.py:Own", "agent") is before
