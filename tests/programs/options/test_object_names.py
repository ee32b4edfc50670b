from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
import types

import gymnasium
import pytest

from rlframe.programs.options import naming
from rlframe.programs.options.object_names import ObjectName, is_live, object_name

FILE = """
class Maze:
    class Inner: ...

    @classmethod
    def small(cls): ...

def make_maze(): ...

if __name__ == "__main__":
    class Hidden: ...
"""


@pytest.fixture
def maze(tmp_path, monkeypatch):
    (tmp_path / "own_maze.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_maze")
    sys.modules.pop("own_maze", None)


def test_what_a_file_defines_is_named_by_the_file_and_keeps_its_object(maze, tmp_path):
    for target, name in [
        (maze.Maze, "Maze"),
        (maze.Maze.Inner, "Maze.Inner"),
        (maze.Maze.small, "Maze.small"),
        (maze.make_maze, "make_maze"),
    ]:
        named = object_name(target)
        assert named == f"{tmp_path}/own_maze.py:{name}" and not is_live(named)
        assert naming.load_object(named, "environment") is target
        assert naming.load_object(str(named), "environment").__qualname__ == name  # as another process does


def test_what_a_file_loaded_by_its_name_defines_has_that_name(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    name = f"{tmp_path}/own.py:Maze"
    assert object_name(naming.load_object(name, "environment")) == name


def test_what_a_package_defines_is_named_by_its_module():
    assert object_name(gymnasium.Wrapper) == "gymnasium.core:Wrapper"
    assert object_name(functools.partial) == "functools:partial"
    assert object_name(len) == "builtins:len"
    assert object_name(ObjectName) == "rlframe.programs.options.object_names:ObjectName"


def test_what_no_file_defines_is_live(maze):
    class Local: ...

    old = maze.Maze
    importlib.reload(maze)
    made_by_hand = types.ModuleType("made_by_hand")
    exec("class Maze: ...", vars(made_by_hand))
    for target, label in [
        (Local, "Local"),
        (lambda: 0, "lambda"),
        (functools.partial(maze.make_maze), "make_maze"),
        (maze.Maze().small.__func__, "small"),
        (functools.partial(functools.partial(len)), "len"),
        (old, "Maze"),
        (made_by_hand.Maze, "Maze"),
    ]:
        named = object_name(target)
        assert is_live(named) and naming.load_object(named, "environment") is target
        assert named in (f"__live__:{label}", f"{maze.__file__}:Maze.small")


def script(monkeypatch, tmp_path, name="__main__", spec=None):
    path = tmp_path / "script.py"
    path.write_text(FILE)
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(path), spec
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(FILE, path, "exec"), vars(main))
    return main


def test_what_a_script_defines_is_named_by_its_file_unless_its_guard_or_a_prompt_defines_it(monkeypatch, tmp_path):
    main = script(monkeypatch, tmp_path)
    assert object_name(main.Maze) == f"{tmp_path}/script.py:Maze"
    assert object_name(main.make_maze) == f"{tmp_path}/script.py:make_maze"
    assert naming.load_object(f"{tmp_path}/script.py:Maze", "environment") is main.Maze
    assert object_name(main.Hidden) == "__main__:Hidden"
    exec(compile(FILE, "<stdin>", "exec"), vars(main))  # `python -i script.py`
    assert object_name(main.make_maze) == object_name(main.make_maze) == "__main__:make_maze"


def test_what_python_m_runs_is_named_by_its_module(monkeypatch, tmp_path):
    main = script(monkeypatch, tmp_path, spec=types.SimpleNamespace(name="package.script"))
    assert object_name(main.Maze) == "package.script:Maze"
    assert naming.load_object("package.script:Maze", "environment") is main.Maze


def test_another_process_gets_the_name_alone(maze):
    named = object_name(maze.Maze)
    assert type(pickle.loads(pickle.dumps(named))) is str
    assert copy.deepcopy(named) is named


def test_an_environment_of_a_module_is_found_by_its_name_and_a_registered_id_comes_first(maze, monkeypatch):
    assert naming.env_name_or_builder("gymnasium.envs.classic_control:CartPoleEnv").__name__ == "CartPoleEnv"
    assert naming.is_library_env("gymnasium:CartPole-v1") and not naming.is_library_env("__main__:Maze")
    maze.Maze.reset = maze.Maze.step = None
    assert naming.env_name_or_builder("own_maze:Maze") is maze.Maze
    monkeypatch.setitem(gymnasium.registry, "Maze", gymnasium.envs.registration.EnvSpec("Maze", maze.Maze))
    assert naming.env_name_or_builder("own_maze:Maze") == "own_maze:Maze"
