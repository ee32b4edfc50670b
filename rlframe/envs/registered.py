"""Environments registered with Gymnasium: its own, ours, and those that a user has registered."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import pathlib
import sys
import traceback
from collections.abc import Collection, Mapping
from typing import Any

from rlframe import extras
from rlframe.errors import UsageError, suggest
from rlframe.user_files import import_module

# Ours, registered with Gymnasium when its ids are first read: id -> where its class is, and its time limit.
OURS = {"PositionOnlyCartPole-v1": ("rlframe.envs.position_only:PositionOnlyCartPole", 500)}


def gymnasium_ids() -> Collection[str]:
    """The ids registered with Gymnasium now; none if it is not installed."""
    if not extras.has("gymnasium"):
        return ()
    with extras.needed("An environment of Gymnasium", "gymnasium"):
        import gymnasium
    for name, (entry_point, max_steps) in OURS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point, max_episode_steps=max_steps)
    return gymnasium.registry.keys()


def users_spec(task: str) -> Any:
    """The `gymnasium.EnvSpec` of `Id` or `module:Id` if the user registered it; None for any other name.

    Gymnasium's own ids, ours, and those of plugins that Gymnasium loads by itself are not the user's.
    """
    spec = spec_of(task)
    if spec is None or spec.id in OURS:
        return None
    made_by = spec.entry_point
    source = made_by.partition(":")[0] if isinstance(made_by, str) else getattr(made_by, "__module__", "")
    return None if source.partition(".")[0] in _not_the_users() and not _has_other_limit(spec) else spec


def spec_of(task: str) -> Any:
    """The `gymnasium.EnvSpec` of `Id` or `module:Id`; None if there is none."""
    module, _, env_id = task.rpartition(":")
    if module:
        import_module(module, task)
    if env_id not in gymnasium_ids():
        return None
    import gymnasium

    return gymnasium.registry[env_id]


def restore(spec: Any) -> None:
    """Register an environment as another process had it: a spec from `users_spec`. None does nothing."""
    if spec is not None:
        gymnasium_ids()
        import gymnasium

        gymnasium.registry[spec.id] = spec


def describe(spec: Any) -> str:
    """Name what makes the environment of a spec."""
    made_by = spec.entry_point
    return made_by if isinstance(made_by, str) else f"{made_by.__module__}:{getattr(made_by, '__qualname__', made_by)}"


@functools.lru_cache(maxsize=1)
def _not_the_users() -> frozenset[str]:
    plugins = importlib.metadata.entry_points(group="gymnasium.envs")
    return frozenset({"gymnasium", *(one.value.partition(":")[0].partition(".")[0] for one in plugins)})


def _has_other_limit(spec: Any) -> bool:
    """Return True if the user registered a class of Gymnasium's with a time limit that differs from EnvPool's."""
    if "envpool" not in sys.modules:
        return False
    from envpool.registration import registry

    limit = registry.specs[spec.id][2].get("max_episode_steps") if spec.id in registry.specs else None
    return limit is not None and spec.max_episode_steps not in (None, limit)


def make(task: str, kwargs: Mapping[str, Any]) -> Any:
    """Make the environment `Id` or `module:Id`.

    Raises:
        UsageError: there is none, it does not take these options, or a package that it needs is missing.
    """
    gymnasium_ids()
    import gymnasium

    module, _, env_id = task.rpartition(":")
    try:
        if module:
            import_module(module, task)
        spec = copy.deepcopy(gymnasium.spec(env_id))
        # The pool never steps before a reset; this wrapper and the checker cost 10 to 30% of a CartPole step.
        spec.order_enforce = False
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        if "box2d" in str(error).lower():
            extras.require(f"The environment {task}", "box2d")
        raise UsageError(f"{task!r} needs a package that is not installed here: {error}") from error
    except gymnasium.error.UnregisteredEnv as error:
        raise UsageError(f"Unknown environment {task!r}: {error}{suggest(task, gymnasium_ids())}") from error
    except TypeError as error:
        own = error.__cause__ if isinstance(error.__cause__, TypeError) else error  # Gymnasium raises a copy
        if _is_about_options(own, kwargs):
            raise UsageError(f"{task!r} cannot be made with the options {dict(kwargs)}: {own}") from error
        raise


def _is_about_options(error: TypeError, kwargs: Mapping[str, Any]) -> bool:
    """Return True if the call of a constructor failed, False if a line inside it did."""
    last = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    is_call = last.parts[-3:] == ("gymnasium", "envs", "registration.py")
    return is_call or any(f"unexpected keyword argument {name!r}" in str(error) for name in kwargs)
