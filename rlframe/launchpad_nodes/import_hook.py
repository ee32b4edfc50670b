"""Registers how nodes of Launchpad are pickled as soon as Launchpad is imported, be that before rlframe or after."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NODES = "launchpad.nodes.python.node"  # the module with the class of all nodes


def register_with_launchpad() -> None:
    """Call `node.register` now if Launchpad has been imported, and else right after its import."""
    if NODES in sys.modules:
        _register(sys.modules[NODES])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds Launchpad's module of nodes as Python does, and has `_register` run after it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != NODES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(_execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    _register(module)


def _register(module: ModuleType) -> None:
    from rlframe.launchpad_nodes import node  # now: few processes use Launchpad

    node.register(module.PyNode)
