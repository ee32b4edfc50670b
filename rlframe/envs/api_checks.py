"""Check the values that one environment returns from `reset` and `step`: number of values, rewards, flags and spaces.

Many environments still use the API of Gym before version 0.26, in which `reset` and `step` return other values. The
error messages include the fix.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from rlframe.envs.codec import FLOAT32_MAX_SQUARED, as_array
from rlframe.envs.layout import Layout
from rlframe.errors import UsageError

FLOAT32_MAX = float(np.finfo(np.float32).max)  # rewards and discounts are float32
_OLD = "This looks like the API of Gym before 0.26."


class EnvApiError(UsageError):
    """An environment returned an invalid value. The pool adds the environment to the message, as in "Environment 3"."""


def number(name: str, value: Any) -> float:
    """Return `value` as a float. Raise EnvApiError unless it is one real number that fits in float32."""
    real = value
    if not isinstance(value, (float, int)):
        array = as_array(value)
        if array.ndim or array.dtype.kind not in "biuf":
            raise EnvApiError(f"gave {value!r} as its {name}: expected one number.")
        real = array.item()
    if abs(real) > FLOAT32_MAX and abs(real) != float("inf"):  # `checks.FiniteCheck` handles infinity and NaN
        raise EnvApiError(
            f"gave {reprlib.repr(value)} as its {name}: expected at most {FLOAT32_MAX:.3g}, the limit of float32."
        )
    return float(real)


def as_numbers(values: list[Any]) -> np.ndarray | None:
    """Return the values as an array [n], or None if the caller must check each value with `number`."""
    array = as_array(values)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        return None
    if array.dtype.kind == "f":
        wide = array.astype(np.float64, copy=False)
        return array if wide.dot(wide) < FLOAT32_MAX_SQUARED else None
    return array


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool. Raise EnvApiError unless it is True, False, 1 or 0."""
    if type(value) is bool or type(value) is np.bool_:
        return bool(value)
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "biuf" or array.item() not in (0, 1):
        raise EnvApiError(f"gave {value!r} as {name!r}: expected True or False.")
    return bool(array.item())


def check_gymnasium_step(result: Any) -> None:
    """Raise EnvApiError unless `step` returned five values."""
    if isinstance(result, (tuple, list)) and len(result) == 5:
        return
    received = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
    old = f" {_OLD} Replace `done` by `terminated, truncated`." if received == "4 values" else ""
    raise EnvApiError(
        f"returned {received} from step(): expected (observation, reward, terminated, truncated, info).{old}"
    )


def check_gymnasium_reset(result: Any) -> None:
    """Raise EnvApiError unless `reset` returned an observation and a dict."""
    if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], Mapping):
        return
    received, old = type(result).__name__, f" {_OLD}"
    if isinstance(result, (tuple, list)) and len(result) == 2:
        received = f"(observation, {reprlib.repr(result[1])})"
    elif isinstance(result, tuple):
        received, old = f"{len(result)} value{'' if len(result) == 1 else 's'}", ""
    raise EnvApiError(
        f"returned {received} from reset(): expected (observation, info) with a dict as info.{old} "
        "Return `observation, {}`."
    )


def check_info(info: Any) -> None:
    """Raise EnvApiError unless the info of a step is a dict or None."""
    if info is not None and not isinstance(info, Mapping):
        raise EnvApiError(
            f"gave {reprlib.repr(info)} as the info of a step: expected a dict. Return {{}} if there is none."
        )


def check_takes_seed(env: Any, error: TypeError) -> None:
    """Raise EnvApiError if the reason for `error` is a `reset` without `seed`, in `env` or in an inner environment."""
    for layer in wrapper_chain(env) if "keyword argument" in str(error) else ():
        if not _takes(layer.reset, "seed"):
            raise EnvApiError(
                f"has a reset() without `seed` ({type(layer).__name__}): expected "
                f"`def reset(self, *, seed=None, options=None)`. {_OLD} In the old API, env.seed() took the seed."
            )


def check_dm_env_result(call: str, result: Any) -> None:
    """Raise EnvApiError unless `reset` or `step` returned a `dm_env.TimeStep`. Only `reset` may return FIRST."""
    if type(result) is not dm_env.TimeStep and not (
        isinstance(result, tuple) and len(result) == 4 and hasattr(result, "step_type")
    ):
        raise EnvApiError(f"returned {type(result).__name__} from {call}(): expected a dm_env.TimeStep.")
    if call == "step" and int(result.step_type) == 0:
        raise EnvApiError("returned FIRST from step() in the middle of an episode: expected MID or LAST.")


def discount(value: Any) -> float:
    """Return a discount as a float. Raise EnvApiError if it is not a number, or is a finite number outside [0, 1].

    `checks.FiniteCheck` rejects NaN and infinity.
    """
    real = number("discount", value)
    if real < 0.0 or 1.0 < real <= FLOAT32_MAX:
        raise EnvApiError(f"gave {value!r} as its discount: expected a number from 0 to 1.")
    return real


def check_is_gymnasium(space: Any, path: str) -> None:
    """Raise UsageError if a space, or a part of it, is from the old package gym instead of Gymnasium."""
    if type(space).__module__.partition(".")[0] == "gym":
        raise UsageError(
            f"The space of {path!r}, {space}, comes from the old package gym: expected gymnasium.spaces."
            f"{type(space).__name__}. Replace `import gym` by `import gymnasium as gym` in the environment."
        )
    parts = getattr(space, "spaces", ())
    for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        check_is_gymnasium(part, f"{path}.{key}")


def check_not_empty(spec: Any, path: str) -> None:
    """Raise UsageError if a spec has no leaf, or if a leaf has no values."""
    leaves: list[specs.Array] = Layout(spec).leaves
    if not leaves:
        raise UsageError(f"The space of {path!r} is empty: expected at least one value in it.")
    for leaf in leaves:
        if 0 in leaf.shape:
            raise UsageError(
                f"The space of {leaf.name!r} has the shape {leaf.shape}, which holds no value. Remove this space, or "
                "use a shape with at least one value."
            )


def check_image(name: str, image: Any) -> None:
    """Raise UsageError unless an image of the environment `name` is an RGB array, uint8 [H, W, 3]."""
    is_array = isinstance(image, np.ndarray)
    if not (is_array and image.ndim == 3 and image.shape[-1] == 3 and image.dtype == np.uint8):
        received = f"{image.dtype} of shape {image.shape}" if is_array else type(image).__name__
        raise UsageError(
            f"{name} must render to an RGB array, uint8 of shape (height, width, 3), but it renders to {received}."
        )


def wrapper_chain(env: Any) -> Iterator[Any]:
    """Yield an environment and its inner environments, from the outside to the inside.

    An inner environment is an environment in any attribute of another environment.
    """
    found, seen = [env], set()
    for one in found:
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            parts = list(getattr(one, "__dict__", {}).values())
            found += [part for part in parts if _is_stepped(type(part))]  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _is_stepped(cls: type) -> bool:
    """Return True for a class with `reset` and `step(action)`: its objects have a state.

    In Brax, `step` also takes the state. Several environments may share an object of such a class.
    """
    if not hasattr(cls, "reset") or not hasattr(cls, "step"):
        return False
    try:
        inspect.signature(cls.step).bind("self", "action")
    except TypeError:
        return False
    except ValueError:  # a C function may have no signature
        pass
    return True


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
