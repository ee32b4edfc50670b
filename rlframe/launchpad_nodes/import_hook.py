"""Change how Launchpad's nodes are pickled. This works whether Launchpad is imported before or after rlframe."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NODES = "launchpad.nodes.python.node"  # the module that defines the base class of nodes


def register_with_launchpad() -> None:
    """Call `node.register` as soon as Launchpad is imported, or now if it is already imported."""
    if NODES in sys.modules:
        _register(sys.modules[NODES])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Import finder that calls `_register` right after the import of Launchpad's module `NODES`."""

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
    from rlframe.launchpad_nodes import node  # import this module late, because few processes use Launchpad

    node.register(module.PyNode)
