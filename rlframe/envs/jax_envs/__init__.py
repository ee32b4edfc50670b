"""JAX environments: rlframe's own (`jax:CartPole-v1`), those of suites (`gymnax:CartPole-v1`), and those of users.

This module does not import JAX, so that a name can be looked up quickly.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from rlframe import extras
from rlframe.errors import EnvError, RlframeError, UsageError, suggest

# Libraries of JAX environments. Each one is the prefix of its names, the extra that installs it, and the module in this
# package that adapts it. The module has `tasks()` and `make(task, kwargs)`.
SUITES = ("gymnax", "jumanji")
JAX_PREFIXES = ("jax", *SUITES)

# The task names of rlframe's own environments -> (module in this package, class).
_TASKS = {
    "Acrobot-v1": ("classic", "Acrobot"),
    "Breakout-MinAtar": ("breakout", "Breakout"),
    "CartPole-v1": ("classic", "CartPole"),
    "Pendulum-v1": ("classic", "Pendulum"),
    "PositionOnlyCartPole-v1": ("classic", "CartPolePositions"),
}


def jax_tasks(prefix: str = "jax") -> Collection[str]:
    """Return the names with a prefix in `JAX_PREFIXES`, without the prefix. Return no names if a suite is missing."""
    if prefix == "jax":
        return _TASKS
    return _suite(prefix).tasks() if extras.is_installed(prefix) else ()


def looks_like_jax_env(env: Any) -> bool:
    """Return True for a class or object with `reset(rng)` and `step(rng, state, action)`.

    Raises:
        UsageError: `reset` or `step` has other parameters, and no other kind of environment has these either.
    """
    if not callable(getattr(env, "step", None)) or not callable(getattr(env, "reset", None)):
        return False
    name = env.__name__ if isinstance(env, type) else type(env).__name__
    step, reset = _parameters(env, "step"), _parameters(env, "reset")
    if step is None:
        return False
    if list(step)[1:3] != ["state", "action"]:
        # Pools call `step(action)` of other environments, so `step` must not require a second argument.
        if _num_required(step) < 2:
            return False
        raise UsageError(
            f"{name} has step({', '.join(step)}); a JAX environment needs step(rng, state, action). Other environments "
            "need step(action)."
        )
    if reset is not None and not (_num_required(reset) <= 1 <= len(reset)):
        raise UsageError(f"{name} has reset({', '.join(reset)}); a JAX environment needs reset(rng).")
    return True


def _parameters(env: Any, method: str) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a method of a class or object without `self`, or None if they are unknown."""
    try:
        parameters = dict(inspect.signature(getattr(env, method)).parameters)
    except (TypeError, ValueError):  # a function without a signature
        return None
    if isinstance(env, type) and not isinstance(inspect.getattr_static(env, method), (staticmethod, classmethod)):
        parameters.pop(next(iter(parameters), ""), None)
    return parameters


def _num_required(parameters: Mapping[str, inspect.Parameter]) -> int:
    """Return the number of arguments that a call must have."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(each.default is each.empty and each.kind not in optional for each in parameters.values())


def make_jax_env(name_or_builder: Any, kwargs: Mapping[str, Any]) -> Any:
    """Make a JAX environment from a name with a prefix in `JAX_PREFIXES`, or from a class or function.

    Raises:
        UsageError: the name or an argument is unknown, a suite is not installed or cannot express the environment, or
            the callable returns another kind of environment.
        EnvError: a suite failed to make the environment.
    """
    make: Any = name_or_builder
    name = getattr(make, "__name__", str(make))
    if isinstance(make, str):
        prefix, _, task = make.partition(":")
        if prefix in SUITES:
            extras.require(f"The environment {name}", prefix)
        if prefix not in JAX_PREFIXES or task not in jax_tasks(prefix):
            raise _unknown_name_error(make, prefix)
        if prefix in SUITES:
            return _make_of_suite(prefix, task, kwargs)
        module, cls = _TASKS[task]
        make = getattr(importlib.import_module(f"{__name__}.{module}"), cls)
    if not callable(make):
        raise UsageError(f"Expected a class, such as file.py:Class, got an object of {type(make).__name__}.")
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as error:
        raise UsageError(f"The environment {name} does not accept env_kwargs {dict(kwargs)}: {error}.") from error
    env = make(**kwargs)
    if looks_like_jax_env(env):
        return env
    raise UsageError(
        f"type='jax' needs a JAX environment, with reset(rng) and step(rng, state, action), but {name} returned "
        f"{type(env).__name__}. Use type 'loop', 'thread' or 'process' for other environments."
    )


def check_kwargs(name: str, kwargs: Mapping[str, Any], accepted: Collection[str]) -> None:
    """Raise UsageError if a suite's environment does not accept one of these keyword arguments."""
    for key in kwargs:
        if key not in accepted:
            raise UsageError(
                f"The environment {name} does not accept env_kwargs {dict(kwargs)}: expected "
                f"{', '.join(sorted(accepted)) or 'none'}.{suggest(key, accepted)}"
            )


def _make_of_suite(suite: str, task: str, kwargs: Mapping[str, Any]) -> Any:
    try:
        return _suite(suite).make(task, kwargs)
    except RlframeError:
        raise
    except Exception as error:  # for example, the environment downloads data
        raise EnvError(f"Building {suite}:{task} failed: {type(error).__name__}: {error}") from error


def _suite(suite: str) -> Any:
    with extras.explain_import_error(f"An environment of {suite}", suite):
        return importlib.import_module(f"{__name__}.{suite}")


def _unknown_name_error(name: str, prefix: str) -> UsageError:
    prefix = prefix if prefix in JAX_PREFIXES else "jax"
    known = [f"{prefix}:{task}" for task in jax_tasks(prefix)]
    hint = suggest(name, known) or suggest(f"{prefix}:{name}", known)
    return UsageError(
        f"{name} is not a JAX environment: expected a name such as {known[0]}, or file.py:Class.{hint} `rlframe envs` "
        "lists all names."
    )
