"""Load and pickle files and modules that a user names, and reload them for a later run if they have changed.

Modules are searched in the working directory. A run stores the directory of each module for later sessions.
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

_module_directories: dict[str, str] = {}  # top-level package of a user module -> directory that contains the package
_lock = threading.Lock()
_runs = 0  # number of active runs in this process
_loading = threading.local()  # per thread, the attribute `path` is the path of the file that the thread loads

_UNGUARDED = (
    "{} starts a run when it is loaded, but other processes must load it to get its classes. Put the call of "
    'rlframe.train(...) under `if __name__ == "__main__":`, or move the classes to another file.'
)


@contextlib.contextmanager
def keep_files() -> Iterator[None]:
    """Do not reload files within the `with` block, so that a run uses the same versions from start to end."""
    global _runs
    with _lock:
        _runs += 1
    try:
        yield
    finally:
        with _lock:
            _runs -= 1


def forget_changed() -> None:
    """Make later imports load changed files and modules again. During a run in this process, do nothing."""
    with _lock:
        if not _runs:
            _module_directories.clear()
            directories.forget_changed()
            importlib.invalidate_caches()


def module_directories(names: Iterable[Any]) -> dict[str, str]:
    """Return top-level package -> directory for the modules in names such as `module:Id`."""
    tops = {part.partition(".")[0] for name in names if isinstance(name, str) for part in name.split(":")[:-1]}
    return {top: _module_directories[top] for top in sorted(tops & set(_module_directories))}


def restore_module_directories(found: Mapping[str, str]) -> None:
    """Import modules first from these directories, which `module_directories` returned in an earlier session."""
    _module_directories.update({str(top): str(search_directory) for top, search_directory in found.items()})


def import_module(module: str, name: str) -> ModuleType:
    """Import the module in a name such as `module:Id`. Imports also work from the working directory.

    Raises:
        UsageError: The module does not exist, raises an exception, or needs a package that is not installed.
    """
    if "" in module.split("."):
        raise UsageError(f"{name!r} must have the form module:Id or file.py:NAME, but {module!r} is not a module name.")
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
            f" The run was started with the module in {_module_directories[top]}." if top in _module_directories else ""
        )
        raise UsageError(
            f"There is no module {module!r} for {name!r}. It is not installed and not in the working directory {here}."
            f"{before}"
        ) from error
    except UsageError:  # for example, a module of rlframe needs an optional package
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"Cannot import {module!r} for {name!r}: {describe(error)}.") from error
    if directory is not None:
        _module_directories[top] = directory
    return found


def _has(directory: str, top: str) -> bool:
    return os.path.isfile(os.path.join(directory, f"{top}.py")) or os.path.isdir(os.path.join(directory, top))


def load_file(path: pathlib.Path, what: str) -> ModuleType:
    """Import a Python file by its path. Return the existing module if the file is already loaded.

    Raises:
        UsageError: The file does not exist, or its import fails.
    """
    path = pathlib.Path(os.path.abspath(path))
    main = sys.modules["__main__"]
    if (getattr(main, "__file__", None) or "") == str(path):
        return main  # Loading the running script again would start another run.
    if not path.is_file():
        near = suggest(path.name, [each.name for each in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise UsageError(f"There is no file {path} for the {what}.{near}")
    # The module's name depends on the path, so that it differs from the names of other files and libraries.
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
            # Do not use the loader: it runs old bytecode if the file changed within the same second.
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
    """Raise `UsageError` if this thread is loading a user's file, because the import of a file must not start a run."""
    if getattr(_loading, "path", None) is not None:
        raise UsageError(_UNGUARDED.format(_loading.path))


def check_main_is_guarded(names: Iterable[str]) -> None:
    """Raise `UsageError` if other processes will load the running script, and the script would start another run there.

    Args:
        names: Names of the objects that other processes load, such as `file.py:NAME`.
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
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # The script can have changed since its start.
        body = ast.parse(pathlib.Path(file).read_bytes()).body
    for node in body:
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno) and not is_guard(node):
            raise UsageError(_UNGUARDED.format(file))


def is_guard(node: ast.stmt) -> bool:
    """Return True if a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test)
    )


def pickle_by_value(module: ModuleType) -> None:
    """Make cloudpickle send a module's classes by value, because a child process cannot import the module by name."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)


def describe(error: BaseException) -> str:
    """Return the type and message of an exception and, for a syntax error, the line."""
    line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}{line}".rstrip(".: ")


# --- pickling of user code


def pickle_with_code(value: Any, inside: Any = None) -> bytes:
    """Pickle an object. Pickle its code by value if other processes cannot import it, for example code in `__main__`.

    Args:
        value: the object to pickle.
        inside: the part of `value` whose code may come from a file that is no importable module. None means `value`.
    """
    import cloudpickle

    inside = value if inside is None else inside
    modules = {_module_of(inside), _module_of(type(inside))} - {None}
    by_value = [module for module in modules if not is_importable(module)]
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(value)
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _module_of(value: Any) -> Any:
    name = getattr(getattr(value, "func", value), "__module__", None)  # a `functools.partial` has `func`
    return sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None


def is_importable(module: Any) -> bool:
    """Return True if another process with the same `sys.path` imports this module from the same file."""
    path = None
    spec = None
    parts = module.__name__.split(".")
    # Do not use `importlib.util.find_spec`, which also finds modules that were loaded from a file, in `sys.modules`.
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin in (getattr(module, "__file__", None), "built-in", "frozen")


def _find(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None
