"""Find and create the environments in Gymnasium's registry. Gymnasium, rlframe or the user has registered them."""

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

# Environments of rlframe: id -> (entry point, maximum steps). `gymnasium_ids` registers them with Gymnasium.
RLFRAME_ENVS = {"PositionOnlyCartPole-v1": ("rlframe.envs.position_only:PositionOnlyCartPole", 500)}


def gymnasium_ids() -> Collection[str]:
    """Return the ids in Gymnasium's registry. Return no ids if Gymnasium is not installed."""
    if not extras.has("gymnasium"):
        return ()
    with extras.explain_import_error("An environment of Gymnasium", "gymnasium"):
        import gymnasium
    for name, (entry_point, max_steps) in RLFRAME_ENVS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point, max_episode_steps=max_steps)
    return gymnasium.registry.keys()


def user_spec(task: str) -> Any:
    """Return the `gymnasium.EnvSpec` of `Id` or `module:Id` if the user registered it, else None.

    Return None for the default registrations of Gymnasium, rlframe and Gymnasium's plugins. If the user has registered
    one of their ids again with a change, return the user's spec.
    """
    spec = spec_of(task)
    if spec is None or _fields(spec) == _default_fields(spec.id):
        return None
    package = describe(spec).partition(":")[0].partition(".")[0]
    return None if package in _plugins() else spec


def spec_of(task: str) -> Any:
    """Return the `gymnasium.EnvSpec` of `Id` or `module:Id`, or None if it is not registered."""
    module, _, env_id = task.rpartition(":")
    if module:
        import_module(module, task)
    if env_id not in gymnasium_ids():
        return None
    import gymnasium

    return gymnasium.registry[env_id]


def restore(spec: Any) -> None:
    """Register an environment in this process, because the user registered it in another process.

    Args:
        spec: the result of `names.registration` in the user's process; None has no effect.
    """
    if spec is not None:
        gymnasium_ids()
        import gymnasium

        gymnasium.registry[spec.id] = spec


def describe(spec: Any) -> str:
    """Return the entry point of a spec as `module:name`."""
    made_by = spec.entry_point
    if isinstance(made_by, str):
        return made_by
    made_by = getattr(made_by, "func", made_by)  # a `functools.partial` has its function in `func`
    named = made_by if hasattr(made_by, "__qualname__") else type(made_by)
    return f"{named.__module__}:{named.__qualname__}"


def _fields(spec: Any) -> str:
    """Return all fields of a spec as text. Functions appear by name, because their address differs between runs."""
    return repr({**vars(spec), "entry_point": (isinstance(spec.entry_point, str), describe(spec))})


@functools.lru_cache(maxsize=64)
def _default_fields(env_id: str) -> str | None:
    """Return the fields of an id's default registration by Gymnasium or rlframe. Return None for all other ids."""
    if env_id not in _default_registrations():
        return None
    from gymnasium.envs.registration import EnvSpec

    args, kwargs = _default_registrations()[env_id]
    return _fields(EnvSpec(env_id, *args, **kwargs))


@functools.lru_cache(maxsize=1)
def _default_registrations() -> dict[str, tuple[Any, Any]]:
    """Return a dict of id -> arguments with which Gymnasium or rlframe calls `register`.

    The user may have changed the registry. So this function runs Gymnasium's registration code again, with a
    `register` that only records its arguments.
    """
    from gymnasium.envs import registration

    recorded = {
        name: ((entry_point,), {"max_episode_steps": limit}) for name, (entry_point, limit) in RLFRAME_ENVS.items()
    }

    def register(id: str, *args: Any, **kwargs: Any) -> None:
        recorded[id] = args, kwargs

    own = {**vars(registration), "register": register, "load_plugin_envs": lambda: None}

    def import_(name: str, *args: Any) -> Any:
        return types.SimpleNamespace(**own) if name == registration.__name__ else __import__(name, *args)

    loader: Any = importlib.util.find_spec("gymnasium.envs").loader  # type: ignore[union-attr]
    code = loader.get_code("gymnasium.envs")
    exec(code, {"__name__": "gymnasium.envs", "__builtins__": {**vars(builtins), "__import__": import_}})
    return recorded


@functools.lru_cache(maxsize=1)
def _plugins() -> frozenset[str]:
    """Return the packages whose environments Gymnasium registers when it is imported."""
    plugins = importlib.metadata.entry_points(group="gymnasium.envs")
    return frozenset(one.value.partition(":")[0].partition(".")[0] for one in plugins)


def make(task: str, kwargs: Mapping[str, Any]) -> Any:
    """Create the environment `Id` or `module:Id`.

    Raises:
        UsageError: the id is unknown, an option is unknown, or a required package is missing.
    """
    gymnasium_ids()
    import gymnasium

    module, _, env_id = task.rpartition(":")
    try:
        if module:
            import_module(module, task)
        spec = copy.deepcopy(gymnasium.spec(env_id))
        # Omit Gymnasium's two checks, which take 10 to 30 % of a CartPole step. A pool never steps before a reset.
        spec.order_enforce = False
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        if "box2d" in str(error).lower():
            extras.require(f"The environment {task}", "box2d")
        raise UsageError(f"{task!r} needs a package that is not installed here: {error}") from error
    except gymnasium.error.UnregisteredEnv as error:
        raise UsageError(f"Unknown environment {task!r}: {error}{suggest(task, gymnasium_ids())}") from error
    except TypeError as error:
        # Gymnasium raises a copy of the error. The cause of the copy is the original error.
        own = error.__cause__ if isinstance(error.__cause__, TypeError) else error
        if _is_about_options(own, kwargs):
            raise UsageError(f"{task!r} cannot be created with the options {dict(kwargs)}: {own}") from error
        raise


def _is_about_options(error: TypeError, kwargs: Mapping[str, Any]) -> bool:
    """Return True if the constructor rejected its arguments, and False if a line of its body raised the error."""
    last = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    is_call = last.parts[-3:] == ("gymnasium", "envs", "registration.py")
    return is_call or any(f"unexpected keyword argument {name!r}" in str(error) for name in kwargs)
