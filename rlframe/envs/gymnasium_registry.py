"""Environments registered with Gymnasium: its own, ours, and those that a user has registered."""

from __future__ import annotations

import builtins
import copy
import functools
import importlib.metadata
import importlib.util
import pathlib
import traceback
import types
from collections.abc import Collection, Mapping
from typing import Any

from rlframe import extras
from rlframe.errors import UsageError, suggest
from rlframe.user_code.files import import_module

# Ours, registered with Gymnasium when its ids are first read: id -> where its class is, and its time limit.
RLFRAME_ENVS = {"PositionOnlyCartPole-v1": ("rlframe.envs.position_only:PositionOnlyCartPole", 500)}


def gymnasium_ids() -> Collection[str]:
    """The ids registered with Gymnasium now; none if it is not installed."""
    if not extras.has("gymnasium"):
        return ()
    with extras.explain_import_error("An environment of Gymnasium", "gymnasium"):
        import gymnasium
    for name, (entry_point, max_steps) in RLFRAME_ENVS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point, max_episode_steps=max_steps)
    return gymnasium.registry.keys()


def user_spec(task: str) -> Any:
    """The `gymnasium.EnvSpec` of `Id` or `module:Id` if the user registered it; None for any other name.

    Gymnasium's own ids, ours, and those of plugins that Gymnasium loads by itself are not the user's, unless they were
    registered again with anything changed.
    """
    spec = spec_of(task)
    if spec is None or _fields(spec) == _default_fields(spec.id):
        return None
    package = describe(spec).partition(":")[0].partition(".")[0]
    return None if package in _plugins() else spec


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
    """Register an environment as another process had it: a spec from `user_spec`. None does nothing."""
    if spec is not None:
        gymnasium_ids()
        import gymnasium

        gymnasium.registry[spec.id] = spec


def describe(spec: Any) -> str:
    """Name what makes the environment of a spec."""
    made_by = spec.entry_point
    if isinstance(made_by, str):
        return made_by
    made_by = getattr(made_by, "func", made_by)  # of a partial
    named = made_by if hasattr(made_by, "__qualname__") else type(made_by)
    return f"{named.__module__}:{named.__qualname__}"


def _fields(spec: Any) -> str:
    """All that a spec says, in words: a function is another object where Gymnasium's code has run again."""
    return repr({**vars(spec), "entry_point": (isinstance(spec.entry_point, str), describe(spec))})


@functools.lru_cache(maxsize=64)
def _default_fields(env_id: str) -> str | None:
    """The fields of an id as Gymnasium, or rlframe, registers it; None for any other id."""
    if env_id not in _default_registrations():
        return None
    from gymnasium.envs.registration import EnvSpec

    args, kwargs = _default_registrations()[env_id]
    return _fields(EnvSpec(env_id, *args, **kwargs))


@functools.lru_cache(maxsize=1)
def _default_registrations() -> dict[str, tuple[Any, Any]]:
    """Run what Gymnasium runs when it is imported, but note what is registered: its registry may be changed by now."""
    from gymnasium.envs import registration

    noted = {
        name: ((entry_point,), {"max_episode_steps": limit}) for name, (entry_point, limit) in RLFRAME_ENVS.items()
    }

    def register(id: str, *args: Any, **kwargs: Any) -> None:
        noted[id] = args, kwargs

    own = {**vars(registration), "register": register, "load_plugin_envs": lambda: None}

    def import_(name: str, *args: Any) -> Any:
        return types.SimpleNamespace(**own) if name == registration.__name__ else __import__(name, *args)

    loader: Any = importlib.util.find_spec("gymnasium.envs").loader  # type: ignore[union-attr]
    code = loader.get_code("gymnasium.envs")
    exec(code, {"__name__": "gymnasium.envs", "__builtins__": {**vars(builtins), "__import__": import_}})
    return noted


@functools.lru_cache(maxsize=1)
def _plugins() -> frozenset[str]:
    """The packages whose environments Gymnasium registers when it is imported."""
    plugins = importlib.metadata.entry_points(group="gymnasium.envs")
    return frozenset(one.value.partition(":")[0].partition(".")[0] for one in plugins)


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
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
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
