"""Load the modules that a user's file imports from its own directory. Reload all modules of a directory together.

Two directories can have modules of the same name, and each file must import the module in its own directory. For
example, `a/agent.py` and `b/env.py` both contain `import helpers`. `loading("a", ...)` puts `a` at the front of
`sys.path` and records `a/helpers.py` in the `_Directory` of `a`. `loading("b", ...)` removes this module from
`sys.modules`, so that `b/env.py` imports `b/helpers.py`. If a file of a directory has changed, `forget_changed` removes
all modules of the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType

INSTALLED = {"site-packages", "dist-packages"}  # names of directories with installed packages
_STDLIB = {os.path.dirname(os.__file__), os.path.dirname(os.path.realpath(os.__file__))}


@dataclasses.dataclass
class _Directory:
    """The user's modules in a directory and its subdirectories."""

    script_modules: dict[str, ModuleType] = dataclasses.field(default_factory=dict)  # imported by the running script
    loaded_modules: dict[str, ModuleType] = dataclasses.field(default_factory=dict)  # imported by loaded files
    # path of a file -> content at the time of loading
    contents: dict[str, bytes] = dataclasses.field(default_factory=dict)
    script_changed: bool = False  # True if a file of `script_modules` has changed since its import


_directories: dict[str, _Directory] = {}  # path of a directory, with symbolic links resolved -> its modules


def find_directory(top: str, search_directory: str | None) -> str | None:
    """Return the directory of a user's module or package, or None if the module does not exist or is installed.

    Args:
        top: Name of the module, without dots.
        search_directory: Directory that contains a module of this name. It is ignored if the script has imported
            such a module.
    """
    module = sys.modules.get(top)
    if search_directory is not None and (module is None or _is_loaded(module)):
        return os.path.realpath(search_directory)
    spec = getattr(module, "__spec__", None) if module is not None else importlib.util.find_spec(top)
    folder = next(iter(getattr(spec, "submodule_search_locations", None) or getattr(module, "__path__", [])), None)
    file = folder or getattr(spec, "origin", None) or getattr(module, "__file__", None)
    if not file or not _is_user_module(top, os.path.join(folder, "__init__.py") if folder else file):
        return None
    return os.path.dirname(_real_path(file))


def is_current(path: str, name: str) -> bool:
    """Return True if `import name` would return the loaded module of this directory, in its current version."""
    directory, module = _directories.get(path, _Directory()), sys.modules.get(name)
    is_own = not directory.script_changed and _is_in(directory.script_modules, name, module)
    return is_own or _is_in(directory.loaded_modules, name, module)


def import_path() -> list[str]:
    """Return the `sys.path` for a child process, so that the child finds the modules that this process has imported.

    In an interactive session, `sys.path` contains the working directory as "", and its path can change after an import.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    if "" in sys.path:
        files = [file for name, (_, file) in _user_modules().items() if "." not in name]
        path += [os.path.dirname(file.removesuffix(f"{os.sep}__init__.py")) for file in files]
    return list(dict.fromkeys(path))


@contextlib.contextmanager
def loading(
    path: str, name: str, search_directory: str | None, *, restore_shadowed: bool
) -> Iterator[dict[str, bytes]]:
    """Load a file or module together with the modules that it imports from its directory.

    Args:
        path: Directory of the file or module, with symbolic links resolved.
        name: Name of the module.
        search_directory: Directory to insert at the front of `sys.path`, or None.
        restore_shadowed: Afterwards, put modules of the same names from other directories back into `sys.modules`.

    Yields:
        A dict from the path of each loaded file to its content.
    """
    before = _user_modules()
    directory = _directories.setdefault(path, _Directory())
    if not directory.loaded_modules:
        found = {each: module for each, (module, file) in before.items() if _is_under(file, path)}
        directory.script_modules.update({each: module for each, module in found.items() if not _is_loaded(module)})
        directory.contents.update({before[each][1]: _content(before[each][1]) for each in directory.script_modules})
    removed = {}
    for each, (module, file) in before.items():
        if _is_shadowed(each, file, path) or (
            directory.script_changed and _is_in(directory.script_modules, each, module)
        ):
            removed[each] = module
            _remove_module(each)
    if directory.script_changed:
        directory.script_modules.pop(name, None)  # later imports of the module by its name must return the new version
    for each in removed.keys() & directory.loaded_modules.keys():
        _add_module(each, directory.loaded_modules[each])
    if search_directory is not None and name.partition(".")[0] not in sys.modules:
        # `python file.py` also puts the file's directory at the front.
        sys.path[:] = [
            search_directory,
            *(entry for entry in sys.path if entry != search_directory),
        ]
    try:
        yield directory.contents
    finally:
        for each, (module, file) in _user_modules().items():
            is_new = each not in before or before[each][0] is not module
            if is_new and _is_under(file, path):
                directory.loaded_modules[each] = module
                directory.contents.setdefault(file, _content(file))
        for each, module in removed.items():
            if restore_shadowed or (not _is_loaded(module) and each != name):
                _add_module(each, module)


def forget_changed() -> None:
    """Remove the loaded files and modules of each directory in which a file has changed."""
    users = _user_modules()
    changed = [
        path
        for path, directory in _directories.items()
        if any(_content(file) != was for file, was in directory.contents.items())
        or (
            directory.loaded_modules
            and any(_is_late_import(name, module, file, path) for name, (module, file) in users.items())
        )
    ]
    for path in changed:
        for each in _directories:
            if each == path or _is_under(each, path):
                _forget(each)


def _forget(path: str) -> None:
    directory, users = _directories[path], _user_modules()
    late = {name: module for name, (module, file) in users.items() if _is_late_import(name, module, file, path)}
    for name, module in {**late, **directory.loaded_modules}.items():
        if sys.modules.get(name) is module:
            _remove_module(name)
    for module in (*late.values(), *directory.loaded_modules.values(), *directory.script_modules.values()):
        if (cached := getattr(module, "__cached__", None)) is not None:
            with contextlib.suppress(OSError):
                os.unlink(cached)  # Python would use old bytecode if the file has changed within one second.
    own = {_real_path(module.__file__ or "") for module in directory.script_modules.values()}
    directory.script_changed |= any(_content(file) != directory.contents.get(file) for file in own)
    directory.contents = {} if directory.script_changed else {file: directory.contents[file] for file in own}
    directory.loaded_modules = {}


def _is_late_import(name: str, module: ModuleType, file: str, path: str) -> bool:
    """Return True if loaded code imported the module later, for example in a function, and not while it was loaded."""
    if not _is_under(file, path) or _is_loaded(module) or _is_in(_directories[path].script_modules, name, module):
        return False
    of_script = list(vars(sys.modules["__main__"]).values())
    return not any(
        each is module or (isinstance(each, (type, FunctionType)) and each.__module__ == name) for each in of_script
    )


def _is_loaded(module: ModuleType) -> bool:
    return any(module is each for directory in _directories.values() for each in directory.loaded_modules.values())


def _is_in(modules: Mapping[str, ModuleType], name: str, module: ModuleType | None) -> bool:
    return module is not None and modules.get(name) is module


def _is_shadowed(name: str, file: str, path: str) -> bool:
    """Return True if an import of this name in `path` would return a module other than `file`."""
    top = os.path.join(path, name.partition(".")[0])
    if file == f"{top}.py" or file.startswith(f"{top}{os.sep}"):
        return False
    whole = os.path.join(path, *name.split("."))
    return any(map(os.path.isfile, (f"{top}.py", os.path.join(top, "__init__.py"), f"{whole}.py")))


def _user_modules() -> dict[str, tuple[ModuleType, str]]:
    """Return the imported modules of the user: name -> (module, file). Leave out installed and standard modules."""
    found = {}
    for name, module in list(sys.modules.items()):
        # `isinstance` would accept cffi's objects, which fake `__class__`.
        if not issubclass(type(module), ModuleType):
            continue
        file = object.__getattribute__(module, "__dict__").get("__file__")  # getattr can import a lazy module
        if isinstance(file, str) and _is_user_module(name, file):
            found[name] = (module, _real_path(file))
    return found


@functools.cache
def _is_user_module(name: str, file: str) -> bool:
    if name in ("__main__", "__mp_main__") or name.partition(".")[0] == "rlframe" or not file.endswith(".py"):
        return False
    return INSTALLED.isdisjoint(file.split(os.sep)) and not any(_is_under(file, path) for path in _STDLIB)


def _is_under(file: str, path: str) -> bool:
    return file.startswith(path.rstrip(os.sep) + os.sep)


def _real_path(file: str) -> str:
    """Return the file's path. Resolve symbolic links in its directory, but not a symbolic link to the file itself."""
    directory, name = os.path.split(os.path.abspath(file))
    return os.path.join(os.path.realpath(directory), name)


def _content(file: str) -> bytes:
    try:
        return pathlib.Path(file).read_bytes()
    except OSError:
        return b""


def _remove_module(name: str) -> None:
    module = sys.modules.pop(name)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules and getattr(sys.modules[parent], last, None) is module:
        delattr(sys.modules[parent], last)


def _add_module(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
