"""Names of environments: `backend` finds the library for a name, and `Builder` creates environments.

A name without a prefix is searched first in the ids that the user registered with Gymnasium, then in EnvPool's tasks,
then in Gymnasium's own ids. A prefix selects the library: `gymnasium:CartPole-v1`, `envpool:CartPole-v1`,
`dm_control:cartpole-swingup`, `jax:CartPole-v1`, `gymnax:CartPole-v1`, `jumanji:Game2048-v1`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlframe import extras
from rlframe.envs import gymnasium_registry
from rlframe.envs.adapters import SingleEnv, env_seed, is_environment, wrap
from rlframe.envs.gymnasium_registry import gymnasium_ids, user_spec
from rlframe.envs.jax_envs import JAX_PREFIXES, jax_tasks, looks_like_jax_env
from rlframe.errors import EnvError, RlframeError, UsageError, suggest
from rlframe.user_code.files import import_module, module_directories, restore_module_directories

PREFIXES = ("gymnasium", "envpool", "dm_control", *JAX_PREFIXES)
CHANGED = ", as your code has registered it"  # added by `describe_backend` if the user registered a Gymnasium class


def envpool_tasks() -> Collection[str]:
    """Return the names of EnvPool's tasks. Return no names if EnvPool is not installed."""
    if not extras.has("envpool"):
        return ()
    with contextlib.suppress(ImportError):
        from gym_notices import notices

        notices.notices.clear()  # EnvPool imports the old package gym; remove the notice that gym would print
    try:
        import envpool
    except ImportError:
        return ()
    return envpool.list_all_envs()


@functools.lru_cache(maxsize=1)
def dm_control_tasks() -> tuple[str, ...]:
    """Return the dm_control tasks as names `domain-task`. Return no names if dm_control is not installed."""
    if not extras.has("dm_control"):
        return ()
    with warnings.catch_warnings(), extras.explain_import_error("An environment of dm_control", "dm_control"):
        warnings.simplefilter("ignore")  # ignore dm_control's warning about a missing display
        from dm_control import suite
    return tuple(f"{domain}-{task}" for domain, task in suite.ALL_TASKS)


def split(name: str) -> tuple[str | None, str]:
    """Return (prefix or None, task), such as ("gymnasium", "CartPole-v1") for "gymnasium:CartPole-v1"."""
    prefix, colon, rest = name.partition(":")
    return (prefix, rest) if colon and prefix in PREFIXES else (None, name)


def backend(name: str) -> str:
    """Return the library for a name, one of `PREFIXES`. Raise UsageError for an unknown name."""
    prefix, task = split(name)
    if prefix is not None:
        return prefix
    if user_spec(task) is not None:
        return "gymnasium"
    if task in envpool_tasks():
        return "envpool"
    if task in gymnasium_ids() or ":" in task:
        return "gymnasium"
    raise unknown_env_error(task, [*envpool_tasks(), *gymnasium_ids()])


# Maximum number of environments for which a loop over Gymnasium's environments is faster than EnvPool. EnvPool wakes a
# thread, which takes 60 us and displaces data from the CPU caches (docs/project/speed.md).
_LOOP_IS_FASTER = {
    "CartPole-v0": 8,
    "CartPole-v1": 8,
    "FrozenLake-v1": 8,
    "MountainCar-v0": 8,
    "MountainCarContinuous-v0": 8,
    "Pendulum-v1": 4,
    "Acrobot-v1": 2,
    "Blackjack-v1": 2,
}


def default_type(name_or_pybuilder: Any, size: int, *, is_sync: bool = True) -> str:
    """Return the fastest type for a pool of `size` environments.

    For a JAX environment, return `jax`. For another environment and a synchronous pool, return `envpool` if EnvPool has
    the task, and `loop` otherwise. Exception: for a small pool with a light task, such as CartPole, return `loop`. For
    an asynchronous pool, return `envpool` if EnvPool has the task, and `process` otherwise.
    """
    if is_jax(name_or_pybuilder):
        if not is_sync:
            raise UsageError(
                f"{describe(name_or_pybuilder)} is a JAX environment. JAX environments step together and cannot be "
                "asynchronous. Leave --async (async_envs) out."
            )
        return "jax"
    if not isinstance(name_or_pybuilder, str) or backend(name_or_pybuilder) != "envpool":
        return "loop" if is_sync else "process"
    if not is_sync:
        return "envpool"
    light = size <= _LOOP_IS_FASTER.get(name_or_pybuilder, 0) and name_or_pybuilder in gymnasium_ids()
    return "loop" if light else "envpool"


def is_jax(name_or_pybuilder: Any) -> bool:
    """Return True for a name of a JAX environment, or a class of JAX environments."""
    if isinstance(name_or_pybuilder, str):
        return split(name_or_pybuilder)[0] in JAX_PREFIXES
    return looks_like_jax_env(name_or_pybuilder)


def describe(name_or_pybuilder: Any) -> str:
    """Return a name, or the name of a callable, for messages."""
    return getattr(name_or_pybuilder, "__name__", None) or repr(name_or_pybuilder)


def list_envs() -> list[tuple[str, str]]:
    """Return a sorted list of (name, library) for all installed environments. Two libraries can have the same name."""
    rows = [(name, "envpool") for name in envpool_tasks()]
    rows += [(name, "gymnasium") for name in gymnasium_ids()]
    rows += [(name, "dm_control") for name in dm_control_tasks()]
    rows += [(f"{prefix}:{task}", prefix) for prefix in JAX_PREFIXES for task in jax_tasks(prefix)]
    return sorted(rows)


def unknown_env_error(name: str, known: Any) -> UsageError:
    """Return the error for an unknown name. The message suggests the most similar name in `known`."""
    if name.startswith("ALE/"):
        atari = name.removeprefix("ALE/")
        if extras.has("ale_py"):
            return UsageError(f"The package ale_py registers {name!r} with Gymnasium: use the name 'ale_py:{name}'.")
        return UsageError(f"{name!r} needs ale-py, which is not installed here. EnvPool has this game as {atari!r}.")
    return UsageError(f"Unknown environment {name!r}.{suggest(name, known)} `rlframe envs` lists all names.")


def envpool_task(name: str) -> str:
    """Return the EnvPool task for a name under `type='envpool'`. Raise UsageError if EnvPool has no such task."""
    prefix, task = split(name)
    if prefix is None and (spec := user_spec(task)) is not None:
        raise UsageError(
            f"{name!r} is {gymnasium_registry.describe(spec)}, which your code has registered with Gymnasium. Use type "
            f"'loop', 'thread' or 'process', or select EnvPool's task with the name 'envpool:{task}'."
        )
    if task in envpool_tasks() and prefix in (None, "envpool"):
        return task
    if not envpool_tasks():
        raise UsageError(f"{name!r} needs EnvPool, which is not installed here: `pip install envpool`.")
    if prefix == "envpool" or task not in gymnasium_ids():
        raise unknown_env_error(task, envpool_tasks())
    raise UsageError(f"EnvPool has no task {name!r}: use type 'loop', 'thread' or 'process'.")


class Builder:
    """A picklable callable (index) that creates one environment of a pool, from a name or a user's callable.

    Args:
      name_or_pybuilder: a name, or a callable that returns one gymnasium or dm_env environment. The callable receives
        `env_kwargs`, and also `seed` if its signature has this argument.
      seed: seed of the pool. The seed of each environment is a hash of (seed, index).
      env_kwargs: keyword arguments for the environment.
      action_repeat: number of steps for each action.
    """

    def __init__(self, name_or_pybuilder: Any, seed: int, env_kwargs: Mapping[str, Any] | None, action_repeat: int = 1):
        self.action_repeat = action_repeat
        self.target = name_or_pybuilder
        self.seed = seed
        self.kwargs = dict(env_kwargs or {})
        if isinstance(name_or_pybuilder, str):
            check_name(name_or_pybuilder)
        elif is_environment(name_or_pybuilder):
            raise UsageError(
                f"{type(name_or_pybuilder).__name__} is a single environment, but a pool needs a new environment for "
                "each index: pass a callable that returns one. `as_pool(env)` makes a pool of this single environment."
            )
        elif not callable(name_or_pybuilder):
            raise UsageError(f"Expected the name of an environment or a callable, got {name_or_pybuilder!r}.")

    def __getstate__(self) -> dict[str, Any]:
        # Include the user's registration of the name, because it does not exist in other processes.
        spec = registration(self.target)
        return {"places": module_directories([self.target]), "registered": spec, **vars(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore_module_directories(state.pop("places"))
        gymnasium_registry.restore(state.pop("registered"))
        vars(self).update(state)

    @property
    def code(self) -> Any:
        """The entry point that Gymnasium has for the name, or the user's callable itself."""
        return getattr(registration(self.target), "entry_point", self.target)

    def seed_of(self, index: int) -> int:
        return env_seed(self.seed, index)

    def __call__(self, index: int) -> SingleEnv:
        """Create the environment `index`.

        Raises:
          UsageError: a name or option is wrong.
          EnvError: the builder raised. The message contains `index`.
        """
        try:
            if isinstance(self.target, str):
                return wrap(_make_named(self.target, self.seed_of(index), self.kwargs))
            takes = takes_seed(self.target) and "seed" not in self.kwargs
            return wrap(self.target(**self.kwargs, **({"seed": self.seed_of(index)} if takes else {})))
        except RlframeError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvError(f"Building environment {index} failed: {type(error).__name__}: {error}") from error


def registration(name: Any) -> Any:
    """Return the `gymnasium.EnvSpec` for a name, or None if Gymnasium has no such name.

    `gymnasium_registry.restore` registers this spec in another process.

    Args:
      name: a name, or a user's callable, for which the result is None.
    """
    if not isinstance(name, str):
        return None
    prefix, task = split(name)
    return gymnasium_registry.spec_of(task) if prefix in (None, "gymnasium") else None


def describe_backend(name: str) -> str:
    """Return a text with a name's library and entry point, such as "EnvPool" or "Gymnasium (my_envs:Maze)"."""
    library = backend(name)
    if library == "gymnasium" and (spec := registration(name)) is not None:
        made_by = gymnasium_registry.describe(spec)
        is_changed = made_by.startswith("gymnasium.") and user_spec(split(name)[1]) is not None
        return f"Gymnasium ({made_by}{CHANGED if is_changed else ''})"
    return {"envpool": "EnvPool", "gymnasium": "Gymnasium", "jax": "rlframe (JAX)"}.get(library, library)


def takes_seed(builder: Callable[..., Any]) -> bool:
    """Return True if a callable has an argument named `seed`."""
    try:
        return "seed" in inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return False


def check_name(name: str) -> None:
    """Raise UsageError if the name cannot create single environments. The types loop, thread and process need these."""
    prefix, task = split(name)
    if prefix in JAX_PREFIXES:
        raise UsageError(f"{name!r} is a JAX environment: use type 'jax' (--env-type jax, or auto).")
    # Ask EnvPool last, because importing EnvPool also imports JAX.
    if prefix == "envpool" or (prefix is None and task not in gymnasium_ids() and task in envpool_tasks()):
        raise UsageError(f"{name!r} is an EnvPool task: use type 'envpool' for it.")
    if prefix == "dm_control":
        if not dm_control_tasks():
            raise extras.missing_extra_error(f"The environment {name}", "dm_control")
        if task not in dm_control_tasks():
            raise unknown_env_error(task, dm_control_tasks())
    elif not gymnasium_ids():
        raise extras.missing_extra_error(f"The environment {name}", "gymnasium")
    elif ":" in task:
        import_module(task.rpartition(":")[0], task)
    elif task not in gymnasium_ids():
        others = [] if prefix == "gymnasium" else envpool_tasks()
        raise unknown_env_error(task, [*gymnasium_ids(), *others])


def _make_named(name: str, seed: int, kwargs: Mapping[str, Any]) -> Any:
    prefix, task = split(name)
    if prefix == "dm_control":
        from dm_control import suite

        domain, _, task_name = task.partition("-")
        task_kwargs = {"random": seed, **kwargs.get("task_kwargs", {})}
        return suite.load(domain, task_name, **{**kwargs, "task_kwargs": task_kwargs})
    return gymnasium_registry.make(task, kwargs)
