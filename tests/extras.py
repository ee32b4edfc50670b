"""What of an extra is installed where tests run: what is missing skips, what is broken fails."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from rlframe import extras


def needs(*names: str) -> None:
    """Skips a test, or a whole module of them, without these extras: `needs("launchpad", "reverb")`."""
    absent = [name for name in names if not extras.is_installed(name)]
    if absent:
        pytest.skip(str(extras.missing_extra_error("This test", *absent)), allow_module_level=True)


def import_or_skip(package: str, how: str) -> ModuleType:
    """Imports a package of the tests' own, or skips where it is not installed.

    Args:
        package: by its module, perhaps one inside it.
        how: to get it: "pip install 'rlframe[test]'".
    """
    if not extras.has(package.partition(".")[0]):
        pytest.skip(f"This test needs the package {package}: {how}", allow_module_level=True)
    return importlib.import_module(package)
