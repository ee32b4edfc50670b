"""Load modules and files that a user names, and load them again for a later run if they have changed.

A module is looked for in the working directory. A run keeps the directory in which it was found, for later sessions.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from rlframe.errors import UsageError, suggest
from rlframe.user_code import directories

_module_directories: dict[str, str] = {}  # directories of the modules of the run, by the name of the outermost package
_lock = threading.Lock()
_runs = 0  # sessions under way in this process
_loading = threading.local()  # `path`: of the file that this thread loads

_UNGUARDED = (
    "{} starts a run whenever it is loaded, and other processes load it for the classes in it. Put the call of "
    'rlframe.train(...) under `if __name__ == "__main__":`, or the classes into another file.'
)


@contextlib.contextmanager
def keep_files() -> Iterator[None]:
    """Keep all loaded files as they are, so that a run has one version of them from its start to its end."""
    global _runs
    with _lock:
        _runs += 1
    try:
        yield
    finally:
        with _lock:
            _runs -= 1


def forget_changed() -> None:
    """Forget where modules are, and files that have changed since. Does nothing during a run in this process."""
    with _lock:
        if not _runs:
            _module_directories.clear()
            directories.forget_changed()
            importlib.invalidate_caches()


def module_directories(names: Iterable[Any]) -> dict[str, str]:
    """Return the directories of the modules in names like `module:Id`, by the name of the outermost package."""
    tops = {part.partition(".")[0] for name in names if isinstance(name, str) for part in name.split(":")[:-1]}
    return {top: _module_directories[top] for top in sorted(tops & set(_module_directories))}


def restore_module_directories(found: Mapping[str, str]) -> None:
    """Look for modules first where an earlier session or another process found them: see `module_directories`."""
    _module_directories.update({str(top): str(search_directory) for top, search_directory in found.items()})


def import_module(module: str, name: str) -> ModuleType:
    """Import the module of `module:Id`, also from the working directory.

    Raises:
        UsageError: there is none, it raises, or it needs a package that is not installed.
    """
    if "" in module.split("."):
        raise UsageError(f"{name!r} should read module:Id or file.py:NAME, and {module!r} is not the name of a module.")
    top, here = module.partition(".")[0], os.getcwd()
    search_directory = next(
        (each for each in (_module_directories.get(top), here) if each is not None and _has(each, top)), None
    )
    directory = directories.find_directory(top, search_directory)
    try:
        if directory is None or directories.is_current(directory, module):
            found = importlib.import_module(module)
        else:
            with directories.loading(directory, module, search_directory, restore_shadowed=_runs > 0):
                found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"{name!r} needs a package that is not installed here: {error}") from error
        before = (
            f" The run was started with the one in {_module_directories[top]}." if top in _module_directories else ""
        )
        raise UsageError(
            f"There is no module {module!r} for {name!r}: it is not installed, and not in the working directory {here}."
            f"{before}"
        ) from error
    except UsageError:  # as where a module of ours needs an extra
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"Cannot import {module!r} for {name!r}: {describe(error)}.") from error
    if directory is not None:
        _module_directories[top] = directory
    return found


def _has(directory: str, top: str) -> bool:
    return os.path.isfile(os.path.join(directory, f"{top}.py")) or os.path.isdir(os.path.join(directory, top))


def load_file(path: pathlib.Path, what: str) -> ModuleType:
    """Import a Python file by its path, or return the module if it is loaded.

    Raises:
        UsageError: there is no such file, or it does not import.
    """
    path = pathlib.Path(os.path.abspath(path))
    main = sys.modules["__main__"]
    if (getattr(main, "__file__", None) or "") == str(path):
        return main  # the script that runs: loaded again, it would start its run again
    if not path.is_file():
        near = suggest(path.name, [each.name for each in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise UsageError(f"There is no file {path} for the {what}.{near}")
    # The path is part of the name: two files called agent.py, or one called like a library, do not meet.
    name = f"rlframe_file_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    search_directory = str(path.parent)
    directory = os.path.realpath(search_directory)
    try:
        loading = directories.loading(directory, name, search_directory, restore_shadowed=_runs > 0)
        with _while_loading(path), loading as contents:
            contents[os.path.join(directory, path.name)] = content = path.read_bytes()
            sys.modules[name] = module
            # Not by the loader: it takes bytecode for current if the file was written again within the same second.
            exec(compile(content, path, "exec"), vars(module))
        pickle_by_value(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise UsageError(f"Cannot load {path} for the {what}: {describe(error)}.") from error
    return module


@contextlib.contextmanager
def _while_loading(path: pathlib.Path) -> Iterator[None]:
    before, _loading.path = getattr(_loading, "path", None), path
    try:
        yield
    finally:
        _loading.path = before


def check_not_loading() -> None:
    """Raise UsageError if the caller is a file that is being loaded for what it defines, and must not start a run."""
    if getattr(_loading, "path", None) is not None:
        raise UsageError(_UNGUARDED.format(_loading.path))


def check_main_is_guarded(names: Iterable[str]) -> None:
    """Raise UsageError if other processes are to load the script that runs, and it would start the run again there.

    Args:
        names: of what other processes load, `file.py:NAME` among others.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or not any(name.rpartition(":")[0] == file for name in names):
        return
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None:
        return
    body: list[ast.stmt] = []
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # it may have been edited since it was started
        body = ast.parse(pathlib.Path(file).read_bytes()).body
    for node in body:
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno) and not is_guard(node):
            raise UsageError(_UNGUARDED.format(file))


def is_guard(node: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test)
    )


def pickle_by_value(module: ModuleType) -> None:
    """Send the classes of a module whole: a child process cannot import it by its name."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)


def describe(error: BaseException) -> str:
    """Return the type, the message and, of a syntax error, the line of an exception."""
    line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}{line}".rstrip(".: ")
