"""JAX environments: the protocol `JaxEnv`, and `BatchedJaxEnv`, which steps a batch of them with automatic resets.

`BatchedJaxEnv` consists of pure functions. `SyncEnv(type="jax")` jits them as a pool of the host. The topology `fused`
calls them inside its own jitted loop. `check_outputs` checks an environment before its first step: JAX traces one reset
and one step, which takes milliseconds.
"""

from __future__ import annotations

import functools
import logging
import os
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import dm_env.specs
import jax
import jax.numpy as jnp
import numpy as np

from rlframe.envs import spaces
from rlframe.envs.api_checks import check_image, check_not_empty
from rlframe.envs.checks import mark_mask
from rlframe.envs.codec import Codec
from rlframe.envs.layout import SpecMismatchError
from rlframe.envs.wrappers import merge_stack, num_frames
from rlframe.errors import UsageError
from rlframe.types import FIRST, LAST, MID, TimeStep, Tree

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


_RESETS_AT_ONCE = 16  # a batch of B environments resets B / 16 of them at a time, because resets can be expensive


class JaxEnv(Protocol):
    """One environment as pure functions, which JAX can trace. The state is a tree of arrays of fixed shapes.

    For videos, it may also have `render(state)`, which returns an RGB image `[H, W, 3]` uint8, and `render_fps`, the
    number of images per second (30 by default). JAX does not trace `render`: the state has numpy arrays.
    It may have `name`, a text for messages in place of the class name.

    Attributes:
        observation_space: a gymnasium space, a `dm_env.specs` spec, or a dict or tuple of specs.
        action_space: a gymnasium space or a `dm_env.specs` spec.
    """

    observation_space: Any
    action_space: Any

    def reset(self, rng: jax.Array) -> tuple[Any, Any]:
        """Start an episode. Return (state, observation)."""

    def step(self, rng: jax.Array, state: Any, action: jax.Array) -> tuple[Any, Any, Any, Any, Any]:
        """Step once. Return (state, observation, reward, terminated, truncated).

        `terminated` is True if the episode ended, and `truncated` if a time limit cut it off. Do not reset in `step`.
        """


class EnvCarry(NamedTuple):
    """The state of a batch of environments between two steps."""

    state: Any  # tree of [B, ...]
    keys: jax.Array  # [B, 2] uint32: a constant key of each environment
    time: jax.Array  # [] uint32: number of steps since the start; with the keys, it determines all random numbers
    is_last: jax.Array  # [B] bool: True if the next step resets the environment
    frames: list[jax.Array]  # for each leaf of the observation, its newest frames [B, num_frames, ...]


class BatchedJaxEnv:
    """A batch of equal JAX environments, with the data contract of `rlframe.types`.

    The step after LAST ignores the action and resets the environment, so the last observation of an episode is never
    lost. Only environments whose episode ended are reset.

    Args:
        env: the environment.
        action_repeat: number of steps for each action, until the episode ends. The rewards are summed.
        frame_stack: number of newest observations that are stacked into one observation; see `FrameStack`.
        action_mask: key of the action mask in a dict observation; see `mark_mask`.

    Raises:
        UsageError: a space is not supported, or the environment returns values that do not match its spaces.
    """

    def __init__(
        self, env: JaxEnv, action_repeat: int = 1, frame_stack: int = 1, action_mask: str | None = None
    ) -> None:
        self.env = env
        self.codec = mark_mask(codec_of(env), action_mask, action_repeat)
        self._action_repeat, self._frame_stack = action_repeat, frame_stack
        spec = self.codec.action_spec
        check_outputs(env, self.codec, self._decode(jnp.zeros((1, *spec.shape), spec.dtype))[0])

    def init(self, keys: jax.Array) -> EnvCarry:
        """Return a carry in which every environment is about to reset. `keys` is [B, 2] uint32."""
        num_envs = len(keys)
        state, observation = jax.eval_shape(jax.vmap(self.env.reset), keys)
        leaves = self._encode(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), observation))
        counts = [num_frames(leaf.spec, self._frame_stack) for leaf in self.codec.leaves]
        frames = [jnp.repeat(leaf[:, None], count, 1) for leaf, count in zip(leaves, counts, strict=True)]
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
        return EnvCarry(state, keys, jnp.zeros((), jnp.uint32), jnp.ones(num_envs, bool), frames)

    def step(self, carry: EnvCarry, actions: jax.Array) -> tuple[EnvCarry, TimeStep]:
        """Step every environment with its row of `actions` [B, ...], or reset it if its newest timestep is LAST."""
        time = carry.time + 1
        keys = jax.vmap(jax.random.fold_in, (0, None))(carry.keys, time)
        stepped = jax.vmap(self._step_one)(keys, carry.state, self._decode(actions))
        first, (state, observation, reward, terminated, truncated) = carry.is_last, stepped
        state, observation = self._reset_where(first, keys, state, observation)
        is_last = (terminated | truncated) & ~first
        step_type = jnp.where(first, FIRST, jnp.where(is_last, LAST, MID)).astype(jnp.uint8)
        discount = jnp.where(terminated & ~first, 0.0, 1.0).astype(jnp.float32)
        reward = jnp.where(first, 0.0, reward).astype(jnp.float32)
        frames = [
            _push(frames, leaf, first) for frames, leaf in zip(carry.frames, self._encode(observation), strict=True)
        ]
        leaves = [merge_stack(each) for each in frames]
        timestep = TimeStep(step_type, reward, discount, self.codec.layout.unflatten(leaves))
        return EnvCarry(state, carry.keys, time, is_last, frames), timestep

    def _step_one(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """Step one environment `action_repeat` times, or until its episode ends."""
        outputs = _as_outputs(self.env.step(key, state, action))
        if self._action_repeat == 1:
            return outputs

        def again(number: Any, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
            state, _, total, terminated, truncated = outputs
            new = _as_outputs(self.env.step(jax.random.fold_in(key, number), state, action))
            new = (*new[:2], total + new[2], *new[3:])
            return jax.tree.map(lambda old, new: jnp.where(terminated | truncated, old, new), outputs, new)

        return jax.lax.fori_loop(1, self._action_repeat, again, outputs)

    def _reset_where(self, first: jax.Array, keys: jax.Array, state: Any, observation: Any) -> tuple[Any, Any]:
        """Replace the rows of the environments in `first` by new episodes. Reset a few environments at a time."""
        num_envs = len(first)
        rows = -(-num_envs // _RESETS_AT_ONCE)
        count = jnp.count_nonzero(first)

        def reset_some(loop: Any) -> Any:
            done, trees = loop
            ids = jax.lax.dynamic_slice(which, [done], [rows])
            new = jax.vmap(self.env.reset)(jnp.take(keys, ids, axis=0, mode="clip"))
            # ids of absent environments are `num_envs`, which is out of bounds, so JAX drops their rows
            trees = jax.tree.map(lambda old, new: old.at[ids].set(new.astype(old.dtype), mode="drop"), trees, new)
            return done + rows, trees

        which = jnp.nonzero(first, size=num_envs, fill_value=num_envs)[0]
        which = jnp.concatenate([which, jnp.full(rows, num_envs, which.dtype)])
        start = (jnp.zeros((), jnp.int32), (state, observation))
        return jax.lax.while_loop(lambda loop: loop[0] < count, reset_some, start)[1]

    def _decode(self, actions: jax.Array) -> jax.Array:
        """Return the environment's actions for actions of the framework; see `ActionLeaf.decode`."""
        leaf = self.codec.action
        actions = actions.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
        if np.any(leaf.start):
            actions = actions + jnp.asarray(leaf.start, actions.dtype)
        return actions if leaf.bounds is None else jnp.clip(actions, *(jnp.asarray(bound) for bound in leaf.bounds))

    def _encode(self, observation: Any) -> list[jax.Array]:
        """Return the leaves of observations [B, ...] in the dtypes of the framework."""
        leaves = []
        for leaf, value in zip(self.codec.leaves, self.codec.layout.flatten(observation), strict=True):
            if np.any(leaf.start):
                value = value - jnp.asarray(leaf.start, value.dtype)
            leaves.append(value.astype(leaf.spec.dtype))
        return leaves


def codec_of(env: JaxEnv) -> Codec:
    """Return the codec of a JAX environment. Raise UsageError if a space is not supported."""
    for part in ("observation_space", "action_space"):
        if getattr(env, part, None) is None:
            raise UsageError(f"The JAX environment {type(env).__name__} needs the attribute {part}.")
    is_spec = isinstance(env.action_space, dm_env.specs.Array)
    make = spaces.codec_of_specs if is_spec else spaces.codec_of_spaces
    codec = make(env.observation_space, env.action_space)
    check_not_empty(codec.observation_spec, "observation")
    check_not_empty(codec.action_spec, "action")
    return codec


def _as_outputs(outputs: Any) -> tuple[Any, ...]:
    state, observation, reward, terminated, truncated = outputs
    return (
        state,
        observation,
        jnp.asarray(reward, jnp.float32),
        jnp.asarray(terminated, bool),
        jnp.asarray(truncated, bool),
    )


def _push(frames: jax.Array, leaf: jax.Array, first: jax.Array) -> jax.Array:
    """Append a leaf [B, ...] to its newest frames [B, count, ...]. At FIRST, repeat the leaf."""
    if frames.shape[1] == 1:
        return leaf[:, None]
    pushed = jnp.concatenate([frames[:, 1:], leaf[:, None]], axis=1)
    return jnp.where(first.reshape((-1,) + (1,) * leaf.ndim), leaf[:, None], pushed)
