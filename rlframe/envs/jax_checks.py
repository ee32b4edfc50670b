"""Check a JAX environment before its first step. JAX traces one reset and one step, which takes milliseconds."""

from __future__ import annotations

import functools
import logging
import os
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.envs.api_checks import check_image
from rlframe.envs.codec import Codec
from rlframe.envs.layout import SpecMismatchError
from rlframe.errors import UsageError
from rlframe.types import Tree

_log = logging.getLogger(__name__)

# Folders of files that are not the cause of an error in an environment.
_LIBRARIES = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, np))
_NUMBERS = (jnp.floating, jnp.integer, jnp.bool_)

# Errors for Python code that needs the value of a traced array -> replacement of this code.
_FIXES: tuple[tuple[type[Exception], str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "Python's `if`, `while`, `and`, `or` and `not` need a value, which is unknown during tracing. Use jnp.where or "
        "jax.lax.cond instead of `if`, and jnp.logical_and (`&`), jnp.logical_or (`|`) and jnp.logical_not (`~`).",
    ),
    (jax.errors.TracerArrayConversionError, "Functions of numpy cannot be traced. Use those of jax.numpy."),
    (
        jax.errors.TracerIntegerConversionError,
        "A Python list or range needs a value, which is unknown during tracing. Index an array of jax.numpy instead.",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "Python needs a value, which is unknown during tracing. Use functions of jax.numpy instead of int() and "
        "float(), and shapes that do not depend on values.",
    ),
)


def check_outputs(env: Any, codec: Codec, action: jax.Array) -> None:
    """Trace one reset and one step, and compare the shapes and dtypes with the spaces. Check one image of `render`.

    Raises:
        UsageError: The environment cannot be traced, or returns wrong values.
    """
    name, key = getattr(env, "name", type(env).__name__), jax.random.PRNGKey(0)
    started = _traced(name, "reset", lambda key: env.reset(key), key)
    _check_count(name, "reset", started, "(state, observation)")
    state, observation = started
    outputs = _traced(name, "step", lambda *args: env.step(*args), key, state, action)
    _check_count(name, "step", outputs, "(state, observation, reward, terminated, truncated)")
    if (was := _describe(state)) != (now := _describe(outputs[0])):
        raise UsageError(
            f"{name}.step must return a state with the shapes and dtypes of the state of reset, {was}, got {now}."
        )
    for call, received in (("reset", observation), ("step", outputs[1])):
        _check_observation(name, call, codec, received)
    for part, value in zip(("reward", "terminated", "truncated"), outputs[2:], strict=True):
        if not isinstance(value, jax.ShapeDtypeStruct):
            raise UsageError(f"{name}.step must return one number as {part!r}, got {type(value).__name__}.")
        if value.shape != ():
            raise UsageError(f"{name}.step must return one number as {part!r}, got the shape {value.shape}.")
        if not any(jnp.issubdtype(value.dtype, kind) for kind in _NUMBERS):
            raise UsageError(f"{name}.step must return a real number or bool as {part!r}, got {value.dtype}.")
    # A reset that is not traced compiles each of its operations, so leave out the environments of rlframe.
    if callable(getattr(env, "render", None)) and not type(env).__module__.startswith("rlframe."):
        state = jax.tree.map(np.asarray, env.reset(key)[0])
        image = _explained(f"{name}.render failed", lambda: env.render(state))
        check_image(name, np.asarray(image))


def _check_count(name: str, call: str, outputs: Any, expected: str) -> None:
    count = expected.count(",") + 1
    if not isinstance(outputs, tuple) or len(outputs) != count:
        received = f"{len(outputs)} values" if isinstance(outputs, tuple) else _describe(outputs)
        raise UsageError(f"{name}.{call} must return {expected}, got {received}.")


def _check_observation(name: str, call: str, codec: Codec, observation: Any) -> None:
    try:
        leaves = codec.layout.flatten(observation)
        for leaf, value in zip(codec.leaves, leaves, strict=True):
            value = jax.eval_shape(jnp.asarray, value)
            spec, kinds = leaf.spec, "fiub" if leaf.spec.dtype.kind == "f" else "iub"
            if value.shape != spec.shape or np.dtype(value.dtype).kind not in kinds:
                received = f"{value.dtype} of shape {value.shape}"
                raise SpecMismatchError(spec.name, received, f"{spec.dtype} of shape {spec.shape}")
            if not np.can_cast(value.dtype, spec.dtype):
                _warn_once(
                    f"{name} returns {spec.name!r} as {value.dtype}, but its observation_space has {spec.dtype}. "
                    "rlframe converts the values, which changes those that do not fit. Return the dtype of the space."
                )
    except SpecMismatchError as error:
        raise UsageError(
            f"{name}.{call} returned {error.name!r} as {error.received}, but its observation_space requires "
            f"{error.expected}. Correct the environment or its observation_space."
        ) from error


@functools.lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _traced(name: str, call: str, function: Callable[..., Any], *args: Any) -> Any:
    return _explained(f"{name}.{call} cannot be traced by JAX", lambda: jax.eval_shape(function, *args))


def _explained(what: str, function: Callable[[], Any]) -> Any:
    """Call a function of the environment. If it raises, raise UsageError with the line and the fix."""
    try:
        return function()
    except Exception as error:
        text = f"{what}: {_line_of(error)}{type(error).__name__}: "
        for kind, fix in _FIXES:
            if isinstance(error, kind):  # the rest of JAX's message is long
                raise UsageError(f"{text}{str(error).splitlines()[0]} {fix}") from error
        raise UsageError(f"{text}{error}") from error


def _line_of(error: Exception) -> str:
    """Return text such as "grid.py, line 25: " for the innermost line that is not in a library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename != __file__ and not frame.filename.startswith((*_LIBRARIES, "<")):
            return f"{os.path.basename(frame.filename)}, line {frame.lineno}: "
    return ""


def _describe(tree: Tree) -> str:
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree))
