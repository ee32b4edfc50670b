"""JAX environments: rlframe's own, which a name such as `jax:CartPole-v1` selects, and environments of users.

This module does not import JAX, so that a name can be looked up quickly.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from rlframe.errors import UsageError, suggest

# The task names of rlframe's own environments -> (module in this package, class).
_TASKS = {
    "Acrobot-v1": ("classic", "Acrobot"),
    "Breakout-MinAtar": ("breakout", "Breakout"),
    "CartPole-v1": ("classic", "CartPole"),
    "Pendulum-v1": ("classic", "Pendulum"),
    "PositionOnlyCartPole-v1": ("classic", "CartPolePositions"),
}


def jax_tasks() -> list[str]:
    """Return the names of rlframe's own JAX environments, without the prefix `jax:`."""
    return sorted(_TASKS)


def looks_like_jax_env(env: Any) -> bool:
    """Return True for a class or object with `reset(rng)` and `step(rng, state, action)`."""
    step = getattr(env, "step", None)
    if not callable(step) or not callable(getattr(env, "reset", None)):
        return False
    try:
        names = [name for name in inspect.signature(step).parameters if name != "self"]
    except (TypeError, ValueError):  # a function without a signature
        return False
    return names[1:3] == ["state", "action"]


def make_jax_env(name_or_builder: Any, kwargs: Mapping[str, Any]) -> Any:
    """Make a JAX environment from a name with the prefix `jax:`, or from a class or function that returns one.

    Raises:
        UsageError: the name or an argument is unknown, or the callable returns another kind of environment.
    """
    make: Any = name_or_builder
    name = getattr(make, "__name__", str(make))
    if isinstance(make, str):
        known = {f"jax:{task}": place for task, place in _TASKS.items()}
        if make not in known:
            hint = suggest(make, known) or suggest(f"jax:{make}", known)
            raise UsageError(
                f"{make} is not a JAX environment: expected one of {', '.join(known)}, or file.py:Class.{hint}"
            )
        module, cls = known[make]
        make = getattr(importlib.import_module(f"{__name__}.{module}"), cls)
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
