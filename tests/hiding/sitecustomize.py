"""A Python with this folder in PYTHONPATH finds none of the top-level modules that RLFRAME_HIDDEN names."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import Any

HIDDEN = set(os.environ.get("RLFRAME_HIDDEN", "").split())


class HidingFinder(PathFinder):
    """Python's own, but for what is hidden."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = HidingFinder
