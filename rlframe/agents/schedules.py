"""Schedules: values that change during a run, such as a learning rate. And gradient clipping.

The value of a config field that is defined with `scheduled` is one of these:

    3e-4                              a number: constant
    "constant:3e-4"                   constant
    "linear:3e-4:0"                   a straight line from 3e-4 to 0 at the end of the run
    "linear:1:0.05@0.1"               a straight line from 1 to 0.05 after a tenth of the run, then constant
    "linear:0:3e-4@500:0"             a straight line from 0 to 3e-4 after 500 learner steps, then to 0 at the end
    "cosine:3e-4:0"                   half a cosine wave in place of the straight line
    "piecewise:3e-4:1e-4@0.5"         3e-4 in the first half of the run, 1e-4 in the second half
    optax.cosine_decay_schedule(...)  a function: number of learner steps -> value
    "file.py:NAME"                    the name of such a function

`VALUE@TIME` is the value at a time. A time up to 1 is a share of the run; above 1, it is a number of learner steps.
The end of the run is `total_learner_steps` in the agent's config. The programs of rlframe set it.

>>> @dataclasses.dataclass(frozen=True)
... class MyConfig:
...     learning_rate: Scheduled = scheduled(1e-3, above=0)
...     total_learner_steps: int | None = None
>>> float(current(MyConfig("linear:1e-3:0", total_learner_steps=10), "learning_rate", 5))
0.0005
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Union

import jax
import jax.numpy as jnp
import optax

from rlframe.errors import UsageError, suggest
from rlframe.types import Logs

Scheduled = Union[float, str, Callable[[Any], Any]]

# Weight of the next value, for the share of the time that has passed since the previous value.
_WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "constant": jnp.zeros_like,
    "linear": lambda share: share,
    "cosine": lambda share: 0.5 - 0.5 * jnp.cos(jnp.pi * share),
    "piecewise": lambda share: (share >= 1.0).astype(jnp.float32),
}
_FORMS = "constant:VALUE, linear:START:END, cosine:START:END, piecewise:VALUE:VALUE@TIME, or file.py:NAME of a function"
_LOGGED = ("learning_rate", "entropy_cost", "clip_epsilon", "epsilon")
_NAME = re.compile(r".*\.py:[\w.]+|[\w.]+:[A-Za-z_][\w.]*")  # the name of a function


class _Points(NamedTuple):
    """The values of a schedule, and their times."""

    shape: str  # a key of _WEIGHTS
    values: tuple[float, ...]
    times: tuple[float, ...]  # up to 1: share of the run; above 1: learner steps


def scheduled(default: Any, *, above: float | None = None, at_most: float = math.inf) -> Any:
    """Return a dataclass field for a number or schedule, with limits for `check_schedules`.

    Args:
        default: the default of the field. Only a field whose default is None may be None.
        above: a limit that a number, or at least one value of a schedule, must exceed. None means no such limit.
        at_most: the highest allowed value. The lowest is 0.
    """
    return dataclasses.field(default=default, metadata={"scheduled": (above, at_most)})


def scheduled_fields(config: Any) -> list[str]:
    """Return the names of the fields that are defined with `scheduled`. Return [] if `config` is not a dataclass."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return [field.name for field in fields if "scheduled" in field.metadata]


def check_schedules(config: Any) -> None:
    """Raise UsageError if a field that is defined with `scheduled` has no valid number or schedule."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "scheduled" not in field.metadata or callable(value) or (value is None and field.default is None):
            continue
        above, at_most = field.metadata["scheduled"]
        where, values = f"{type(config).__name__}.{field.name}", known_values(config, field.name)
        if any(not 0.0 <= each <= at_most for each in values):  # NaN is also refused
            limits = f"in [0, {at_most:g}]" if at_most < math.inf else "at least 0"
            limits = limits if above is None or isinstance(value, str) else f"above {above:g}"
            raise UsageError(f"{where} must be {limits}, got {value!r}.")
        if above is not None and values and not max(values) > above:
            raise UsageError(f"{where} must be above {above:g}, got {value!r}.")


def known_values(config: Any, name: str) -> tuple[Any, ...]:
    """Return the number in a config's field, or the values in its schedule. Return () for a function.

    Raises:
        UsageError: the field has no valid number or schedule.
    """
    value, where = getattr(config, name), f"{type(config).__name__}.{name}"
    if callable(value) or is_function_name(value):
        return ()
    if isinstance(value, str):
        return _parse(value, where).values
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) != ():
        raise UsageError(
            f"{where} must be a number, or a schedule such as 'linear:3e-4:0' or a function, got {value!r}."
        )
    return (value,)


def is_function_name(value: Any) -> bool:
    """Return True for the name of a function, such as `file.py:NAME`."""
    return isinstance(value, str) and value.partition(":")[0] not in _WEIGHTS and _NAME.fullmatch(value) is not None


def function_names(config: Any) -> dict[str, str]:
    """Return a dict: field -> value, for the fields of a config whose schedule is the name of a function."""
    values = {name: getattr(config, name) for name in scheduled_fields(config)}
    return {name: value for name, value in values.items() if is_function_name(value)}


def current(config: Any, name: str, steps: Any) -> jax.Array:
    """Return [] float32: the value of a config's field after `steps` learner steps.

    Args:
        config: an agent's config. A share of the run needs its field `total_learner_steps`.
        name: the field.
        steps: [] int32 or float32, the number of learner steps.

    Raises:
        UsageError: `total_learner_steps` is None, or a function returns anything else than one number.
    """
    value, where = getattr(config, name), f"{type(config).__name__}.{name}"
    if is_function_name(value):
        raise UsageError(f"{where} is {value!r}, the name of a function. In a script, set it to the function itself.")
    if isinstance(value, str):
        return _interpolate(_parse(value, where), steps, getattr(config, "total_learner_steps", None), where)
    result = jnp.asarray(value(steps) if callable(value) else value, jnp.float32)
    if result.shape != ():
        raise UsageError(f"{where} must return one number for a number of learner steps, got shape {result.shape}.")
    return result


def checked_for_run(config: Any) -> Any:
    """Return the config. Raise UsageError if one of its schedules has no value, such as a time after the run's end."""
    for name in scheduled_fields(config):
        if getattr(config, name) is not None:
            jax.eval_shape(functools.partial(current, config, name), jax.ShapeDtypeStruct((), jnp.int32))
    return config


def current_values(config: Any, steps_of: Callable[[], Any]) -> Logs:
    """Return logs: the learning rate, and the entropy cost, clip range and exploration rate if they change.

    Args:
        config: an agent's config.
        steps_of: returns the number of learner steps. It is called only if there is something to return.
    """
    names = [name for name in scheduled_fields(config) if name in _LOGGED and _is_logged(config, name)]
    return {name: current(config, name, steps_of()) for name in names}


def _is_logged(config: Any, name: str) -> bool:
    value = getattr(config, name)
    return name == "learning_rate" or callable(value) or len(known_values(config, name)) > 1


@functools.cache
def _parse(text: str, where: str) -> _Points:
    """Parse a schedule. Raise UsageError if it is not valid."""
    shape, *parts = text.split(":")
    problem = f"{where}: {text!r} is not a schedule"
    if shape not in _WEIGHTS:
        raise UsageError(f"{problem}. Expected a number, or {_FORMS}.{suggest(shape, _WEIGHTS)}")
    pairs = [part.partition("@") for part in parts]
    try:
        values = [float(value) for value, _, _ in pairs]
        times = [float(time) if at else None for _, at, time in pairs]
    except ValueError:
        values, times = [math.nan], [None]
    if not all(map(math.isfinite, [*values, *(time for time in times if time is not None)])):
        raise UsageError(f"{problem}: each part must be VALUE or VALUE@TIME, with finite numbers. Expected {_FORMS}.")
    wanted = "one value" if shape == "constant" else "two values or more"
    if (len(values) == 1) != (shape == "constant") or not values:
        raise UsageError(f"{problem}: {shape} takes {wanted}, got {len(values)}.")
    if times[0] is not None:
        raise UsageError(f"{problem}: the first value is the value at the start of the run, so it has no @TIME.")
    times[0] = 0.0
    if shape in ("linear", "cosine") and times[-1] is None:
        times[-1] = 1.0
    found = [time for time in times if time is not None]
    if len(found) < len(times):
        raise UsageError(
            f"{problem}: each value after the first needs @TIME. Only the last of linear or cosine may omit it."
        )
    for units in ([t for t in found if t <= 1.0], [0.0, *(t for t in found if t > 1.0)]):
        if any(not before < after for before, after in itertools.pairwise(units)):
            raise UsageError(
                f"{problem}: times must increase and be above 0, got {', '.join(f'{t:g}' for t in found[1:])}."
            )
    return _Points(shape, tuple(values), tuple(found))


def _interpolate(points: _Points, steps: Any, total: int | None, where: str) -> jax.Array:
    """Return [] float32: the value of a schedule after `steps` of `total` learner steps."""
    shares = [time for time in points.times[1:] if time <= 1.0]
    if shares and total is None:
        raise UsageError(
            f"{where} depends on the length of the run, which this config does not have. Set total_learner_steps, the "
            "number of updates of the run, or set a number."
        )
    times = [time * total if total is not None and time <= 1.0 else time for time in points.times]
    if any(not before < after for before, after in itertools.pairwise(times)):
        raise UsageError(
            f"{where}: in a run of {total} learner steps, the times of the schedule do not increase: "
            f"{', '.join(f'{time:g}' for time in times)} learner steps."
        )
    value: Any = points.values[0]
    segments = zip(itertools.pairwise(times), itertools.pairwise(points.values))
    for (begin, end), (before, after) in segments:
        share = jnp.clip((steps - begin) / (end - begin), 0.0, 1.0)
        weight = _WEIGHTS[points.shape](share)
        value = jnp.where(share > 0.0, before * (1.0 - weight) + after * weight, value)
    return jnp.asarray(value, jnp.float32)


def descend_at_rate(config: Any) -> optax.GradientTransformation:
    """Return the last part of an optimizer: it multiplies updates by minus the learning rate.

    The caller counts the learner steps, because an agent can make several gradient steps in one of them:
    `optimizer.update(grads, opt_state, params, steps=steps)`.
    """

    def update(updates: Any, state: Any, params: Any = None, *, steps: Any, **others: Any) -> tuple[Any, Any]:
        rate = current(config, "learning_rate", steps)
        return jax.tree.map(lambda leaf: -rate * leaf, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clip_gradients(
    max_grad_norm: float | None, *optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return an optimizer that first clips the gradients by their global norm. If the maximum is None, do not clip.

    `optimizer` is one optimizer, or its parts in order.
    """
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    return optax.chain(clip, *optimizer)
