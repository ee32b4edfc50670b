"""Modules beside a user's files: each file has those of its own directory, and all are loaded again together."""

from __future__ import annotations

import pickle
import sys
import types

import cloudpickle
import pytest

from rlframe.programs.options import registry
from rlframe.programs.options.object_names import load_object
from rlframe.user_code.files import forget_changed, keep_files


@pytest.fixture(autouse=True)
def imports():
    """Restores where Python imports from, and what it has imported."""
    path, modules = list(sys.path), dict(sys.modules)
    forget_changed()
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules.keys():
        if not name.startswith("rlframe."):
            del sys.modules[name]


def load(directory, name="env.py:VALUE"):
    return load_object(f"{directory}/{name}", "environment")


def write(directory, **files):
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    return directory


@pytest.mark.parametrize("env", ["from beside import VALUE\n", "import beside\nVALUE = beside.VALUE\n"])
def test_two_directories_have_neighbors_of_the_same_name(env, tmp_path):
    a = write(tmp_path / "a", env=env, beside="VALUE = 'a'\nclass Own: ...\n", agent="from beside import VALUE, Own\n")
    b = write(tmp_path / "b", env=env, beside="VALUE = 'b'\n")
    assert (load(a), load(b), load(a, "agent.py:VALUE")) == ("a", "b", "a")
    write(a, beside="VALUE = 'new'\n")
    forget_changed()
    assert (load(a), load(b)) == ("new", "b")


def test_a_file_and_a_module_of_two_directories_have_neighbors_of_the_same_name(tmp_path, monkeypatch):
    a = write(tmp_path / "a", module_a="from beside import VALUE\n", beside="VALUE = 'a'\n")
    b = write(tmp_path / "b", module_b="from beside import VALUE\n", beside="VALUE = 'b'\n")
    c = write(tmp_path / "c", env="from beside import VALUE\n", beside="VALUE = 'c'\n")
    found = []
    for directory, name in ((a, "module_a:VALUE"), (b, "module_b:VALUE")):
        monkeypatch.chdir(directory)
        forget_changed()
        found.append(load_object(name, "thing"))
    assert [*found, load(c)] == ["a", "b", "c"]


def test_packages_without_init_of_two_directories_are_told_apart(tmp_path):
    for name in "ab":
        directory = write(tmp_path / name, env="from parts import one\nVALUE = one.VALUE\n")
        write(directory / "parts", one=f"VALUE = {name!r}\n")
        assert load(directory) == name


LATE = {
    "a function": "def VALUE():\n    from beside import VALUE\n    return VALUE\n",
    "importlib": "import importlib\nbeside = importlib.import_module('beside')\ndef VALUE(): return beside.VALUE\n",
}


@pytest.mark.parametrize("how", LATE)
def test_a_changed_neighbor_is_imported_again_however_it_was_imported(how, tmp_path):
    for value in (1, 22, 3):
        write(tmp_path, env=LATE[how], beside=f"VALUE = {value}\n")
        forget_changed()
        with keep_files():
            assert load(tmp_path)() == value


def test_files_of_one_directory_share_the_classes_of_their_neighbor_after_one_has_changed(tmp_path):
    using = "from beside import Shared\nVALUE = {}\n"
    write(tmp_path, env=using.format(1), agent=using.format(1), beside="class Shared: ...\n")
    for value in (1, 2):
        write(tmp_path, env=using.format(value))
        forget_changed()
        assert load(tmp_path) == value
        assert load(tmp_path, "env.py:Shared") is load(tmp_path, "agent.py:Shared") is sys.modules["beside"].Shared
        assert pickle.loads(cloudpickle.dumps(load(tmp_path, "agent.py:Shared"))) is load(tmp_path, "env.py:Shared")


def test_a_neighbor_that_is_broken_on_disk_is_loaded_once_it_is_mended(tmp_path):
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
def test_the_modules_that_the_script_imported_stay_its_own(changed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, env="from beside import VALUE\n", beside="VALUE = 1\n", other="VALUE = 1\n")
    import beside
    import other

    assert load(tmp_path) == 1
    write(tmp_path, **{changed: "VALUE = 22\n"})
    forget_changed()
    assert load(tmp_path) == (1 if changed == "other" else 22)
    assert sys.modules["beside"] is beside and sys.modules["other"] is other and beside.VALUE == 1


def test_installed_modules_and_those_of_rlframe_stay_when_a_file_beside_them_changes(tmp_path):
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


def test_a_module_that_is_named_and_that_the_script_imported_is_loaded_again_if_it_has_changed(tmp_path, monkeypatch):
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


def test_a_directory_below_another_has_neighbors_of_its_own(tmp_path):
    for directory, value in ((tmp_path / "below", 1), (tmp_path, 2)):
        write(directory, env="from beside import VALUE\n", beside=f"VALUE = {value}\n")
        assert load(directory) == value
    before = sys.modules["beside"]
    forget_changed()
    assert load(tmp_path) == 2 and load(tmp_path / "below") == 1 and sys.modules["beside"] is before


def test_what_a_notebook_has_imported_since_stays_its_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, env="VALUE = 1\n", agent_beside="class Agent: ...\n")
    assert load(tmp_path) == 1
    import agent_beside

    monkeypatch.setattr(sys.modules["__main__"], "Agent", agent_beside.Agent, raising=False)
    write(tmp_path, env="VALUE = 22\n")
    forget_changed()
    assert load(tmp_path) == 22 and sys.modules["agent_beside"] is agent_beside


class PretendedModule:
    """As the modules that cffi makes: without `__dict__`."""

    __slots__ = ()
    __class__ = types.ModuleType


def test_objects_that_pretend_to_be_modules_are_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "pretended", PretendedModule())
    assert isinstance(sys.modules["pretended"], types.ModuleType)
    forget_changed()
    assert type(sys.modules["pretended"]) is PretendedModule
