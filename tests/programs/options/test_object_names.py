"""Names of users' classes and functions, and runs with classes from notebooks, scripts and functions."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
import types

import gymnasium
import pytest

from rlframe.programs.options import registry
from rlframe.programs.options.object_names import ObjectName, is_live, load_object, object_name

FILE = """
class Maze:
    class Inner: ...

    @classmethod
    def small(cls): ...

def make_maze(): ...

if __name__ == "__main__":
    class Hidden: ...
"""
import json
import pathlib
import subprocess

import rlframe
from rlframe.agents.networks import MLPConfig
from rlframe.agents.ppo import PPO
from rlframe.errors import UsageError
from rlframe.programs import load_experiment, make_experiment
from rlframe.programs.options import object_names
from rlframe.programs.options.registry import name_of
from tests.extras import import_or_skip
from tests.programs.notebook import AGENT, ENV, NETWORK, SMALL, Notebook


@pytest.fixture
def maze(tmp_path, monkeypatch):
    (tmp_path / "own_maze.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_maze")
    sys.modules.pop("own_maze", None)


def test_name_of_a_class_or_function_in_a_file_begins_with_the_file_path(maze, tmp_path):
    for target, name in [
        (maze.Maze, "Maze"),
        (maze.Maze.Inner, "Maze.Inner"),
        (maze.Maze.small, "Maze.small"),
        (maze.make_maze, "make_maze"),
    ]:
        named = object_name(target)
        assert named == f"{tmp_path}/own_maze.py:{name}" and not is_live(named)
        assert load_object(named, "environment") is target
        assert load_object(str(named), "environment").__qualname__ == name  # a plain string, as in another process


def test_loaded_object_keeps_the_name_from_which_it_was_loaded(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    name = f"{tmp_path}/own.py:Maze"
    assert object_name(load_object(name, "environment")) == name


def test_name_of_a_class_in_a_package_begins_with_its_module():
    assert object_name(gymnasium.Wrapper) == "gymnasium.core:Wrapper"
    assert object_name(functools.partial) == "functools:partial"
    assert object_name(len) == "builtins:len"
    assert object_name(ObjectName) == "rlframe.programs.options.object_names:ObjectName"


def test_name_of_an_object_without_a_file_is_valid_only_in_this_process(maze):
    class Local: ...

    old = maze.Maze
    importlib.reload(maze)
    made_in_code = types.ModuleType("made_in_code")
    exec("class Maze: ...", vars(made_in_code))
    for target, label in [
        (Local, "Local"),
        (lambda: 0, "lambda"),
        (functools.partial(maze.make_maze), "make_maze"),
        (maze.Maze().small.__func__, "small"),
        (functools.partial(functools.partial(len)), "len"),
        (old, "Maze"),
        (made_in_code.Maze, "Maze"),
    ]:
        named = object_name(target)
        assert is_live(named) and load_object(named, "environment") is target
        assert named in (f"__live__:{label}", f"{maze.__file__}:Maze.small")


def script(monkeypatch, tmp_path, name="__main__", spec=None):
    path = tmp_path / "script.py"
    path.write_text(FILE)
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(path), spec
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(FILE, path, "exec"), vars(main))
    return main


def test_name_of_a_class_in_a_script_begins_with_the_file_except_under_the_main_guard(monkeypatch, tmp_path):
    main = script(monkeypatch, tmp_path)
    assert object_name(main.Maze) == f"{tmp_path}/script.py:Maze"
    assert object_name(main.make_maze) == f"{tmp_path}/script.py:make_maze"
    assert load_object(f"{tmp_path}/script.py:Maze", "environment") is main.Maze
    assert object_name(main.Hidden) == "__main__:Hidden"
    exec(compile(FILE, "<stdin>", "exec"), vars(main))  # like code that a user types after `python -i script.py`
    assert object_name(main.make_maze) == object_name(main.make_maze) == "__main__:make_maze"


def test_name_of_a_class_in_a_script_started_with_python_m_begins_with_its_module(monkeypatch, tmp_path):
    main = script(monkeypatch, tmp_path, spec=types.SimpleNamespace(name="package.script"))
    assert object_name(main.Maze) == "package.script:Maze"
    assert load_object("package.script:Maze", "environment") is main.Maze


def test_object_name_becomes_a_plain_string_when_pickled(maze):
    named = object_name(maze.Maze)
    assert type(pickle.loads(pickle.dumps(named))) is str
    assert copy.deepcopy(named) is named


def test_registered_id_has_priority_over_module_name(maze, monkeypatch):
    assert registry.env_name_or_builder("gymnasium.envs.classic_control:CartPoleEnv").__name__ == "CartPoleEnv"
    assert registry.is_library_env("gymnasium:CartPole-v1") and not registry.is_library_env("__main__:Maze")
    maze.Maze.reset = maze.Maze.step = None
    assert registry.env_name_or_builder("own_maze:Maze") is maze.Maze
    monkeypatch.setitem(gymnasium.registry, "Maze", gymnasium.envs.registration.EnvSpec("Maze", maze.Maze))
    assert registry.env_name_or_builder("own_maze:Maze") == "own_maze:Maze"


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return Notebook(monkeypatch)


def saved(run_dir):
    return json.loads((pathlib.Path(run_dir) / "config.json").read_text())


def names_in(run_dir):
    experiment = saved(run_dir)["experiment"]
    return [experiment["agent"], experiment["env"], experiment["topology"]["network"]]


@pytest.mark.system
def test_classes_of_notebook_cells_can_be_used_and_redefined(notebook):
    notebook.run(ENV, AGENT, NETWORK)
    given = {"agent": notebook["Mine"], "env": notebook["Catch"], "network": notebook["make_net"]}
    first = rlframe.train(**given, **SMALL, bonus=0.25)
    assert first.return_mean == 4.0
    assert pathlib.Path(first.run_dir).name.startswith("Mine-Catch-seed1-")
    assert names_in(first.run_dir) == ["__main__:Mine", "__main__:Catch", "__main__:make_net"]
    experiment = load_experiment(first.run_dir)
    assert type(experiment.agent_config) is notebook["MineConfig"] and experiment.agent_config.bonus == 0.25
    assert rlframe.load(first.run_dir).act([0.0, 0.0]) in (0, 1)

    notebook.run(ENV.replace("reward = 1.0", "reward = 3.0"))
    again = rlframe.train(notebook["Mine"], notebook["Catch"], network=notebook["make_net"], **SMALL)
    assert again.return_mean == 12.0
    assert rlframe.evaluate(first.run_dir, episodes=1)["return_mean"] == 12.0
    assert rlframe.train(run_dir=first.run_dir, resume=True, steps=96, quiet=True).return_mean == 12.0

    notebook.restart()
    run_dir = again.run_dir
    assert rlframe.evaluate(run_dir, episodes=1)["return_mean"] == 12.0  # the objects still exist in this process
    object_names._of_runs.clear()  # simulate another process, which cannot use the objects
    with pytest.raises(UsageError, match=r"The agent Mine was defined in a notebook .* pass .* as agent=\.\.\."):
        rlframe.load(run_dir)
    with pytest.raises(
        UsageError, match="The agent Mine was .* write .agent.: ./path/to/file.py:Mine. into the config.json"
    ):
        rlframe.train(run_dir=run_dir, resume=True, steps=96, quiet=True)
    of_policy = {name: given[name] for name in ("agent", "network")}
    with pytest.raises(UsageError, match="The network make_net was defined in a notebook"):
        rlframe.load(run_dir, agent=given["agent"])
    assert rlframe.load(run_dir, **of_policy).act([0.0, 0.0]) in (0, 1)
    with pytest.raises(UsageError, match="The environment Catch was defined in a notebook"):
        rlframe.evaluate(run_dir, **of_policy, episodes=1)
    assert rlframe.evaluate(run_dir, **given, episodes=1)["return_mean"] == 4.0
    assert rlframe.train(**given, run_dir=run_dir, resume=True, steps=96, quiet=True).return_mean == 4.0


@pytest.mark.system
def test_run_resumes_after_notebook_class_moved_to_a_file(notebook, tmp_path):
    notebook.run(ENV)
    run_dir = rlframe.train("ppo", notebook["Catch"], **SMALL).run_dir
    notebook.restart()
    object_names._of_runs.clear()
    (tmp_path / "moved.py").write_text(ENV.replace("reward = 1.0", "reward = 2.0"))
    result = rlframe.train(run_dir=run_dir, resume=True, env="moved.py:Catch", steps=96, quiet=True)
    assert result.return_mean == 8.0
    assert names_in(run_dir) == ["ppo", f"{tmp_path}/moved.py:Catch", None]
    assert rlframe.evaluate(run_dir, episodes=1)["return_mean"] == 8.0


@pytest.mark.system
def test_run_with_a_lambda_can_be_loaded_only_in_the_same_process(notebook):
    notebook.run(ENV)
    catch = notebook["Catch"]
    result = rlframe.train(env=lambda: catch(), **SMALL)
    assert pathlib.Path(result.run_dir).name.startswith("ppo-lambda-seed1-")
    assert names_in(result.run_dir) == ["ppo", "__live__:lambda", None]
    assert rlframe.evaluate(result.run_dir, episodes=1)["return_mean"] == 4.0
    object_names._of_runs.clear()
    with pytest.raises(UsageError, match=r"lambda was defined in the Python process that used it, .* as env=\.\.\."):
        rlframe.evaluate(result.run_dir)
    wrapped = functools.partial(gymnasium.wrappers.TransformReward, catch(), lambda reward: 5 * reward)
    assert rlframe.evaluate(result.run_dir, env=lambda: wrapped(), episodes=1)["return_mean"] == 20.0


@pytest.mark.system
def test_resumed_run_refuses_another_environment(notebook, tmp_path):
    (tmp_path / "catch.py").write_text(ENV)
    run_dir = rlframe.train(env="catch.py:Catch", **SMALL).run_dir
    notebook.run(ENV)
    with pytest.raises(UsageError, match=r"started with env = '.*/catch.py:Catch'; .* change it to '__main__:Catch'"):
        rlframe.train(env=notebook["Catch"], run_dir=run_dir, resume=True, steps=96, quiet=True)


@pytest.mark.parametrize("topology", ["heavy_env", "light_env", "distributed", "elastic"])
@pytest.mark.parametrize("option", ["agent", "env", "network"])
def test_topology_with_several_processes_refuses_notebook_objects(option, topology, notebook):
    notebook.run(ENV, AGENT, NETWORK)
    given = {"agent": "Mine", "env": "Catch", "network": "make_net"}[option]
    with pytest.raises(
        UsageError,
        match=rf"{option}={given} is defined in a notebook, .*{topology} cannot import .*"
        rf"Move it to a file such as my_{option}.py, and pass {option}='my_{option}.py:{given}'",
    ):
        rlframe.train(**{option: notebook[given]}, topology=topology, quiet=True)
    with pytest.raises(UsageError, match="Move it to a file"):
        make_experiment(env=lambda: notebook["Catch"](), topology=topology)


THREADS = {"topology": "heavy_env", "engine": "threads"}


@pytest.mark.system
@pytest.mark.parametrize("options", [{"env_type": "process"}, THREADS], ids=str)
def test_notebook_class_works_in_pool_processes_and_in_threads(options, notebook):
    notebook.run(ENV)
    assert rlframe.train("ppo", notebook["Catch"], **SMALL, **options).return_mean == 4.0


@pytest.mark.system
def test_ipython_cell_trains_in_an_environment_class_of_another_cell(tmp_path):
    import_or_skip("IPython", "pip install 'rlframe[test]'")
    train = f"import rlframe; result = rlframe.train('ppo', Catch, run_dir='run', **{SMALL!r})"
    code = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell; shell = InteractiveShell.instance();"
        "sys.modules['__main__'] = shell.user_module;"  # the `ipython` command and Jupyter kernels also do this
        f"[shell.run_cell(cell).raise_error() for cell in {[ENV, train, 'print(result.return_mean)']!r}]"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert out.stdout.split()[-1] == "4.0", out.stderr
    assert names_in(tmp_path / "run")[1] == "__main__:Catch"


SCRIPT = f"""{ENV}
{AGENT}
{NETWORK}
import rlframe

def go(**options):
    result = rlframe.train(Mine, Catch, network=make_net, run_dir="run", **{SMALL!r}, **options)
    print(result.return_mean, rlframe.evaluate(result.run_dir, episodes=1)["return_mean"])
"""
GUARD = "if __name__ == '__main__':\n    "


def run_script(tmp_path, last_line):
    (tmp_path / "script.py").write_text(SCRIPT + last_line)
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)


@pytest.mark.system
def test_config_json_stores_classes_of_a_script_by_its_file_name(tmp_path):
    out = run_script(tmp_path, "go()")
    assert out.stdout.split() == ["4.0", "4.0"], out.stderr
    assert names_in(tmp_path / "run") == [f"{tmp_path}/script.py:{name}" for name in ("Mine", "Catch", "make_net")]
    with pytest.raises(UsageError, match="script.py starts a run when it is loaded.*if __name__ =="):
        rlframe.evaluate(tmp_path / "run")
    script = (tmp_path / "script.py").read_text()
    (tmp_path / "script.py").write_text(script.replace("\ngo()", f"\n{GUARD}go()"))
    assert rlframe.evaluate(tmp_path / "run", episodes=1)["return_mean"] == 4.0


@pytest.mark.system
def test_script_without_main_guard_is_refused_with_several_processes(tmp_path):
    out = run_script(tmp_path, "go(topology='heavy_env')")
    assert out.returncode != 0 and not (tmp_path / "run").exists()
    assert f"UsageError: {tmp_path}/script.py starts a run when it is loaded" in out.stderr.splitlines()[-1]


@pytest.mark.system
def test_script_with_main_guard_trains_in_several_processes(tmp_path):
    out = run_script(tmp_path, f"{GUARD}go(topology='heavy_env')")
    assert out.stdout.split() == ["4.0", "4.0"], out.stderr


def test_name_of_a_builtin_class_is_its_name_on_the_command_line():
    assert name_of("agent", PPO) == "ppo"
    assert name_of("network", MLPConfig) == "mlp"
    assert make_experiment(PPO, "CartPole-v1") == make_experiment("ppo", "CartPole-v1")


class Reshaped:
    init = apply = None


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        (
            "env",
            3,
            "env must be a class of environments, a function that creates one, or a name such as file.py:NAME; got 3",
        ),
        ("env", gymnasium.Env(), "got an instance of Env. .* pass env=Env, or"),
        (
            "env",
            gymnasium.make("CartPole-v1"),
            "got an instance of TimeLimit. .* pass env='CartPole-v1', or a fun",
        ),
        (
            "env",
            dict,
            "builtins:dict is <class 'dict'>. Expected a class of environments, which has reset.. and step..",
        ),
        ("env", PPO, "PPO'>. Expected a class of environments"),
        ("agent", 3, "agent must be a subclass of rlframe.Agent, or a name such as file.py:NAME; got 3"),
        ("agent", dict, "builtins:dict is <class 'dict'>, which is not a subclass of rlframe.Agent"),
        ("agent", len, "is <built-in function len>, which is not a subclass of rlframe.Agent"),
        ("network", Reshaped(), "got a network, an instance of Reshaped. Pass a function that returns it: network=lam"),
        ("network", MLPConfig(), "got a network's config. Pass its name, such as network='mlp', and network_config="),
        ("network", lambda observation: None, r"must be a function make_net\(observation_spec, action_spec\)"),
        ("topology", len, "topology: expected str, got the builtin_function_or_method len"),
        ("replay", [], r"replay: expected str, got \[\]"),
    ],
)
def test_object_of_wrong_type_is_refused(option, given, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        rlframe.train(**{option: given}, **{**SMALL, "run_dir": tmp_path / "run"})
    assert not (tmp_path / "run").exists()
