"""Optional packages (the extras of `pip install 'rlframe[EXTRA]'`) and lazy imports.

- `explain_import_error` wraps imports of optional packages. It turns an import failure into a `UsageError`.
- `require` checks for optional packages without importing them. Call it before you create files or processes.
- `lazy_names` imports the names of a package on first use, which keeps `import rlframe` fast.
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

# Extra -> top-level modules of its packages, as rlframe imports them. A test compares this dict with setup.py and with
# the imports.
MODULES = {
    "gymnasium": ("gymnasium", "imageio_ffmpeg"),
    "box2d": ("Box2D",),
    "dm_control": ("dm_control",),
    "gymnax": ("gymnax",),
    "jumanji": ("jumanji",),
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

# Extra -> the commands and options that need it. `rlframe doctor` shows them.
USES = {
    "gymnasium": "--env NAME of Gymnasium, evaluate --video",
    "box2d": "--env LunarLander-v3",
    "dm_control": "--env dm_control:NAME",
    "gymnax": "--env gymnax:NAME",
    "jumanji": "--env jumanji:NAME",
    "launchpad": "train --engine launchpad",
    "reverb": "train --replay reverb",
    "ray": "train --engine ray, several machines",
    "trajectories": "train --topology elastic, --http, scale, pause, serve, --agent grpo",
    "envs": "environments of language models, --agent grpo",
    "lm": "published language models",
    "tokenizers": "serve trajectories --tokenizer",
    "sweep": "sweep",
    "wandb": "train --wandb",
    "trackio": "train --trackio",
}

# Extra -> (M, alternative): its package has wheels up to Python 3.M. Messages name the alternative for later versions.
LAST_PYTHON = {
    "launchpad": (10, "--engine local, on one machine"),
    "reverb": (10, "--replay service"),
    "dm_control": (12, "an EnvPool task such as CartpoleSwingup-v1"),
}
_MINOR = sys.version_info.minor


def has(module: str) -> bool:
    """Return True if a top-level module is installed. A broken module counts as installed."""
    spec = importlib.util.find_spec(module)
    # Ignore a folder of this name without `__init__.py` in the working directory. W&B creates such a folder.
    return spec is not None and spec.origin is not None


def is_installed(extra: str) -> bool:
    """Return True if all packages of an extra are installed. Broken packages count as installed."""
    return all(map(has, MODULES[extra]))


def has_wheel(extra: str) -> bool:
    """Return True if the packages of an extra have wheels for this version of Python."""
    return extra not in LAST_PYTHON or LAST_PYTHON[extra][0] >= _MINOR


def is_instance(target: Any, module: str, name: str) -> bool:
    """Return True if `target` is an instance of the class `module.name`, without importing the module.

    If the module has not been imported, no object can be an instance of its class.
    """
    imported = sys.modules.get(module)
    return imported is not None and isinstance(target, getattr(imported, name))


def require(by: str, *extras: str, otherwise: str = "") -> None:
    """Raise `missing_extra_error(...)` if a package of one of the extras is not installed. Import nothing.

    Args:
        by: the option or feature that needs the extras, for the message: "--topology heavy_env".
        *extras: names of the required extras.
        otherwise: an alternative that does not need the last extra. If only this extra is missing, the message ends
            with the alternative.
    """
    absent = [extra for extra in extras if not is_installed(extra)]
    if absent:
        raise missing_extra_error(by, *absent, otherwise=otherwise if absent == [extras[-1]] else "")


@contextlib.contextmanager
def explain_import_error(by: str, *extras: str, otherwise: str = "") -> Iterator[None]:
    """Convert import failures inside a `with` block to a `UsageError` that explains them.

    Args:
        by, otherwise: see `require`.
        *extras: extras whose packages are imported inside the block.

    Raises:
        UsageError: a package is missing, or is installed but broken. The message contains the extra or the cause.
    """
    try:
        yield
    except Exception as error:
        package = _package(error, [module for extra in extras for module in MODULES[extra]])
        if package is None:  # The cause of the error is rlframe itself, not an optional package.
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
    """Return `__getattr__` and `__dir__` for a package that imports its names on first use (PEP 562).

    Args:
        package: name of the package.
        modules: dict from each name to the module that defines it.
        extra: extra that the modules need, if any.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with contextlib.nullcontext() if extra is None else explain_import_error(f"{package}.{name}", extra):
            return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: list(modules)


def missing_extra_error(by: str, *extras: str, otherwise: str = "") -> UsageError:
    """Return an error that says which option needs these extras and how to install them."""
    gone = [extra for extra in extras if not has_wheel(extra)]
    several = len(gone or extras) > 1
    have = f", which {'have no wheels' if several else 'has no wheel'} for Python 3.{_MINOR}" if gone else ""
    sentence = f"{by} needs the extra{'s' * several} {_listed(gone or extras)}{have}: {how_to_install(*extras)}"
    return UsageError(sentence if gone or not otherwise else f"{sentence}, {otherwise}")


def how_to_install(*extras: str) -> str:
    """Return the command that installs extras. If one has no wheel for this Python, return the alternatives."""
    if gone := [extra for extra in extras if not has_wheel(extra)]:
        last = min(LAST_PYTHON[extra][0] for extra in gone)
        return f"use Python 3.{last}, or instead {'; or '.join(LAST_PYTHON[extra][1] for extra in gone)}"
    return f"pip install 'rlframe[{','.join(extras)}]'"


def _listed(names: Sequence[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} and {last}" if first else last


def _package(error: Exception, modules: list[str]) -> str | None:
    """Return the top-level module whose import caused the error. Return None if it is not in `modules`."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if name in modules and not has(name):
        return name
    for frame, _ in traceback.walk_tb(error.__traceback__):
        within = str(frame.f_globals.get("__name__")).partition(".")[0]
        if within in modules:
            return within
    return name if name in modules else None
