"""Import optional packages in tests. A missing package skips the test, but a broken package fails it."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from rlframe import extras

NOT_IN_ALL = {"gymnax", "jumanji"}  # extras that `make setup` does not install, because their versions conflict


def needs(*names: str) -> None:
    """Skip a test or a test module if one of these extras is missing: `needs("launchpad", "reverb")`."""
    absent = [name for name in names if not extras.is_installed(name)]
    if absent:
        pytest.skip(str(extras.missing_extra_error("This test", *absent)), allow_module_level=True)


def import_or_skip(package: str, how: str) -> ModuleType:
    """Import a package that only tests need. Skip the test if it is not installed.

    Args:
        package: name of the module or submodule.
        how: how to install the package, such as "pip install 'rlframe[test]'".
    """
    if not extras.has(package.partition(".")[0]):
        pytest.skip(f"This test needs the package {package}: {how}", allow_module_level=True)
    return importlib.import_module(package)
