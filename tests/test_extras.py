"""Tests of the errors for missing and broken optional packages. Test that each optional import belongs to an extra."""

from __future__ import annotations

import ast
import pathlib
import re
import sys

import pytest

import rlframe
from rlframe import extras
from rlframe.errors import UsageError
from tests import hiding
from tests.extras import NOT_IN_ALL, needs

NOT_IMPORTED = {"all", "docs", "cuda", "gpu", "lint", "test"}  # extras whose packages rlframe does not import
PACKAGE = pathlib.Path(rlframe.__file__).parent


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that writes the package `rlframe_broken`, the only package of the extra `fake`.

    The argument of the function is the text of `__init__.py`. None means a folder without this file.
    """
    monkeypatch.setitem(extras.MODULES, "fake", ("rlframe_broken", "rlframe_absent"))
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str | None) -> None:
        (tmp_path / "rlframe_broken").mkdir()
        if text is not None:
            (tmp_path / "rlframe_broken" / "__init__.py").write_text(text)

    yield write
    sys.modules.pop("rlframe_broken", None)


def test_missing_extra_error_has_the_option_and_the_install_command(monkeypatch):
    monkeypatch.setattr(extras, "_MINOR", 10)
    assert str(extras.missing_extra_error("--topology heavy_env", "launchpad")) == (
        "--topology heavy_env needs the extra 'launchpad': pip install 'rlframe[launchpad]'"
    )
    assert str(extras.missing_extra_error("--agent grpo", "launchpad", "trajectories", "envs")) == (
        "--agent grpo needs the extras 'launchpad', 'trajectories' and 'envs': "
        "pip install 'rlframe[launchpad,trajectories,envs]'"
    )
    assert extras.missing_extra_error("x", "wandb").exit_code == 2


def test_error_for_an_extra_without_a_wheel_names_an_alternative(monkeypatch):
    monkeypatch.setattr(extras, "_MINOR", 13)
    assert str(extras.missing_extra_error("--engine launchpad", "launchpad", "trajectories")) == (
        "--engine launchpad needs the extra 'launchpad', which has no wheel for Python 3.13: use "
        "Python 3.10, or instead --engine local, on one machine"
    )
    assert str(extras.missing_extra_error("--env dm_control:x", "dm_control")) == (
        "--env dm_control:x needs the extra 'dm_control', which has no wheel for Python 3.13: use "
        "Python 3.12, or instead an EnvPool task such as CartpoleSwingup-v1"
    )
    assert str(extras.missing_extra_error("--wandb", "wandb")).endswith("pip install 'rlframe[wandb]'")


def test_alternative_is_named_only_if_the_last_extra_is_missing(monkeypatch):
    monkeypatch.setitem(extras.MODULES, "fake", ("rlframe_absent",))
    monkeypatch.setitem(extras.MODULES, "there", ("json",))
    with pytest.raises(UsageError, match=r"^It needs the extra 'fake': pip install 'rlframe\[fake\]', or not$"):
        extras.require("It", "there", "fake", otherwise="or not")
    with pytest.raises(UsageError, match=r"^It needs the extra 'fake': pip install 'rlframe\[fake\]'$"):
        extras.require("It", "fake", "there", otherwise="or not")


def test_missing_module_is_reported_with_its_extra(package):
    with (
        pytest.raises(UsageError, match="^Something needs the extra 'fake': pip install"),
        extras.explain_import_error("Something", "fake"),
    ):
        import rlframe_absent  # noqa: F401


def test_folder_without_an_init_file_is_not_a_package(package):
    package(None)
    assert not extras.has("rlframe_broken")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise AttributeError('no attribute Z')", "AttributeError: no attribute Z"),
        ("from json import no_such_name", "ImportError: cannot import name 'no_such_name' from 'json'"),
        ("import a_dependency_of_it", "ModuleNotFoundError: No module named 'a_dependency_of_it'"),
    ],
)
def test_package_that_fails_to_import_is_reported_as_broken(package, text, reason):
    package(text)
    with pytest.raises(UsageError) as raised, extras.explain_import_error("Something", "fake"):
        import rlframe_broken  # noqa: F401
    begins = "Something needs the package rlframe_broken, which is installed but cannot be imported: "
    assert str(raised.value).startswith(begins + reason)


def test_missing_submodule_is_reported_as_broken_package(package):
    package("")
    with (
        pytest.raises(UsageError, match="rlframe_broken, which is installed but cannot be imported"),
        extras.explain_import_error("Something", "fake"),
    ):
        import rlframe_broken.part  # noqa: F401


def test_import_error_of_another_module_is_raised_unchanged(package):
    with (
        pytest.raises(ModuleNotFoundError, match="no_module_of_ours"),
        extras.explain_import_error("Something", "fake"),
    ):
        import no_module_of_ours  # noqa: F401
    with pytest.raises(ZeroDivisionError), extras.explain_import_error("Something", "fake"):
        _ = 1 / 0


def test_needs_skips_a_test_for_missing_packages_but_not_for_broken_packages(package, monkeypatch):
    package("raise AttributeError('damaged')")
    with pytest.raises(pytest.skip.Exception, match="This test needs the extra 'fake': pip install 'rlframe"):
        needs("fake")
    monkeypatch.setitem(extras.MODULES, "fake", ("rlframe_broken",))
    needs("fake")
    with pytest.raises(AttributeError, match="damaged"):
        import rlframe_broken  # noqa: F401


def test_extras_table_matches_setup_py():
    of_setup = hiding.setup_arguments()["extras_require"]
    assert set(extras.MODULES) == set(extras.USES) == set(of_setup) - NOT_IMPORTED
    for extra, modules in extras.MODULES.items():
        if not extras.has_wheel(extra) or extra in NOT_IN_ALL:
            continue
        assert set(of_setup[extra]) <= set(of_setup["all"]), extra
        needs(extra)
        assert set(modules) <= hiding.visible((extra,)), extra


def test_extras_page_names_every_extra():
    page = (PACKAGE.parent / "docs/howto/extras.md").read_text()
    table, versions = page.split("## Python versions")
    of_commands = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*\|(.*)\|$", table, re.MULTILINE))))
    assert of_commands == {*extras.MODULES, "gpu"}
    for minors, missing in re.findall(r"^\| (3\..*?) \| (.*) \|$", versions, re.MULTILINE):
        for minor in re.findall(r"3\.(\d+)", minors):
            gone = {extra for extra, (last, _) in extras.LAST_PYTHON.items() if last < int(minor)}
            assert set(re.findall(r"`(\w+)`", missing)) == gone


def test_every_import_belongs_to_the_core_or_an_extra():
    known = {
        *sys.stdlib_module_names,
        *hiding.visible(()),
        *(name for names in extras.MODULES.values() for name in names),
    }
    known |= {"rlframe", "ale_py"}  # The option `--video` has its own error if ale_py is missing.
    known.add("gym_notices")  # On Python 3.10, EnvPool needs the old gym, which needs this package.
    unknown = {(name, str(path)) for path in PACKAGE.rglob("*.py") for name in imported(path) - known}
    assert unknown == set()


def imported(path: pathlib.Path) -> set[str]:
    """Return the top-level modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}
