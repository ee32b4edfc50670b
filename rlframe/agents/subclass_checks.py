"""Checks of `Agent` subclasses: every public method has a caller, and the constructor accepts the given arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from rlframe.errors import UsageError, suggest


def check_methods(base: type, cls: type) -> None:
    """Raise UsageError if `cls` misspells the name of a method of `base`, or if its method takes other arguments."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            _check_method(base, cls, name, member)


def _check_method(base: type, cls: type, name: str, member: Any) -> None:
    hooks = {hook: method for hook, method in vars(base).items() if inspect.isfunction(method)}
    if name not in vars(base):
        near = difflib.get_close_matches(name, vars(base), n=1, cutoff=0.9)
        if near:
            raise UsageError(
                f"{cls.__name__} defines {name}, which is never called. The method of an Agent is {near[0]}"
                f"{_arguments(hooks.get(near[0]))}. If this is a different method, give it a different name, or a name "
                "that starts with an underscore."
            )
    elif name in hooks and inspect.isfunction(member):
        wanted, given = (list(inspect.signature(function).parameters)[1:] for function in (hooks[name], member))
        try:
            inspect.signature(member).bind(None, *wanted)
            fits = given == wanted or set(given) != set(wanted)  # The same names in a different order are an error.
        except TypeError:
            fits = False
        if not fits:
            raise UsageError(
                f"{cls.__name__}.{name} takes ({', '.join(given)}); it is called with ({', '.join(wanted)})."
            )


def _arguments(hook: Any) -> str:
    return f"({', '.join(list(inspect.signature(hook).parameters)[1:])})" if hook is not None else ""


def check_arguments(cls: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError for a named argument that the constructor of an agent's class does not accept."""
    accepted = inspect.signature(cls.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if kwargs.get("net_factory") is not None and not takes_all and "net_factory" not in accepted:
        raise UsageError(
            f"{cls.__name__} makes its own network and reads no net_factory. Either leave --network out, or add the "
            "parameter net_factory to the constructor and build the network from it."
        )
    for name in kwargs:
        if name not in accepted and not takes_all:
            raise UsageError(f"{cls.__name__} has no argument {name}.{suggest(name, accepted)}")
