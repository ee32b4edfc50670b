"""`rlframe.export`: write a trained policy to a file for other tools."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.envs.checks import MaskCheck
from rlframe.envs.codec import ActionLeaf, Codec, ObservationLeaf
from rlframe.envs.spaces import canonical_dtype
from rlframe.envs.wrappers import merge_stack, num_frames
from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.programs.options.fields import convert
from rlframe.programs.policies.saved import Checkpoint
from rlframe.programs.policies.trained import load_trained
from rlframe.programs.topologies.config import EnvOptions
from rlframe.types import FIRST, MID, TimeStep, Tree


def export(
    run_dir: str | os.PathLike[str],
    file: str | os.PathLike[str],
    checkpoint: Checkpoint = None,
    *,
    agent: Any = None,
    network: Any = None,
) -> pathlib.Path:
    """Write a trained policy with its parameters as StableHLO. JAX and other tools can use it without rlframe.

    `jax.export.deserialize(file.read_bytes()).call(observation, begins, state, seed)` returns (action, state), for any
    number B of environments. The policy acts without exploration.

    - `observation`: [B, ...], observations of the environments: dicts and tuples as in the space, dtypes of at most 32
      bits, float16 as float32.
    - `begins`: [B] bool, True for environments at the start of an episode.
    - `state`: list of arrays [B, ...], the state from the previous call. Its values do not matter at the start of an
      episode. The list is empty for an agent without recurrent state and without frame stacking.
    - `seed`: [] uint32, seed for agents that draw random numbers. Use a new seed in each call.
    - `action`: [B, ...], actions for the environments, with dtypes of at most 32 bits. For an observation outside its
      space, or with an action mask that allows no action, the action is NaN or the smallest integer (unsigned: the
      largest), because a compiled function cannot raise errors.

    Args:
        run_dir, checkpoint, agent, network: as for `load`.
        file: path of the file to write.

    Returns:
        The file's path.

    Raises:
        UsageError, CheckpointError: as for `load`. UsageError also if a space starts outside the range of int32, or has
            keys that are not strings.
        RlframeError: the file could not be written.
    """
    from jax import export as jax_export

    path = pathlib.Path(convert(str, file, "file")).absolute()  # user code, which runs later, may change the directory
    made, codec, source, experiment = load_trained(run_dir, checkpoint, agent, network)
    _, params = source.get_params()
    config = EnvOptions.of(experiment)
    count, check_finite = config.frame_stack, config.check_finite is not False
    check_codec(codec)
    mask_check = MaskCheck(codec.observation_spec)
    initial, structure = jax.tree.flatten(jax.tree.map(np.asarray, made.initial_state(1)))
    shapes = [(num_frames(leaf.spec, count), *leaf.spec.shape) for leaf in codec.leaves] if count > 1 else []
    frames = [np.zeros((1, *shape), leaf.spec.dtype) for shape, leaf in zip(shapes, codec.leaves)]

    def act(observation: Tree, begins: Any, kept: list[Any], seed: Any) -> tuple[Tree, list[Any]]:
        size = begins.shape[0]

        def choose(fresh: Any, leaf: jax.Array) -> jax.Array:
            return jnp.where(begins.reshape((size,) + (1,) * (leaf.ndim - 1)), jnp.asarray(fresh), leaf)

        values = codec.layout.flatten(observation)
        leaves, fits = zip(*(_encode(leaf, value, check_finite) for leaf, value in zip(codec.leaves, values)))
        rows = [
            choose(new[:, None], jnp.concatenate([old[:, 1:], new[:, None]], axis=1))
            for old, new in zip(kept[: len(frames)], leaves)
        ]
        seen = codec.layout.unflatten([merge_stack(row) for row in rows] if frames else list(leaves))
        zeros = jnp.zeros(size, jnp.float32)
        timestep = TimeStep(jnp.where(begins, FIRST, MID), zeros, zeros + 1, seen)
        state = structure.unflatten(map(choose, initial, kept[len(frames) :]))
        output, state = made.eval_step(jax.random.PRNGKey(seed), params, timestep, state)
        all_fit = jnp.all(jnp.stack([*fits, ~mask_check.find(timestep, jnp)]), axis=0)
        action = _decode(codec.action, output.action, all_fit)
        return action, [*rows, *jax.tree.leaves(state)]

    (size,) = jax_export.symbolic_shape("B")
    inputs = [
        jax.ShapeDtypeStruct((size, *leaf.spec.shape), leaf.spec.dtype if leaf.is_plain else np.int32)
        for leaf in codec.leaves
    ]
    observation = codec.layout.unflatten(inputs)
    state = [jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) for leaf in (*frames, *initial)]
    begins, seed = jax.ShapeDtypeStruct((size,), bool), jax.ShapeDtypeStruct((), np.uint32)
    exported = jax_export.export(jax.jit(act), platforms=("cpu", "cuda", "tpu"))(observation, begins, state, seed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, bytes(exported.serialize()))
    except OSError as error:
        raise RlframeError(
            f"Could not write {path}: {error.strerror or error}. Choose another path, or make this one writable."
        ) from error
    return path


def check_codec(codec: Codec) -> None:
    """Raise UsageError if a policy with these observations and actions cannot be exported."""
    paths = jax.tree_util.tree_flatten_with_path(codec.observation_spec)[0]
    for key in (getattr(part, "key", "") for path, _ in paths for part in path):
        if not isinstance(key, str):
            raise UsageError(
                f"The policy cannot be exported: the observation space has the key {key!r}, but keys in an exported "
                "file must be strings. Use `rlframe.load` instead."
            )
    limits = np.iinfo(np.int32)
    leaves: list[Any] = [*codec.leaves, codec.action]
    for leaf in leaves:
        start, count = np.asarray(leaf.start), np.asarray(getattr(leaf.spec, "num_values", 1))
        if np.any(start < limits.min) or np.any(start + (count - 1) > limits.max):
            raise UsageError(
                f"The policy cannot be exported: the space of {leaf.spec.name!r} starts at {start}, which does not fit "
                "JAX's int32. Use `rlframe.load` instead."
            )


def _encode(leaf: ObservationLeaf, value: jax.Array, check_finite: bool) -> tuple[jax.Array, jax.Array]:
    """Encode a batch like `ObservationLeaf.encode`. Return (encoded values, [B] bool: True if inside the space)."""
    fits = jnp.isfinite(value) if check_finite else jnp.ones_like(value, bool)
    if not leaf.is_plain:
        value = value - leaf.first.astype(np.int32)
        fits = (value >= 0) & (value < leaf.num_values.astype(np.int32))
    return value.astype(leaf.spec.dtype), jnp.all(fits, axis=tuple(range(1, fits.ndim)))


def _decode(leaf: ActionLeaf, action: jax.Array, fits: jax.Array) -> jax.Array:
    """Decode actions like `ActionLeaf.decode`, with at most 32 bits.

    If `fits` is False for an action, return NaN or the smallest integer (for unsigned integers, the largest).
    """
    spec: Any = leaf.spec
    dtype: Any = np.dtype(np.float16) if leaf.dtype == np.float16 else canonical_dtype(leaf.dtype)
    if leaf.bounds is not None:
        action = jnp.clip(action, spec.minimum, spec.maximum)
    action = (action + np.asarray(leaf.start).astype(spec.dtype)).astype(dtype)
    none = np.nan if dtype.kind == "f" else np.iinfo(dtype).max if dtype.kind == "u" else np.iinfo(dtype).min
    return jnp.where(fits.reshape(-1, *[1] * (action.ndim - 1)), action, np.asarray(none, dtype))
