"""Names of classes and functions: `file.py:NAME`, `module:NAME`, or a live name.

`object_name` returns the name of an object. The name is saved in `config.json`, and `load_object` loads the object by
its name, in this process or in another one. A live name represents an object that no file defines. Only its own process
can find it. `__main__:NAME` is defined in a notebook or another interactive session. `__live__:NAME` is a lambda, a
local class, a partial or a similar object.

>>> object_name(Maze)  # a class of my_env.py
'/home/me/my_env.py:Maze'
>>> load_object("/home/me/my_env.py:Maze", "environment") is Maze
True
>>> object_name(lambda: Maze(size=3))
'__live__:lambda'
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlframe.errors import UsageError, suggest
from rlframe.user_code.directories import INSTALLED
from rlframe.user_code.files import import_module, is_guard, is_importable, load_file, pickle_by_value

MAIN, LIVE = "__main__", "__live__"  # prefixes of live names

# Live objects of the runs in this process: path of config.json -> option -> object.
_of_runs: dict[str, dict[str, ObjectName]] = {}


class ObjectName(str):
    """A name that also stores its object. A pickle contains only the name: another process loads the object by name."""

    target: Any

    def __new__(cls, name: str, target: Any) -> ObjectName:
        """Create the name of `target`."""
        made = super().__new__(cls, name)
        made.target = target
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)

    def __deepcopy__(self, memo: Any) -> ObjectName:
        return self


# --- load an object by its name


def load_object(name: str, kind: str) -> Any:
    """Load an object by its name.

    Args:
        name: `file.py:Name` (relative to the working directory), `package.module:Name`, or a live name.
        kind: kind of the object, for messages: agent, network, environment.

    Raises:
        UsageError: the file or name does not exist, or the file cannot be imported.
    """
    if isinstance(name, ObjectName):
        return name.target
    if is_live(name):
        return find_live(name, kind)
    source, _, attribute = name.rpartition(":")
    if not is_file_name(name) and not (source and attribute):
        raise UsageError(f"The {kind} {name!r} must have the form file.py:Name.")
    module = load_file(pathlib.Path(source), kind) if source.endswith(".py") else load_module(source, name)
    try:
        return attribute_of(module, attribute)
    except AttributeError:
        names = [each for each in vars(module) if not each.startswith("_")]
        raise UsageError(f"{source} defines no {attribute!r}.{suggest(attribute, names)}") from None


def is_file_name(name: str) -> bool:
    """Return True if a name has the form `file.py:NAME`. Raise UsageError if it is a file without `:NAME`."""
    source, _, attribute = name.rpartition(":")
    if name.endswith(".py") or (source.endswith(".py") and not attribute):
        raise UsageError(f"{name!r} names a file without a class or function: write {_example(name.rstrip(':'))}.")
    return source.endswith(".py")


def _example(file: str) -> str:
    """Return an example such as `file.py:Maze`. If the file cannot be read, return `file.py:NAME`."""
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        defined = (ast.ClassDef, ast.FunctionDef)
        tree = ast.parse(pathlib.Path(file).read_bytes())
        names = [node.name for node in tree.body if isinstance(node, defined) and not node.name.startswith("_")]
        if names:
            return " or ".join(f"{file}:{name}" for name in names[-3:])
    return f"{file}:NAME"


def absolute_name(name: str) -> str:
    """Return `file.py:Name` with an absolute path, which is valid in every directory. Return other names unchanged."""
    source, colon, attribute = name.rpartition(":")
    return f"{os.path.abspath(source)}:{attribute}" if colon and source.endswith(".py") else name


def load_module(module: str, name: str) -> types.ModuleType:
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) == module:
        return main  # `python -m package.module` has already imported the module under the name `__main__`
    return import_module(module, name)


def attribute_of(module: Any, attribute: str) -> Any:
    """Return `Name` or `Outer.Inner` of a module. Raise AttributeError if it does not exist."""
    return functools.reduce(getattr, attribute.split("."), module)


# --- create the name of an object


def object_name(target: Any) -> ObjectName:
    """Return `file.py:NAME` or `module:NAME` for a class or function. If it cannot be loaded again: a live name."""
    module_name, attribute = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    module_name = module_name if isinstance(module_name, str) else ""
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    # a module without a file and a spec was created at run time
    is_temporary = file is None and module_name != MAIN and getattr(module, "__spec__", None) is None
    if module is None or attribute is None or is_temporary or not _is_at(module, attribute, target):
        return ObjectName(f"{LIVE}:{_label(target)}", target)
    if module_name == MAIN:
        if file is None or not _is_defined_in(pathlib.Path(file), attribute, target):
            return ObjectName(f"{MAIN}:{attribute}", target)
        # With `python -m package.module`, the module's name is in `__spec__`.
        module_name = str(getattr(getattr(module, "__spec__", None), "name", MAIN))
    if file is not None and file.endswith(".py") and not _is_in_package(module, module_name, file):
        if module_name != MAIN and not is_importable(module):
            pickle_by_value(module)
        return ObjectName(f"{os.path.abspath(file)}:{attribute}", target)
    return ObjectName(f"{module_name}:{attribute}", target)


def _label(target: Any) -> str:
    """Return a short readable name without characters that are invalid in a path."""
    while isinstance(target, functools.partial):
        target = target.func
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return str(name).rpartition(".")[2].strip("<>")


def _is_at(module: types.ModuleType, attribute: str, target: Any) -> bool:
    try:
        found = attribute_of(module, attribute)
    except AttributeError:
        return False
    # compare methods with `==`, because each access creates a new method object
    return found is target or (inspect.ismethod(target) and found == target)


def _is_in_package(module: types.ModuleType, name: str, file: str) -> bool:
    """Return True if a module belongs to a package or is installed, so that it can be imported by its module name."""
    if "." in name or hasattr(module, "__path__") or name in sys.stdlib_module_names:
        return True
    return bool(INSTALLED & set(pathlib.Path(file).parts))


def _is_defined_in(file: pathlib.Path, attribute: str, target: Any) -> bool:
    """Return True if another process can load an object of `__main__` from a file.

    It cannot load objects from cells of a notebook or from code under `if __name__ == "__main__"`.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    if attribute.partition(".")[0] not in _defined(tree.body):
        return False
    # ignore generated methods: their file name is "<string>"
    files = {code.co_filename for code in _codes(target)} - {"<string>"}
    return not files or any(os.path.abspath(each) == os.path.abspath(file) for each in files)


def _defined(statements: list[ast.stmt]) -> Iterator[str]:
    """Yield the names of the classes, functions and variables that the import of these statements defines."""
    for node in statements:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.If) and is_guard(node):
            yield from _defined(node.orelse)
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, block, []))


def _codes(target: Any) -> Iterator[types.CodeType]:
    """Yield the code objects of a function, or of a class's methods."""
    members: list[Callable[..., Any]] = list(vars(target).values()) if isinstance(target, type) else [target]
    for member in members:
        with contextlib.suppress(ValueError):
            code = getattr(inspect.unwrap(member), "__code__", None)
            if isinstance(code, types.CodeType):
                yield code


# --- live names


def is_live(name: Any) -> bool:
    """Return True if `name` is a live name: the name of an object that only its own process can find."""
    return isinstance(name, str) and name.partition(":")[0] in (MAIN, LIVE)


def find_live(name: str, kind: str) -> Any:
    """Find the object of a live name in this process.

    Args:
        name: the live name.
        kind: kind of the object, for messages: agent, network, environment.

    Raises:
        UsageError: this process does not have the object.
    """
    place, _, label = name.partition(":")
    if place == MAIN:
        with contextlib.suppress(AttributeError):
            return attribute_of(sys.modules[MAIN], label)
    option = "env" if kind == "environment" else kind
    where, again = "the Python process that used it", "Pass"
    if place == MAIN:
        where, again = "a notebook or another interactive session", "Define it in this session, or pass"
    raise UsageError(
        f"The {kind} {label} was defined in {where}, not in a file. {again} the class or function as {option}=... . "
        f'To use the command line, move it to a file, and write "{option}": "/path/to/file.py:{label}" into the '
        "config.json of the run."
    )


def check_no_live_objects(names: Mapping[str, Any], topology: str) -> None:
    """Raise UsageError if a name is live, because the other processes of the topology cannot load the object."""
    for option, name in names.items():
        if not is_live(name):
            continue
        label = name.partition(":")[2].rpartition(".")[2]
        raise UsageError(
            f"{option}={label} is defined in a notebook, in an interactive session or inside a function, and the "
            f"processes of the topology {topology} cannot import it from there. Move it to a file such as "
            f"my_{option}.py, and pass {option}='my_{option}.py:{label}'; or use the topology single_process."
        )


def remember_live_objects(config: str | os.PathLike[str], names: Mapping[str, Any]) -> None:
    """Store the objects of a run that have live names, so that this process can resume the run."""
    live = {option: name for option, name in names.items() if is_live(name) and isinstance(name, ObjectName)}
    _of_runs[os.path.abspath(config)] = live


def live_object(config: str | os.PathLike[str], option: str, saved: Any, given: Mapping[str, Any]) -> Any:
    """Return a value of a config file. Replace a live name by the given object, or by the object of this process."""
    if not is_live(saved):
        return saved
    return given[option] if is_live(given.get(option)) else recall_live_object(config, option, saved)


def recall_live_object(config: str | os.PathLike[str], option: str, name: str) -> str:
    """Return a live name that was saved in a config file, with its object if this process has stored it.

    If a notebook still defines the name, return the name alone: the user may have run the cell again, so that the
    stored object is outdated.
    """
    with contextlib.suppress(UsageError):
        find_live(name, option)
        return name
    return _of_runs.get(os.path.abspath(config), {}).get(option, name)
