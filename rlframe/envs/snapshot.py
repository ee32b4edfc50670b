"""Pickle environments with their state, and pickle code by value if other processes cannot import it."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle

from rlframe.envs.api_checks import wrapper_chain

# Methods with which a class can omit parts of its state from a pickle. For example, Gymnasium's EzPickle pickles only
# the constructor's arguments, and a restored environment would silently be in its initial state.
_HOOKS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


def dump(env: Any) -> bytes | None:
    """Pickle an environment with its state. Return None if the environment or a wrapper cannot be saved exactly."""
    for layer in wrapper_chain(env):
        if any(getattr(type(layer), hook, None) is not getattr(object, hook, None) for hook in _HOOKS):
            return None
    try:
        return dumps(env)
    except Exception:  # pickling sockets, surfaces or native handles can raise any exception
        return None


def dumps(value: Any, inside: Any = None) -> bytes:
    """Pickle an object. Pickle its code by value if other processes cannot import it, for example code in `__main__`.

    Args:
      value: the object to pickle.
      inside: the part of `value` whose code may come from a file that is no importable module. None means `value`.
    """
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
