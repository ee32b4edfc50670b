"""Test that changed user modules (`module:Id`) are reloaded, and found from every directory and process."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

import rlframe
from rlframe.errors import UsageError
from rlframe.programs.options.object_names import load_object
from rlframe.programs.options.saved_experiment import is_different_backend
from rlframe.user_code.files import forget_changed
from tests.programs.running_program import WITH_ELASTIC, options_of
from tests.user_code.test_files import ENV

REGISTERED = ENV + '\ngymnasium.register("{id}", "{name}:Env")\n'


def write(directory, module, reward, factor, id="Own-v0"):
    (directory.parent / "elsewhere").mkdir(parents=True, exist_ok=True)
    directory.mkdir(exist_ok=True)
    (directory / f"rewards_{module}.py").write_text(f"REWARD = {reward}\n")
    text = REGISTERED.format(name=module, elsewhere=str(directory.parent / "elsewhere"), factor=factor, id=id)
    (directory / f"{module}.py").write_text(text)


def run(env, quiet=True, **options):
    return rlframe.train("ppo", env, num_envs=2, steps=64, unroll_length=8, num_minibatches=2, quiet=quiet, **options)


@pytest.mark.system
def test_next_run_uses_changed_modules(tmp_path):
    returns = []
    for reward, factor in ((1, 1), (1, 3), (5, 3)):
        write(tmp_path / "here", "changed_module", reward, factor)
        os.chdir(tmp_path / "here")
        returns.append(run("changed_module:Own-v0", run_dir=tmp_path / f"run-{reward}-{factor}").return_mean)
    assert returns == [2.0, 6.0, 30.0]


@pytest.mark.system
def test_resumed_run_finds_its_module_from_another_directory(tmp_path):
    write(tmp_path / "here", "moved_module", 1, 1)
    os.chdir(tmp_path / "here")
    run_dir = run("moved_module:Own-v0", run_dir=tmp_path / "run").run_dir
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["modules"] == {"moved_module": str(tmp_path / "here")}
    write(tmp_path / "there", "moved_module", 7, 1)  # a module that has the same name in another directory
    os.chdir(tmp_path / "there")
    assert rlframe.train(run_dir=run_dir, resume=True, steps=128, quiet=True).return_mean == 2.0
    os.chdir(tmp_path / "there")
    assert rlframe.evaluate(run_dir, episodes=2)["return_mean"] == 2.0
    os.chdir(tmp_path / "there")
    assert run("moved_module:Own-v0", run_dir=tmp_path / "other").return_mean == 14.0


@pytest.mark.system
def test_error_for_a_missing_module_names_its_directory(tmp_path):
    write(tmp_path / "here", "gone_module", 1, 1)
    os.chdir(tmp_path / "here")
    run_dir = run("gone_module:Own-v0", run_dir=tmp_path / "run").run_dir
    (tmp_path / "here").rename(tmp_path / "renamed")
    os.chdir(tmp_path)
    # After this change, `forget_changed` removes the loaded version.
    (tmp_path / "renamed" / "gone_module.py").write_text("VALUE = 1\n")
    code = "import rlframe, sys; rlframe.train(run_dir=sys.argv[1], resume=True, steps=128, quiet=True)"
    root = str(pathlib.Path(__file__).parents[2])
    forget_changed()
    config = tmp_path / "run" / "config.json"
    saved = config.read_text()
    for name in ("gone_module:Own-v0", "gymnasium:gone_module:Own-v0", "gone_module:Env"):
        config.write_text(saved.replace("gone_module:Own-v0", name))
        # A loaded policy can act although its environment is missing.
        assert rlframe.load(run_dir).act(np.zeros(2, np.float32)) in (
            0,
            1,
        )
    config.write_text(saved)
    with pytest.raises(UsageError, match="^There is no module 'gone_module' for 'gone_module:Own-v0'"):
        rlframe.evaluate(run_dir)
    done = subprocess.run(
        [sys.executable, "-c", code, run_dir],
        env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "There is no module 'gone_module' for 'gone_module:Own-v0'" in done.stderr
    assert f"The run was started with the module in {tmp_path}/here." in done.stderr


@pytest.mark.system
def test_resumed_run_refuses_another_environment_with_the_same_id(tmp_path, capsys):
    class Nine(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.zeros(2, np.float32), 9.0, True, False, {}

    gymnasium.register("Acrobot-v1", Nine)
    run_dir = run("Acrobot-v1", quiet=False, run_dir=tmp_path / "run").run_dir
    stderr = capsys.readouterr().err
    assert (
        "The environment Acrobot-v1 is made by Gymnasium (tests.user_code.test_modules:" in stderr
        and ".Nine)." in stderr
    )
    for other in ("gymnasium.envs.classic_control:AcrobotEnv", "another_module:Nine", type("Ten", (Nine,), {})):
        gymnasium.register("Acrobot-v1", other)
        for resume in (lambda: rlframe.train(run_dir=run_dir, resume=True), lambda: rlframe.evaluate(run_dir)):
            with pytest.raises(
                UsageError, match=r"Acrobot-v1 was created by .*Nine\)\. In this process, Acrobot-v1 is created by"
            ):
                resume()
    del gymnasium.registry["Acrobot-v1"]
    gymnasium.register("Acrobot-v1", Nine)
    assert rlframe.train(run_dir=run_dir, resume=True, steps=128, quiet=True).return_mean == 9.0


@pytest.mark.parametrize(
    ("saved", "now", "is_other"),
    [
        ("EnvPool", "Gymnasium (gymnasium.envs:CartPoleEnv)", False),  # Both texts name the same environment.
        ("EnvPool", "Gymnasium (gymnasium.envs:CartPoleEnv, as your code has registered it)", True),
        ("Gymnasium (gymnasium.envs:CartPoleEnv, as your code has registered it)", "EnvPool", True),
        ("Gymnasium (__main__:Maze)", "Gymnasium (my_script:Maze)", False),
        ("Gymnasium (__main__:Maze)", "Gymnasium (my_script:Other)", True),
        ("Gymnasium (a:Maze)", None, True),
    ],
)
def test_resume_compares_creators_of_environment_only_if_user_code_registered_it(saved, now, is_other):
    assert is_different_backend(saved, now) == is_other


def test_changed_module_of_a_package_is_reloaded(tmp_path):
    os.chdir(tmp_path)
    (tmp_path / "own_package").mkdir()
    for value in (1, 22):
        (tmp_path / "own_package" / "part.py").write_text(f"VALUE = {value}\n")
        forget_changed()
        assert load_object("own_package.part:VALUE", "thing") == value


SCRIPT = """
import os, pathlib, sys
import gymnasium, rlframe
from tests.user_code.test_modules import write

engine, topology = sys.argv[1:3]
here = pathlib.Path.cwd() / "here"
sys.path.insert(0, str(here))

def run(env, name, **options):
    os.chdir(here)
    return rlframe.train("dqn", env, engine=engine, topology=topology, run_dir=name, steps=100, num_envs=2,
        min_replay_size=32, batch_size=8, eval_episodes=1, quiet=True, **options)

if __name__ == "__main__":
    write(here, "program_module", 3, 1)
    print(run("program_module:Own-v0", "module").return_mean)
    if "short" in sys.argv:
        sys.exit()
    write(here, "program_module", 4, 1)
    print(run("program_module:Own-v0", "changed").return_mean)
    write(here, "program_file", 5, 1, "File-v0")
    print(run("program_file.py:Env", "file").return_mean)
    write(here, "registering", 6, 1, "CartPole-v1")
    import registering
    print(run("CartPole-v1", "registered").return_mean)
    os.chdir("/")
    print(rlframe.train(run_dir=here / "changed", resume=True, steps=200, quiet=True).return_mean)
"""


def returns_of(program, tmp_path, *arguments):
    _, engine, _, topology = options_of(program)
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    if engine == "ray":
        env["HOME"] = str(tmp_path)
    command = [sys.executable, "script.py", engine, topology, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not os.listdir(tmp_path / "elsewhere")
    return [float(line) for line in done.stdout.splitlines()]


@pytest.mark.system
def test_nodes_find_a_module_after_a_change_of_directory(tmp_path):
    assert returns_of("local heavy_env", tmp_path, "short") == [6.0]


@pytest.mark.system
@pytest.mark.parametrize("program", WITH_ELASTIC)
def test_programs_use_newest_versions_of_modules_files_and_environment_ids(program, tmp_path):
    assert returns_of(program, tmp_path) == [6.0, 8.0, 10.0, 12.0, 8.0]
