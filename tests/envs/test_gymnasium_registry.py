"""Pools find ids that the user has registered with Gymnasium, and prefer these ids to EnvPool's tasks."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import WrapperSpec

from rlframe.envs import AsyncEnv, SyncEnv, default_type
from rlframe.envs.gymnasium_registry import gymnasium_ids, user_spec
from rlframe.envs.names import backend, describe_backend, envpool_task
from rlframe.errors import EnvError, UsageError


class Seven(gymnasium.Env):
    """An environment in which every step has the reward 7."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 7.0, False, False, {}


class Broken(gymnasium.Env):
    """An environment whose constructor raises a TypeError."""

    def __init__(self, width=1):
        super().__init__()
        self.size = width + "1"


@pytest.fixture(autouse=True)
def registry():
    """Return Gymnasium's registry. After each test, restore it."""
    before = dict(gymnasium.registry)
    yield gymnasium.registry
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def rewards(name, type="loop"):
    with SyncEnv(name, 2, type, num_workers=2) as pool:
        pool.reset()
        return pool.step(np.zeros(2, np.int32)).reward.tolist()


@pytest.mark.parametrize("type", ["loop", "thread", "process"])
def test_id_is_found_if_the_user_registers_it_after_a_failed_search(type):
    with pytest.raises(UsageError, match="Unknown environment 'Seven-v0'"):
        SyncEnv("Seven-v0", 1)
    gymnasium.register("Seven-v0", Seven)
    assert rewards("Seven-v0", type) == [7.0, 7.0]
    assert backend("Seven-v0") == "gymnasium"


@pytest.mark.parametrize("task", ["CartPole-v1", pytest.param("Pong-v5", marks=pytest.mark.system)])
def test_id_that_the_user_registered_takes_precedence_over_envpool(task):
    assert backend(task) == "envpool"
    gymnasium.register(task, Seven)
    assert backend(task) == "gymnasium" and default_type(task, 64) == "loop"
    assert default_type(task, 64, is_sync=False) == "process"
    assert describe_backend(task) == "Gymnasium (tests.envs.test_gymnasium_registry:Seven)"
    assert rewards(task) == rewards(task, "process") == [7.0, 7.0]
    with AsyncEnv(task, 2, 1, "process") as pool:
        assert pool.action_spec.num_values == 2
    with pytest.raises(UsageError, match=f"Seven, which your code has registered .* 'envpool:{task}'"):
        SyncEnv(task, 1, "envpool")
    assert backend(f"envpool:{task}") == "envpool" and envpool_task(f"envpool:{task}") == task


CHANGES = [
    {"max_episode_steps": 50},
    {"max_episode_steps": None},
    {"kwargs": {"sutton_barto_reward": True}},
    {"additional_wrappers": (WrapperSpec("Own", "tests:Own", {}),)},
    {"entry_point": CartPoleEnv},
]


@pytest.mark.parametrize("change", CHANGES)
def test_gymnasium_id_takes_precedence_over_envpool_if_the_user_registered_it_with_a_change(change, registry):
    assert describe_backend("CartPole-v1") == "EnvPool"
    registry["CartPole-v1"] = dataclasses.replace(registry["CartPole-v1"], **change)
    assert backend("CartPole-v1") == "gymnasium"
    assert describe_backend("CartPole-v1").endswith(":CartPoleEnv, as your code has registered it)")
    with pytest.raises(UsageError, match="CartPoleEnv, which your code has registered .* 'envpool:CartPole-v1'"):
        SyncEnv("CartPole-v1", 1, "envpool")


def test_default_ids_of_gymnasium_and_rlframe_do_not_count_as_registered_by_the_user():
    assert [name for name in gymnasium_ids() if user_spec(name) is not None] == []
    with pytest.raises(ImportError):
        gymnasium.make("Ant-v3")  # Ant-v3 is special: its entry point is a function
    assert backend("Ant-v3") == "envpool"
    gymnasium.register("PositionOnlyCartPole-v1", Seven)
    assert user_spec("PositionOnlyCartPole-v1") is not None


@pytest.mark.parametrize(
    ("entry_point", "words"),
    [
        (functools.partial(Seven), "tests.envs.test_gymnasium_registry:Seven"),
        (Seven(), "tests.envs.test_gymnasium_registry:Seven"),
        ("my_envs:Maze", "my_envs:Maze"),
    ],
)
def test_description_of_an_entry_point_contains_no_object_address(entry_point, words):
    gymnasium.register("Seven-v0", entry_point)
    assert describe_backend("Seven-v0") == f"Gymnasium ({words})"


def test_type_error_inside_a_constructor_is_reported_as_an_environment_error():
    gymnasium.register("Broken-v0", Broken)
    with pytest.raises(EnvError, match=r"Building environment 0 failed: TypeError: unsupported operand"):
        SyncEnv("Broken-v0", 1)
    with pytest.raises(UsageError, match=r"'Broken-v0' cannot be created with the options {'height': 2}: .*'height'"):
        SyncEnv("Broken-v0", 1, env_kwargs={"height": 2})


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            ImportError("the level is broken"),
            EnvError,
            r"^Building environment 0 failed: ImportError: the level is brok",
        ),
        (
            ModuleNotFoundError("No module named 'maze'"),
            UsageError,
            "'Seven-v0' needs a package .*: No module named 'ma",
        ),
        (gymnasium.error.DependencyNotInstalled("maze is missing"), UsageError, "needs a package .*: maze is missing"),
    ],
)
def test_only_missing_modules_are_reported_as_missing_packages(error, kind, message):
    def raises():
        raise error

    gymnasium.register("Seven-v0", raises)
    with pytest.raises(kind, match=message):
        SyncEnv("Seven-v0", 1)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from json import nothing", "ImportError: cannot import name 'nothing' from 'json'"),
        ("1 / 0", "ZeroDivisionError: division by zero."),
        ("def f(:", r"SyntaxError: invalid syntax \(line 1\)."),
        ("raise SystemExit(3)", "SystemExit: 3."),
    ],
)
def test_error_in_an_imported_module_is_reported(code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raises_at_import.py").write_text(code)
    with pytest.raises(
        UsageError, match=f"^Cannot import 'raises_at_import' for 'raises_at_import:Maze-v0': {message}"
    ):
        SyncEnv("raises_at_import:Maze-v0", 1)
    gymnasium.register("Maze-v0", "raises_at_import:Maze")
    with pytest.raises(EnvError, match=f"^Building environment 0 failed: {message[:9]}"):
        SyncEnv("Maze-v0", 1)


@pytest.mark.system
def test_module_in_the_working_directory_can_register_ids(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(
        "import gymnasium\n"
        "from tests.envs.test_gymnasium_registry import Seven\n"
        "gymnasium.register('Mine-v0', lambda: Seven())\n"
    )
    code = (
        "import os, sys, numpy as np; from rlframe.envs import SyncEnv\n"
        "sys.path[:] = [path for path in sys.path if path]\n"
        "for type in ('loop', 'process'):\n"
        "    pool = SyncEnv('mine:Mine-v0', 2, type, num_workers=2)\n"
        "    os.chdir('/')\n"
        "    pool.reset(); print(pool.step(np.zeros(2, np.int32)).reward.tolist()); pool.close()\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n")[:2] == ["[7.0, 7.0]"] * 2, done.stderr


@pytest.mark.parametrize("name", [":Mine-v0", ".mine:Mine-v0", "mine..envs:Mine-v0", "gymnasium::Mine-v0"])
def test_module_name_with_an_empty_part_is_refused(name):
    with pytest.raises(UsageError, match="must have the form module:Id or file.py:NAME, but '.*' is not a module name"):
        SyncEnv(name, 1)


def test_module_in_a_name_may_be_a_builtin_module():
    assert SyncEnv("sys:CartPole-v1", 1).observation_spec.shape == (4,)


def test_error_for_a_missing_module_contains_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"There is no module 'nowhere' .* working directory {tmp_path}"):
        SyncEnv("nowhere:Mine-v0", 1)
