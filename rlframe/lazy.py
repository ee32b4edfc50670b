"""Names of a package that are imported on first use (PEP 562), so that importing the package stays quick."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rlframe import extras


def lazy_names(
    package: str, modules: Mapping[str, str], extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        modules: by name, the module that defines it.
        extra: which these modules need (`rlframe.extras`); None: none.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with contextlib.nullcontext() if extra is None else extras.needed(f"{package}.{name}", extra):
            return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: list(modules)
