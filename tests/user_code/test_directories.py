"""Test that user files import modules from their own directory, and that changed modules are reloaded."""

from __future__ import annotations

import pickle
import sys
import types

import cloudpickle
import pytest

from rlframe.programs.options import registry
from rlframe.programs.options.object_names import load_object
from rlframe.user_code.files import forget_changed, keep_files


def load(directory, name="env.py:VALUE"):
    return load_object(f"{directory}/{name}", "environment")


def write(directory, **files):
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    return directory


@pytest.mark.parametrize("env", ["from beside import VALUE\n", "import beside\nVALUE = beside.VALUE\n"])
def test_files_import_modules_of_their_own_directory(env, tmp_path):
    a = write(tmp_path / "a", env=env, beside="VALUE = 'a'\nclass Own: ...\n", agent="from beside import VALUE, Own\n")
    b = write(tmp_path / "b", env=env, beside="VALUE = 'b'\n")
    assert (load(a), load(b), load(a, "agent.py:VALUE")) == ("a", "b", "a")
    write(a, beside="VALUE = 'new'\n")
    forget_changed()
    assert (load(a), load(b)) == ("new", "b")


def test_files_and_modules_import_from_their_own_directory(tmp_path, monkeypatch):
    a = write(tmp_path / "a", module_a="from beside import VALUE\n", beside="VALUE = 'a'\n")
    b = write(tmp_path / "b", module_b="from beside import VALUE\n", beside="VALUE = 'b'\n")
    c = write(tmp_path / "c", env="from beside import VALUE\n", beside="VALUE = 'c'\n")
    found = []
    for directory, name in ((a, "module_a:VALUE"), (b, "module_b:VALUE")):
        monkeypatch.chdir(directory)
        forget_changed()
        found.append(load_object(name, "thing"))
    assert [*found, load(c)] == ["a", "b", "c"]


def test_namespace_packages_of_two_directories_are_separate(tmp_path):
    for name in "ab":
        directory = write(tmp_path / name, env="from parts import one\nVALUE = one.VALUE\n")
        write(directory / "parts", one=f"VALUE = {name!r}\n")
        assert load(directory) == name


LATE = {
    "a function": "def VALUE():\n    from beside import VALUE\n    return VALUE\n",
    "importlib": "import importlib\nbeside = importlib.import_module('beside')\ndef VALUE(): return beside.VALUE\n",
}


@pytest.mark.parametrize("kind", LATE)
def test_modules_imported_in_functions_are_reloaded_after_a_change(kind, tmp_path):
    for value in (1, 22, 3):
        write(tmp_path, env=LATE[kind], beside=f"VALUE = {value}\n")
        forget_changed()
        with keep_files():
            assert load(tmp_path)() == value


def test_files_share_imported_classes_after_a_reload(tmp_path):
    using = "from beside import Shared\nVALUE = {}\n"
    write(tmp_path, env=using.format(1), agent=using.format(1), beside="class Shared: ...\n")
    for value in (1, 2):
        write(tmp_path, env=using.format(value))
        forget_changed()
        assert load(tmp_path) == value
        assert load(tmp_path, "env.py:Shared") is load(tmp_path, "agent.py:Shared") is sys.modules["beside"].Shared
        assert pickle.loads(cloudpickle.dumps(load(tmp_path, "agent.py:Shared"))) is load(tmp_path, "env.py:Shared")


def test_broken_module_is_loaded_after_it_is_fixed(tmp_path):
    write(tmp_path, env="from beside import VALUE\nopen(__file__[:-6] + 'beside.py', 'w').write('VALUE = (')\n")
    write(tmp_path, beside="VALUE = 1\n")
    assert load(tmp_path) == 1
    write(tmp_path, env="import beside\nVALUE = beside.VALUE + 1 / beside.VALUE\n", beside="VALUE = 0\n")
    forget_changed()
    with pytest.raises(registry.UsageError, match="ZeroDivisionError: division by zero"):
        load(tmp_path)
    write(tmp_path, beside="VALUE = 1\n")
    forget_changed()
    assert load(tmp_path) == 2


@pytest.mark.parametrize("changed", ["env", "beside", "other"])
def test_modules_of_the_script_are_not_replaced(changed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, env="from beside import VALUE\n", beside="VALUE = 1\n", other="VALUE = 1\n")
    import beside
    import other

    assert load(tmp_path) == 1
    write(tmp_path, **{changed: "VALUE = 22\n"})
    forget_changed()
    assert load(tmp_path) == (1 if changed == "other" else 22)
    assert sys.modules["beside"] is beside and sys.modules["other"] is other and beside.VALUE == 1


def test_installed_modules_are_not_reloaded(tmp_path):
    installed = write(tmp_path / "site-packages", lives_here="class Own: ...\n")
    env = f"import sys\nsys.path.append({str(installed)!r})\nimport lives_here, rlframe\nVALUE = {{}}\n"
    write(tmp_path, env=env.format(1))
    assert load(tmp_path) == 1
    before = dict(sys.modules)
    write(tmp_path, env=env.format(2))
    forget_changed()
    assert load(tmp_path) == 2
    new = {name for name, module in before.items() if sys.modules.get(name) is not module}
    assert len(new) == 1 and new.pop().startswith("rlframe_file_env")


def test_changed_module_of_the_script_is_reloaded_if_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "pack", __init__="", env="from pack.beside import VALUE\n", beside="VALUE = 1\n", agent="")
    import pack.agent
    import pack.env

    assert load_object("pack.env:VALUE", "thing") == 1 and sys.modules["pack.env"] is pack.env
    before = sys.modules["pack.agent"]
    write(tmp_path / "pack", beside="VALUE = 22\n")
    forget_changed()
    assert load_object("pack.env:VALUE", "thing") == sys.modules["pack.env"].VALUE == 22
    assert load_object("pack.env:VALUE", "thing") == 22 and sys.modules["pack.agent"] is before


def test_subdirectory_has_its_own_modules(tmp_path):
    for directory, value in ((tmp_path / "below", 1), (tmp_path, 2)):
        write(directory, env="from beside import VALUE\n", beside=f"VALUE = {value}\n")
        assert load(directory) == value
    before = sys.modules["beside"]
    forget_changed()
    assert load(tmp_path) == 2 and load(tmp_path / "below") == 1 and sys.modules["beside"] is before


def test_modules_that_a_notebook_imports_later_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, env="VALUE = 1\n", agent_beside="class Agent: ...\n")
    assert load(tmp_path) == 1
    import agent_beside

    monkeypatch.setattr(sys.modules["__main__"], "Agent", agent_beside.Agent, raising=False)
    write(tmp_path, env="VALUE = 22\n")
    forget_changed()
    assert load(tmp_path) == 22 and sys.modules["agent_beside"] is agent_beside


class FakeModule:
    """A fake module without `__dict__`, like the fake modules of cffi."""

    __slots__ = ()
    __class__ = types.ModuleType


def test_fake_modules_are_ignored(monkeypatch):
    monkeypatch.setitem(sys.modules, "pretended", FakeModule())
    assert isinstance(sys.modules["pretended"], types.ModuleType)
    forget_changed()
    assert type(sys.modules["pretended"]) is FakeModule
