"""Support for programs that start with plain `lp.launch`, without an engine: each node gets a guard process.

A script imports rlframe and Launchpad, and calls `lp.launch(program)`:

1. `import rlframe` calls `register_with_launchpad`. After the import of Launchpad, `node.py` pickles its nodes. This
   works whether Launchpad is imported before or after rlframe.
2. The process of a node unpickles the node with `node.restore`, which first starts the node's guard (`guard.py`).
3. If the node raises or is killed, its guard prints the node's name, stops the launcher, and kills processes that do
   not end in time.

Any process that imports rlframe can be such a node, so this package must not import `rlframe.handles` or modules that
import `rlframe.handles`. `engines/launchpad.py` needs no guards: it runs programs under rlframe's own supervisor.
"""

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
