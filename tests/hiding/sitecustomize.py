"""Hide the top-level modules in RLFRAME_HIDDEN. Python imports this file at start if its folder is in PYTHONPATH."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import Any

HIDDEN = set(os.environ.get("RLFRAME_HIDDEN", "").split())


class HidingFinder(PathFinder):
    """A finder for modules that does not find the hidden modules."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = HidingFinder
