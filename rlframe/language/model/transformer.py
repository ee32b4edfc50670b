"""A decoder-only transformer of the Llama family, as pure functions on a tree of parameters.

The supported architectures are Llama (Touvron et al. 2023, arXiv:2302.13971), Qwen2 (arXiv:2407.10671) and Qwen3
(arXiv:2505.09388). They consist of: RMSNorm before each attention and MLP (Zhang and Sennrich 2019), rotary embeddings
(Su et al. 2021; pairs i and i + head / 2), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020).

The tree of parameters is as follows. D is the hidden size, H the number of query heads, K the number of key-value
heads. Matrices are `[in, out]`.

    embed_tokens [V, D]    norm [D]    lm_head [D, V], unless it is tied to embed_tokens
    layers: a tuple of dicts: input_layernorm, post_attention_layernorm [D]
        q_proj [D, H * head]  k_proj, v_proj [D, K * head]  o_proj [H * head, D]  (with *_bias if the config has biases)
        q_norm, k_norm [head]  (if the config normalizes queries and keys)
        gate_proj, up_proj [D, F]  down_proj [F, D]
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlframe.language.model.config import ModelConfig
from rlframe.types import Params


class Cache(NamedTuple):
    """Keys and values of the tokens so far, one array for each layer: `[B, K, length, head]`.

    The caller counts the valid positions of each row (`lengths`). The axis of heads is before the axis of positions,
    because otherwise attention would transpose the whole cache in each step.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def init(rng: jax.Array, config: ModelConfig) -> Params:
    """Return random parameters for training a small model from scratch.

    The matrices are normally distributed with variance 1 / fan-in. Projections into the residual stream are divided by
    the square root of the number of such projections (Radford et al. 2019). Embeddings have a standard deviation of
    0.02, as in transformers.
    """
    D, F, head = config.hidden_size, config.intermediate_size, config.head_size
    q_size, kv_size = config.num_attention_heads * head, config.num_key_value_heads * head
    dtype = config.array_dtype
    residual = 1 / math.sqrt(2 * config.num_hidden_layers)

    def normal(rng: jax.Array, shape: tuple[int, int], scale: float) -> jax.Array:
        return (scale * jax.random.normal(rng, shape)).astype(dtype)

    def layer(rng: jax.Array) -> dict[str, jax.Array]:
        shapes = {
            "q_proj": (D, q_size),
            "k_proj": (D, kv_size),
            "v_proj": (D, kv_size),
            "o_proj": (q_size, D),
            "gate_proj": (D, F),
            "up_proj": (D, F),
            "down_proj": (F, D),
        }
        weights = {}
        for (name, shape), key in zip(shapes.items(), jax.random.split(rng, len(shapes))):
            scale = residual if name in ("o_proj", "down_proj") else 1.0
            weights[name] = normal(key, shape, scale / math.sqrt(shape[0]))
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[name] = jnp.ones(D, dtype)
        if config.attention_bias:
            weights |= {f"{name}_bias": jnp.zeros(shapes[name][1], dtype) for name in ("q_proj", "k_proj", "v_proj")}
        if config.output_bias:
            weights["o_proj_bias"] = jnp.zeros(D, dtype)
        if config.normalizes_queries:
            weights |= {name: jnp.ones(head, dtype) for name in ("q_norm", "k_norm")}
        return weights

    embed_rng, head_rng, *layer_rngs = jax.random.split(rng, 2 + config.num_hidden_layers)
    params = {
        "embed_tokens": normal(embed_rng, (config.vocab_size, D), 0.02),
        "layers": tuple(layer(key) for key in layer_rngs),
        "norm": jnp.ones(D, dtype),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = normal(head_rng, (D, config.vocab_size), 1 / math.sqrt(D))
    return params


def apply(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Return the logits of the next token at each position.

    Args:
        params: Parameters from `init` or `rlframe.language.model.weights.load`.
        config: Static.
        tokens: `[B, T]` int32.
        positions: `[B, T]` int32: positions for the rotary embeddings. None numbers the real tokens of a row from 0.
        mask: `[B, T]` bool: True for real tokens. Padding can be left or right of them. They do not attend to it.

    Returns:
        `[B, T, V]` float32. Values at padding are meaningless.
    """
    return logits_of(params, config, hidden(params, config, tokens, positions, mask))


def hidden(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    remat: bool = False,
) -> jax.Array:
    """Return the input of the model's head, `[B, T, D]`. See `apply` for the arguments.

    If `remat` is True, the gradient recomputes the activations inside each layer, to save memory.
    """
    if positions is None:
        positions = jnp.arange(tokens.shape[1])[None] if mask is None else jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    T = tokens.shape[1]
    visible = jnp.tril(jnp.ones((T, T), bool))[None]
    if mask is not None:
        visible = visible & mask[:, None, :]
    rotation = _rotation(config, positions)

    def block(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        q, k, v = _qkv(config, layer, x, rotation)
        return _finish(config, layer, x, _attend(q, k, v, visible))

    if remat:
        block = jax.checkpoint(block)
    x = params["embed_tokens"][tokens]
    for layer in params["layers"]:
        x = block(x, layer)
    return _rms_norm(x, params["norm"], config.rms_norm_eps)


def logits_of(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Apply the model's head to `[..., D]`. Return logits `[..., V]` float32."""
    if config.tie_word_embeddings:
        return jnp.einsum("...d,vd->...v", hidden, params["embed_tokens"], preferred_element_type=jnp.float32)
    return jnp.einsum("...d,dv->...v", hidden, params["lm_head"], preferred_element_type=jnp.float32)


def token_log_probs(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    temperature: jax.Array | None = None,
    remat: bool = False,
    chunk: int | None = None,
) -> jax.Array:
    """Return the log-probability of each token except the first, given the tokens before it.

    Args:
        params, config, tokens, positions, mask: See `apply`.
        temperature: `[B]` float32: divisor of each row's logits. Values of 0 or less are replaced by 1. None means 1.
        remat: See `hidden`.
        chunk: Number of positions whose logits, `[B, chunk, V]` float32, are in memory at the same time, also in the
            gradient. None means all positions.

    Returns:
        `[B, T - 1]` float32: value t is for `tokens[:, t + 1]`. A value is meaningless if this token is padding, or if
        the token before it is padding.
    """
    x = hidden(params, config, tokens, positions, mask, remat=remat)[:, :-1]
    targets = tokens[:, 1:]
    if chunk is None or chunk >= x.shape[1]:
        return _log_probs(params, config, x, targets, temperature)
    missing = -x.shape[1] % chunk
    x, targets = jnp.pad(x, ((0, 0), (0, missing), (0, 0))), jnp.pad(targets, ((0, 0), (0, missing)))
    one = jax.checkpoint(lambda x, targets: _log_probs(params, config, x, targets, temperature))
    parts = [one(x[:, i : i + chunk], targets[:, i : i + chunk]) for i in range(0, x.shape[1], chunk)]
    return jnp.concatenate(parts, axis=1)[:, : tokens.shape[1] - 1]


def _log_probs(
    params: Params, config: ModelConfig, x: jax.Array, targets: jax.Array, temperature: jax.Array | None
) -> jax.Array:
    logits = logits_of(params, config, x)
    if temperature is not None:
        logits /= jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def init_cache(config: ModelConfig, batch: int, length: int) -> Cache:
    """Return an empty cache for `batch` rows of at most `length` tokens."""
    shape = (batch, config.num_key_value_heads, length, config.head_size)
    empty = lambda: tuple(jnp.zeros(shape, config.array_dtype) for _ in range(config.num_hidden_layers))  # noqa: E731
    return Cache(keys=empty(), values=empty())


def apply_cached(
    params: Params, config: ModelConfig, tokens: jax.Array, cache: Cache, lengths: jax.Array, *, span: int | None = None
) -> tuple[jax.Array, Cache]:
    """Append tokens to the cache, and return the logits of the next token at each position.

    Prefill and decoding use this function. Padding to the right of a row's real tokens is harmless: later tokens
    overwrite it in the cache before any token attends to it.

    Args:
        params, config: See `apply`.
        tokens: `[B, T]` int32, at the positions `lengths[b] + arange(T)` of each row.
        cache: A cache from `init_cache`. To avoid a copy, donate it to the jitted function.
        lengths: `[B]` int32: number of cached tokens of each row. The caller increases it after the call.
        span: Static. Attention reads only this number of cache positions, which must include the new tokens. A smaller
            number takes less time. None means all positions.

    Returns:
        (`[B, T, V]` float32, the cache with the tokens). Tokens that do not fit into the cache are dropped.
    """
    x, cache = hidden_cached(params, config, tokens, cache, lengths, span=span)
    return logits_of(params, config, x), cache


def hidden_cached(
    params: Params, config: ModelConfig, tokens: jax.Array, cache: Cache, lengths: jax.Array, *, span: int | None = None
) -> tuple[jax.Array, Cache]:
    """Do the same as `apply_cached`, but return the input of the model's head, `[B, T, D]`, instead of logits."""
    B, T = tokens.shape
    span = span or cache.keys[0].shape[2]
    positions = lengths[:, None] + jnp.arange(T)
    at = jnp.arange(B)[:, None, None], jnp.arange(config.num_key_value_heads)[:, None], positions[:, None]
    visible = jnp.arange(span) <= positions[..., None]  # [B, T, span]
    rotation = _rotation(config, positions)
    x = params["embed_tokens"][tokens]
    keys, values = [], []
    for layer, cached_keys, cached_values in zip(params["layers"], cache.keys, cache.values):
        q, k, v = _qkv(config, layer, x, rotation)
        keys.append(cached_keys.at[at].set(k, mode="drop"))
        values.append(cached_values.at[at].set(v, mode="drop"))
        x = _finish(config, layer, x, _attend(q, keys[-1][:, :, :span], values[-1][:, :, :span], visible))
    return _rms_norm(x, params["norm"], config.rms_norm_eps), Cache(tuple(keys), tuple(values))


def _rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return weight * wide.astype(x.dtype)


def _rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of the rotation angles at `positions` `[B, T]`, each `[B, 1, T, head / 2]` float32."""
    head = config.head_size
    frequencies = config.rope_theta ** -(jnp.arange(0, head, 2, dtype=jnp.float32) / head)
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _stretch(frequencies: jax.Array, scaling: Any) -> jax.Array:
    """Scale frequencies as in Llama 3.1: lengthen long wavelengths, keep short ones, interpolate between them."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair (i, i + head / 2) of `[B, heads, T, head]`."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


def _linear(layer: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    y = x @ layer[name]
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def _qkv(
    config: ModelConfig, layer: dict[str, jax.Array], x: jax.Array, rotation: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries `[B, H, T, head]`, and keys and values `[B, K, T, head]`."""
    x = _rms_norm(x, layer["input_layernorm"], config.rms_norm_eps)
    q, k, v = (
        jnp.swapaxes(_linear(layer, name, x).reshape(*x.shape[:-1], -1, config.head_size), 1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if config.normalizes_queries:
        q, k = (_rms_norm(x, layer[name], config.rms_norm_eps) for x, name in ((q, "q_norm"), (k, "k_norm")))
    return _rotate(q, rotation), _rotate(k, rotation), v


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Compute softmax attention of `q` `[B, H, T, head]` to `k`, `v` `[B, K, S, head]`.

    Args:
        visible: `[B, T, S]` bool: True if query t can attend to key s.
    """
    B, H, T, head = q.shape
    K = k.shape[1]
    q = q.reshape(B, K, H // K, T, head)
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k, preferred_element_type=jnp.float32) / math.sqrt(head)
    scores = jnp.where(visible[:, None, None], scores, -1e30)  # not -inf, which would give NaN for padding
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    attended = jnp.einsum("bkgts,bksd->bkgtd", weights, v).reshape(B, H, T, head)
    return jnp.swapaxes(attended, 1, 2).reshape(B, T, H * head)


def _finish(config: ModelConfig, layer: dict[str, jax.Array], x: jax.Array, attended: jax.Array) -> jax.Array:
    """Compute the last part of a layer: add the attention's output and the SwiGLU's output to the residual stream."""
    x = x + _linear(layer, "o_proj", attended)
    h = _rms_norm(x, layer["post_attention_layernorm"], config.rms_norm_eps)
    return x + (jax.nn.silu(h @ layer["gate_proj"]) * (h @ layer["up_proj"])) @ layer["down_proj"]
