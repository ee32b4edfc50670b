"""Initial parameters of networks: their distributions, and a fast way to create them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlframe.types import Params


def transformed(forward: Callable[..., Any]) -> tuple[Callable[..., Params], Callable[..., Any]]:
    """Return (init, apply) of a function that uses Haiku, like `hk.transform`, but with a faster `init`.

    Haiku's `init` also computes the outputs, so JAX compiles each operation of the network. This `init` computes only
    the parameters.
    """
    haiku: Any = hk
    haiku_init, apply = haiku.without_apply_rng(haiku.transform(forward))

    def init(rng: jax.Array, *args: Any) -> Params:
        if isinstance(rng, jax.core.Tracer):
            return haiku_init(rng, *args)
        draws: dict[str, Callable[[], jax.Array]] = {}

        def record(create: Any, shape: Any, dtype: Any, initializer: Any, context: Any) -> jax.Array:
            draws[context.full_name] = functools.partial(initializer, shape, dtype)
            return create(shape, dtype, jnp.zeros)

        def traced(*args: Any) -> None:
            with hk.custom_creator(record, state=False):
                forward(*args)

        jax.eval_shape(haiku.transform(traced).init, rng, *args)
        drawn = haiku.transform(lambda: {name: draw() for name, draw in draws.items()}).apply({}, rng)
        params: dict[str, dict[str, jax.Array]] = {}
        for full_name, array in drawn.items():
            module, _, name = full_name.rpartition("/")
            params.setdefault(module, {})[name] = array
        return params

    return init, apply


def weight_initializer(cfg: Any, scale: float = math.sqrt(2.0)) -> Callable[[Any, Any], jax.Array]:
    """Return an initializer of weights. The default gain is from OpenAI Baselines (`baselines/common/models.py`)."""
    weights = functools.partial(_orthogonal, scale=scale) if cfg.orthogonal else _truncated_normal

    def init(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        # NumPy draws the weights, because XLA takes two seconds per shape to compile a matrix decomposition.
        key = jax.random.key_data(hk.next_rng_key())
        draw = functools.partial(weights, shape=tuple(shape), dtype=dtype)
        if isinstance(key, jax.core.Tracer):
            return jax.pure_callback(draw, jax.ShapeDtypeStruct(tuple(shape), dtype), key)
        return jnp.asarray(draw(key))

    return init


def zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Return zeros, for biases. `jnp.zeros` would compile a function for each shape."""
    return jnp.asarray(np.zeros(shape, dtype))


def _orthogonal(key: Any, *, shape: tuple[int, ...], dtype: Any, scale: float) -> np.ndarray:
    """Draw weights with orthogonal columns. If there are fewer rows than columns, the rows are orthogonal.

    See Saxe et al. 2014.
    """
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    draws = _random_state(key).standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(draws)
    q = q * np.sign(np.diag(r))  # These signs make the distribution of the matrices uniform.
    return np.asarray(scale * (q if rows >= columns else q.T), dtype).reshape(shape)


def _truncated_normal(key: Any, *, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Draw normal weights with deviation 1 / sqrt(inputs), truncated at two deviations, as in Sonnet and Haiku."""
    random = _random_state(key)
    draws = random.standard_normal(shape)
    while (outside := np.abs(draws) > 2.0).any():
        draws[outside] = random.standard_normal(int(outside.sum()))
    return np.asarray(draws / math.sqrt(np.prod(shape[:-1])), dtype)


def _random_state(key: Any) -> np.random.RandomState:
    # RandomState instead of Generator, because its random numbers are the same in all versions of NumPy.
    return np.random.RandomState(np.asarray(key, np.uint32).ravel())
