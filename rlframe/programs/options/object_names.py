"""From a class or function that a user gives in place of a name to its name: `file.py:NAME`, `module:NAME`, or live.

The first two can be loaded again, in any process. `rlframe.programs.options.naming` loads them.
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

from rlframe.envs import snapshot
from rlframe.errors import UsageError
from rlframe.programs.options import naming
from rlframe.programs.options.naming import LIVE, MAIN, ObjectName, attribute_of, find_live, is_live
from rlframe.user_directories import INSTALLED
from rlframe.user_files import is_guard, pickle_by_value

# By the path of a run's config.json, the live objects of runs in this process, by option.
_of_runs: dict[str, dict[str, ObjectName]] = {}

OPTIONS = ("agent", "env", "network", "topology", "engine", "operator", "replay")

_WANTED = {
    "agent": "a subclass of rlframe.Agent",
    "env": "a class of environments, or a function that makes one",
    "network": "a function make_net(observation_spec, action_spec)",
}


def name_of(option: str, given: Any) -> Any:
    """Name what a user gave for one of `OPTIONS`: by a name of ours, `file.py:NAME`, `module:NAME` or a live one.

    Args:
        option: which.
        given: for an agent, environment or network a class or function; a name, in which the path of a file is made
            absolute; None stays None.

    Raises:
        UsageError: it is none of these.
    """
    if given is None or is_live(given) or isinstance(given, ObjectName):
        return given
    if isinstance(given, (str, os.PathLike)):
        return naming.absolute_name(os.fspath(given))
    if option not in _WANTED:
        return given  # refused with its type, as any other option
    if not callable(given) or (option == "env" and _is_one_environment(given)):
        raise _not_nameable(option, given)
    name = object_name(given)
    tables = {"agent": naming.AGENTS, "network": naming.NETWORKS}
    ours = {where: each for each, where in tables.get(option, {}).items()}
    return ours.get(name, name)


def name_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with names where `name_of` gives any."""
    return {option: name_of(option, value) if option in OPTIONS else value for option, value in values.items()}


def with_given(saved: dict[str, Any], config: pathlib.Path, given: Mapping[str, Any], replace: bool) -> dict[str, Any]:
    """Return the fields of a saved config with names that hold objects: those given, or those of a run in this process.

    Args:
        saved: by field.
        config: the path of the config.
        given: by option, as for `name_of`; in place of live names.
        replace: whether in place of others as well.
    """
    values = dict(saved)
    for field, name in saved.items():
        option = "topology" if field == "name" else field
        wanted = name_of(option, given.get(option)) if option in OPTIONS else None
        if wanted is not None and (replace or is_live(name) or wanted == name):
            values[field] = wanted
        elif option in OPTIONS and is_live(name):
            values[field] = recall(config, option, name)
    return values


def check_can_leave(names: Mapping[str, Any], topology: str) -> None:
    """Raise UsageError if an object is live: a topology of several processes cannot send it by its name."""
    for option, name in names.items():
        if not is_live(name):
            continue
        label = name.partition(":")[2].rpartition(".")[2]
        raise UsageError(
            f"{option}={label} is defined in a notebook, in an interactive session or inside a function, and the "
            f"processes of the topology {topology} cannot import it from there. Move it to a file, as in "
            f"my_{option}.py, and give {option}='my_{option}.py:{label}'; or use the topology single_process."
        )


def _is_one_environment(given: Any) -> bool:
    return not isinstance(given, type) and hasattr(given, "reset") and hasattr(given, "step")


def _not_nameable(option: str, given: Any) -> UsageError:
    kind = type(given).__name__
    wanted = f"{option} takes {_WANTED[option]}, or its name, as file.py:NAME"
    if option == "env" and _is_one_environment(given):
        spec = getattr(given, "spec", None)
        instead = kind if spec is None else repr(spec.id)
        return UsageError(
            f"{wanted}; got one environment, of {kind}. A run makes several of them: give env={instead}, or a function "
            "that makes one, as in env=lambda: ..."
        )
    if option == "agent" and hasattr(given, "config_cls"):
        return UsageError(f"{wanted}; got one agent. Give agent={kind}, and the fields of its config as options.")
    if option == "network" and hasattr(given, "init") and hasattr(given, "apply"):
        return UsageError(
            f"{wanted}; got a network, of {kind}. Give a function that returns it: network=lambda observation_spec, "
            "action_spec: ..."
        )
    if option == "network" and hasattr(given, "build"):
        return UsageError(f"{wanted}; got the config of one. Give its name, as in network='mlp', network_config=...")
    return UsageError(f"{wanted}; got {given!r}.")


# --- the name of an object


def object_name(target: Any) -> ObjectName:
    """Name a class, function or other callable: `file.py:NAME` or `module:NAME` if that finds it again, else live."""
    module_name, attribute = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    module_name = module_name if isinstance(module_name, str) else ""
    module = sys.modules.get(module_name)
    if module is None or attribute is None or not _is_at(module, attribute, target):
        return ObjectName(f"{LIVE}:{_label(target)}", target)
    file = getattr(module, "__file__", None)
    if file is None and module_name != MAIN and getattr(module, "__spec__", None) is None:  # made by hand
        return ObjectName(f"{LIVE}:{_label(target)}", target)
    if module_name == MAIN:
        if file is None or not _is_defined_in(pathlib.Path(file), attribute, target):
            return ObjectName(f"{MAIN}:{attribute}", target)
        module_name = str(getattr(getattr(module, "__spec__", None), "name", MAIN))  # of `python -m package.module`
    if file is not None and file.endswith(".py") and not _is_in_package(module, module_name, file):
        if module_name != MAIN and not snapshot.is_importable(module):
            pickle_by_value(module)
        return ObjectName(f"{os.path.abspath(file)}:{attribute}", target)
    return ObjectName(f"{module_name}:{attribute}", target)


# --- the live objects of runs


def remember(config: str | os.PathLike[str], names: Mapping[str, Any]) -> None:
    """Remember the live objects of a run, by option, as long as this process runs."""
    live = {option: name for option, name in names.items() if is_live(name) and isinstance(name, ObjectName)}
    _of_runs[os.path.abspath(config)] = live


def recall(config: str | os.PathLike[str], option: str, name: str) -> str:
    """Return a saved live name with its object, if the run was in this process; else the name alone.

    What a notebook defines now comes first: a cell may have been run again.
    """
    with contextlib.suppress(UsageError):
        find_live(name, option)
        return name
    return _of_runs.get(os.path.abspath(config), {}).get(option, name)


# --- where an object is defined


def _label(target: Any) -> str:
    """A short name for a reader, which may also be part of a path."""
    while isinstance(target, functools.partial):
        target = target.func
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return str(name).rpartition(".")[2].strip("<>")


def _is_at(module: types.ModuleType, attribute: str, target: Any) -> bool:
    try:
        found = attribute_of(module, attribute)
    except AttributeError:
        return False
    return found is target or (inspect.ismethod(target) and found == target)  # a method is made anew each time


def _is_in_package(module: types.ModuleType, name: str, file: str) -> bool:
    """Whether a module is part of a package or installed, so that its name is better than its file's."""
    if "." in name or hasattr(module, "__path__") or name in sys.stdlib_module_names:
        return True
    return bool(INSTALLED & set(pathlib.Path(file).parts))


def _is_defined_in(file: pathlib.Path, attribute: str, target: Any) -> bool:
    """Whether loading the file of `__main__` in another process defines the object: not a cell, not under its guard."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    if attribute.partition(".")[0] not in _defined(tree.body):
        return False
    files = {code.co_filename for code in _codes(target)} - {"<string>"}  # that of generated methods
    return not files or any(os.path.abspath(each) == os.path.abspath(file) for each in files)


def _defined(statements: list[ast.stmt]) -> Iterator[str]:
    """The names of classes, functions and variables that statements define if their file is not `__main__`."""
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
    """The code of a function, or of a class's methods."""
    members: list[Callable[..., Any]] = list(vars(target).values()) if isinstance(target, type) else [target]
    for member in members:
        with contextlib.suppress(ValueError):
            code = getattr(inspect.unwrap(member), "__code__", None)
            if isinstance(code, types.CodeType):
                yield code
