"""Imports that may fail or shall wait: the packages of each extra of `pip install 'rlframe[EXTRA]'`, and lazy names.

Imports of an extra's packages stand inside `with explain_import_error(...)`. What must be known before something is made (a run's
directory, processes) is checked by `require`, which imports nothing. A package whose names are imported on first use,
so that importing it stays quick, gets its `__getattr__` from `lazy_names`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlframe.errors import UsageError

# extra -> top-level modules of its packages that are imported here. A test compares it with setup.py and the imports.
MODULES = {
    "gymnasium": ("gymnasium", "imageio_ffmpeg"),
    "box2d": ("Box2D",),
    "dm_control": ("dm_control",),
    "launchpad": ("launchpad", "courier"),
    "reverb": ("reverb", "tensorflow"),
    "ray": ("ray",),
    "trajectories": (
        *("anyio", "fastapi", "httptools", "httpx", "msgspec", "prometheus_client", "pydantic", "redis", "starlette"),
        *("uvicorn", "zstandard"),
    ),
    "envs": ("openai", "yaml"),
    "lm": ("jinja2", "safetensors", "tokenizers"),
    "tokenizers": ("tokenizers",),
    "sweep": ("optuna",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}

# Extras that have no wheel for each Python: the last minor version with one, and what does their work after it.
LAST_PYTHON = {
    "launchpad": (10, "--engine local, on one machine"),
    "reverb": (10, "--replay service"),
    "dm_control": (12, "an EnvPool task such as CartpoleSwingup-v1"),
}
_MINOR = sys.version_info.minor


def has(module: str) -> bool:
    """Return whether a top-level module is installed here, even a broken one."""
    spec = importlib.util.find_spec(module)
    # A folder of that name in the working directory, such as W&B leaves, is no package: it has no `__init__`.
    return spec is not None and spec.origin is not None


def is_installed(extra: str) -> bool:
    """Return whether all packages of an extra are installed here, even broken ones."""
    return all(map(has, MODULES[extra]))


def has_wheel(extra: str) -> bool:
    """Return whether there are wheels of an extra for this Python."""
    return extra not in LAST_PYTHON or LAST_PYTHON[extra][0] >= _MINOR


def is_instance(target: Any, module: str, name: str) -> bool:
    """Return whether `target` is an instance of the class of that name; imports nothing.

    Nothing is an instance of a class whose module nobody has imported.
    """
    imported = sys.modules.get(module)
    return imported is not None and isinstance(target, getattr(imported, name))


def require(by: str, *extras: str, otherwise: str = "") -> None:
    """Raise `missing_extra_error(...)` where a package of the extras is not installed.

    Args:
        by: what asks for them, as a user knows it: "--topology heavy_env".
        *extras: that are needed.
        otherwise: the end of the sentence where only the last of them is missing: what does without it.
    """
    absent = [extra for extra in extras if not is_installed(extra)]
    if absent:
        raise missing_extra_error(by, *absent, otherwise=otherwise if absent == [extras[-1]] else "")


@contextlib.contextmanager
def explain_import_error(by: str, *extras: str, otherwise: str = "") -> Iterator[None]:
    """A context for imports of the extras' packages, or of files of ours that import them.

    Args:
        by, otherwise: as for `require`.
        *extras: whose packages may be imported.

    Raises:
        UsageError: a package is not installed, and which extra brings it; or it is, and cannot be imported, and why.
    """
    try:
        yield
    except Exception as error:
        package = _package(error, [module for extra in extras for module in MODULES[extra]])
        if package is None:  # a mistake of our own
            raise
        if not has(package):
            require(by, *extras, otherwise=otherwise)
        raise UsageError(
            f"{by} needs the package {package}, which is installed but cannot be imported: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}"
        ) from error


def lazy_names(
    package: str, modules: Mapping[str, str], extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package whose names are imported on first use (PEP 562).

    Args:
        package: its name.
        modules: by name, the module that defines it.
        extra: the extra that these modules need; None: none.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with contextlib.nullcontext() if extra is None else explain_import_error(f"{package}.{name}", extra):
            return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: list(modules)


def missing_extra_error(by: str, *extras: str, otherwise: str = "") -> UsageError:
    """Return the error that says what asked for these extras, and how to get them."""
    gone = [extra for extra in extras if not has_wheel(extra)]
    several = len(gone or extras) > 1
    sentence = f"{by} needs the extra{'s' * several} {_listed(gone or extras)}"
    if gone:
        last = min(LAST_PYTHON[extra][0] for extra in gone)
        instead = "; or ".join(LAST_PYTHON[extra][1] for extra in gone)
        have = "which have no wheels" if several else "which has no wheel"
        return UsageError(f"{sentence}, {have} for Python 3.{_MINOR}: use Python 3.{last}, or in its place {instead}")
    return UsageError(f"{sentence}: pip install 'rlframe[{','.join(extras)}]'{otherwise and ', '}{otherwise}")


def _listed(names: Sequence[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} and {last}" if first else last


def _package(error: Exception, modules: list[str]) -> str | None:
    """Which of these top-level modules an import failed with, None where it failed elsewhere."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if name in modules and not has(name):
        return name
    for frame, _ in traceback.walk_tb(error.__traceback__):
        within = str(frame.f_globals.get("__name__")).partition(".")[0]
        if within in modules:
            return within
    return name if name in modules else None
