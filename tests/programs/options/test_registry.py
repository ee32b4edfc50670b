from __future__ import annotations

import pickle
import subprocess
import sys

import cloudpickle
import pytest

from rlframe.envs import gymnasium_registry
from rlframe.envs.names import check_name
from rlframe.errors import UsageError
from rlframe.programs.options.object_names import absolute_name
from rlframe.programs.options.registry import (
    agent_class,
    engine_class,
    env_name_or_builder,
    network_config_class,
    network_factory,
)
from rlframe.programs.topologies.config import find_topology

AGENT_FILE = """
import dataclasses
from helper_of_agent_file import NUMBER
from rlframe import Agent

@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = NUMBER

class Mine(Agent):
    config_cls = Config

class NoConfig(Agent):
    pass

def make_net(observation_spec, action_spec):
    return None
"""


@pytest.fixture
def agent_file(tmp_path):
    (tmp_path / "helper_of_agent_file.py").write_text("NUMBER = 0.25\n")
    path = tmp_path / "agent.py"
    path.write_text(AGENT_FILE)
    return path


def test_builtin_agent_name_gives_the_agent_class():
    from rlframe.agents.ppo import PPO

    assert agent_class("ppo") is PPO


def test_class_is_loaded_from_a_file_that_imports_another_file(agent_file):
    cls = agent_class(f"{agent_file}:Mine")
    assert cls.config_cls().rate == 0.25


def test_file_of_a_class_is_loaded_only_once(agent_file):
    assert agent_class(f"{agent_file}:Mine") is agent_class(f"{agent_file}:Mine")


def test_files_with_equal_names_are_separate_modules(agent_file, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "agent.py").write_text(AGENT_FILE)
    assert agent_class(f"{agent_file}:Mine") is not agent_class(f"{other / 'agent.py'}:Mine")


def test_pickled_config_loads_in_a_process_that_cannot_import_its_class(agent_file, tmp_path):
    config = agent_class(f"{agent_file}:Mine").config_cls(0.75)
    pickled = tmp_path / "config.pickle"
    pickled.write_bytes(cloudpickle.dumps(config))
    code = f"import pickle; print(pickle.load(open({str(pickled)!r}, 'rb')).rate)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True).stdout
    assert out.strip() == "0.75"


def test_pickled_config_loads_in_the_same_process(agent_file):
    config = agent_class(f"{agent_file}:Mine").config_cls(0.75)
    assert pickle.loads(pickle.dumps(config)) == config


def test_names_with_file_paths_become_absolute_and_other_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_name("a.py:B") == f"{tmp_path}/a.py:B"
    assert absolute_name("ppo") == "ppo"
    assert absolute_name("gymnasium:CartPole-v1") == "gymnasium:CartPole-v1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "pppo",
            "There is no agent 'pppo'; there are dqn, grpo, impala, ppo, pqn, r2d2, sac, td3, or your own as "
            "file.py:Class. Did you mean 'ppo'?",
        ),
        ("{dir}/agnet.py:Mine", "There is no file {dir}/agnet.py for the agent. Did you mean 'agent.py'?"),
        ("{dir}/agent.py:Mien", "{dir}/agent.py defines no 'Mien'. Did you mean 'Mine'?"),
        (
            "{dir}/broken.py:",
            "'{dir}/broken.py:' names a file without a class or function: write {dir}/broken.py:NAME.",
        ),
        ("{dir}/broken.py:Mine", "Cannot load {dir}/broken.py for the agent: SyntaxError: invalid syntax (line 1)."),
        ("{dir}/raises.py:Mine", "Cannot load {dir}/raises.py for the agent: ZeroDivisionError: division by zero."),
    ],
)
def test_unknown_agent_name_is_refused(agent_file, tmp_path, name, message):
    (tmp_path / "broken.py").write_text("class class\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    with pytest.raises(UsageError) as raised:
        agent_class(name.format(dir=tmp_path))
    assert str(raised.value) == message.format(dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class class\n", "Cannot import 'unloadable' for '{name}': SyntaxError: invalid syntax (line 1)."),
        ("import sys\nsys.exit()\n", "Cannot import 'unloadable' for '{name}': SystemExit."),
        ("from rlframe import extras\nraise extras.missing_extra_error('A maze', 'box2d')\n", "A maze needs the extra"),
    ],
)
def test_broken_module_is_refused_with_the_import_error(tmp_path, monkeypatch, text, message):
    (tmp_path / "unloadable.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for load in (
        env_name_or_builder,
        check_name,
        lambda name: gymnasium_registry.make(name, {}),
        agent_class,
    ):
        with pytest.raises(UsageError) as raised:
            load("unloadable:Own")
        assert str(raised.value).startswith(message.format(name="unloadable:Own"))


def test_class_that_is_not_an_agent_is_refused(agent_file):
    with pytest.raises(UsageError, match=r"not a subclass of rlframe\.Agent"):
        agent_class(f"{agent_file}:Config")


def test_agent_without_config_class_is_refused(agent_file):
    with pytest.raises(UsageError, match="config_cls must be a dataclass"):
        agent_class(f"{agent_file}:NoConfig")


def test_network_can_be_a_builtin_name_or_a_function_in_a_file(agent_file):
    from rlframe.agents.networks import MLPConfig

    assert network_config_class("mlp") is MLPConfig
    assert network_config_class(None) is None
    assert network_factory("mlp", MLPConfig((3,))) == MLPConfig((3,))
    assert network_factory(f"{agent_file}:make_net", None).__name__ == "make_net"
    with pytest.raises(UsageError, match="Did you mean 'mlp'"):
        network_config_class("mpl")


def test_environment_can_be_a_library_name_or_a_function_in_a_file(tmp_path):
    (tmp_path / "env.py").write_text("def make():\n    return 7\n")
    assert env_name_or_builder("gymnasium:CartPole-v1") == "gymnasium:CartPole-v1"
    assert env_name_or_builder(f"{tmp_path}/env.py:make")() == 7


@pytest.mark.parametrize("load", [agent_class, env_name_or_builder, find_topology, engine_class])
def test_file_path_without_a_class_name_is_refused_with_suggestions(load, tmp_path):
    (tmp_path / "own.py").write_text("import os\n\ndef _hidden(): ...\n\nclass Maze: ...\n\ndef make_maze(): ...\n")
    with pytest.raises(
        UsageError, match=r"names a file without a class or function: write \S*own.py:Maze or \S*own.py:make_maze"
    ):
        load(f"{tmp_path}/own.py")
    with pytest.raises(UsageError, match="names a file without a class or function: write nowhere.py:NAME"):
        load("nowhere.py")
