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
from typing import Any, NamedTuple

from rlframe.errors import UsageError, suggest


class _Loaded(NamedTuple):
    """A loaded file or module: its directory, the names of it and of the modules near it that it imports, contents."""

    directory: pathlib.Path
    names: list[str]
    contents: dict[pathlib.Path, bytes]


_loaded: dict[str, _Loaded] = {}  # by the name of the module
_places: dict[str, str] = {}  # directories of the modules of the run, by the name of the outermost package
_lock = threading.Lock()
_runs = 0  # sessions under way in this process
_loading = threading.local()  # `path`: of the file that this thread loads

_UNGUARDED = (
    "{} starts a run whenever it is loaded, and other processes load it for the classes in it. Put the call of "
    'rlframe.train(...) under `if __name__ == "__main__":`, or the classes into another file.'
)
INSTALLED = {"site-packages", "dist-packages"}  # parts of the paths of installed modules


@contextlib.contextmanager
def kept() -> Iterator[None]:
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
        if _runs:
            return
        _places.clear()
        for name, loaded in list(_loaded.items()):
            if any(_content(path) != content for path, content in loaded.contents.items()):
                _forget(name)
        importlib.invalidate_caches()


def places(names: Iterable[Any]) -> dict[str, str]:
    """Return the directories of the modules in names like `module:Id`, by the name of the outermost package."""
    tops = {part.partition(".")[0] for name in names if isinstance(name, str) for part in name.split(":")[:-1]}
    return {top: _places[top] for top in sorted(tops & set(_places))}


def look_in(found: Mapping[str, str]) -> None:
    """Look for modules first where an earlier session or another process found them: see `places`."""
    _places.update({str(top): str(place) for top, place in found.items()})


def import_module(module: str, name: str) -> ModuleType:
    """Import the module of `module:Id`, also from the working directory.

    Raises:
        UsageError: there is none, or it needs a package that is not installed.
    """
    if "" in module.split("."):
        raise UsageError(f"{name!r} should read module:Id or file.py:NAME, and {module!r} is not the name of a module.")
    top, here = module.partition(".")[0], os.getcwd()
    place = next((each for each in (_places.get(top), here) if each is not None and _has(each, top)), None)
    with _lock:
        for each, loaded in list(_loaded.items()):  # another module of this name
            is_other = place is not None and os.path.realpath(place) != os.path.realpath(loaded.directory)
            if each.partition(".")[0] == top and is_other and not _runs:
                _forget(each)
    if place is not None and top not in sys.modules:
        sys.path[:] = [place, *(entry for entry in sys.path if entry != place)]  # as `python -m` does
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"{name!r} needs a package that is not installed here: {error}") from error
        before = f" The run was started with the one in {_places[top]}." if top in _places else ""
        raise UsageError(
            f"There is no module {module!r} for {name!r}: it is not installed, and not in the working directory {here}."
            f"{before}"
        ) from error
    _remember(module)
    return found


def _remember(module: str) -> None:
    """Keep the contents of an imported module and of those near it, if it is the user's."""
    top = sys.modules[module.partition(".")[0]]
    path = next(iter(getattr(top, "__path__", [])), None) or getattr(top, "__file__", None) or ""
    directory = pathlib.Path(path).absolute().parent
    if top.__name__ in sys.stdlib_module_names or not _is_near(sys.modules[module], directory):
        return
    _places[top.__name__] = str(directory)
    if module not in _loaded:
        parts = module.split(".")
        names = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        names += [each for each in _neighbors(module, directory) if each not in names]
        files = [getattr(sys.modules[each], "__file__", None) for each in names]
        paths = [pathlib.Path(file) for file in files if file is not None]
        _loaded[module] = _Loaded(directory, names, {path: _content(path) for path in paths})


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
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` would: it may import its neighbours
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        content = path.read_bytes()
        with _while_loading(path):
            # Not by the loader: it takes bytecode for current if the file was written again within the same second.
            exec(compile(content, path, "exec"), vars(module))
        pickle_by_value(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise UsageError(f"Cannot load {path} for the {what}: {describe(error)}.") from error
    names = [name, *_neighbors(name, path.parent)]
    files = {pathlib.Path(sys.modules[each].__file__ or path) for each in names[1:]}
    _loaded[name] = _Loaded(path.parent, names, {path: content, **{each: _content(each) for each in files}})
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
    for node in ast.parse(_content(pathlib.Path(file))).body:
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno) and not is_guard(node):
            raise UsageError(_UNGUARDED.format(file))


def is_guard(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test)
    )


def _content(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _neighbors(name: str, directory: pathlib.Path) -> list[str]:
    """The modules in `directory` that a module imports, and those that these import."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        module = sys.modules[waiting.pop()]
        for each in _imported(module):
            if each not in found and each != name and _is_near(sys.modules.get(each), directory):
                found.append(each)
                waiting.append(each)
    return found


def _imported(module: ModuleType) -> Iterator[str]:
    """The absolute names that the import statements of a module mention."""
    for node in ast.walk(ast.parse(_content(pathlib.Path(module.__file__ or "")))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[: depth + 1]) for depth in range(len(parts)))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = (module.__package__ or "").split(".")
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            parts = base.split(".")
            yield from (".".join(parts[: depth + 1]) for depth in range(len(parts)))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_near(module: ModuleType | None, directory: pathlib.Path) -> bool:
    file = getattr(module, "__file__", None)
    if module is None or file is None or not file.endswith(".py") or module.__name__.partition(".")[0] == "rlframe":
        return False
    path = pathlib.Path(file)
    return path.is_relative_to(directory) and not INSTALLED & set(path.parts)


def _forget(name: str) -> None:
    for each in _loaded.pop(name).names:
        _remove(each)


def _remove(name: str) -> None:
    module = sys.modules.pop(name, None)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules and getattr(sys.modules[parent], last, None) is module:
        delattr(sys.modules[parent], last)
    cached = getattr(module, "__cached__", None)
    if cached is not None:
        with contextlib.suppress(OSError):
            os.unlink(cached)  # it may count as current: see `load_file`


def pickle_by_value(module: ModuleType) -> None:
    """Send the classes of a module whole: a child process cannot import it by its name."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)


def describe(error: BaseException) -> str:
    """The type, the message and, of a syntax error, the line of an exception."""
    line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}{line}".rstrip(".")
