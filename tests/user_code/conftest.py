"""Undo what the tests of this directory do to imports."""

from __future__ import annotations

import os
import sys

import gymnasium
import pytest

from rlframe.user_code.files import forget_changed


@pytest.fixture(autouse=True)
def imports(tmp_path_factory):
    """Restore `sys.path`, Gymnasium's registry and the working directory, and remove modules that a test has written.

    Without it, a later test in the same process that writes a module of this name would import the earlier one.
    """
    path, modules, registry, here = list(sys.path), set(sys.modules), dict(gymnasium.registry), os.getcwd()
    forget_changed()
    yield
    os.chdir(here)
    sys.path[:] = path
    gymnasium.registry.clear()
    gymnasium.registry.update(registry)
    written = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - modules:
        module = vars(sys.modules[name])
        # A package without `__init__.py` has directories, but no file.
        place = module.get("__file__") or next(iter(module.get("__path__", ())), "")
        if place.startswith(written):
            del sys.modules[name]
