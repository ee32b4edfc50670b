"""Compare the transformer's logits with those of the package `transformers`, which `golden/make.py` has saved."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from rlframe.errors import UsageError
from rlframe.language import ModelConfig, RopeScaling
from rlframe.language.model import transformer, weights
from tests.extras import needs

GOLDEN = Path(__file__).parent / "golden"
MODELS = ("llama", "llama3_tied", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied")
SMALL = ModelConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


def write_published(name: str, folder: Path) -> None:
    arrays = golden(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(arrays["config"]))
    tensors = {key.removeprefix("tensor:"): value for key, value in arrays.items() if key.startswith("tensor:")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@functools.cache
def small(config: ModelConfig = SMALL):
    return transformer.init(jax.random.key(0), config)


def some_tokens(rows: int, length: int, vocab_size: int = SMALL.vocab_size) -> jax.Array:
    return jax.random.randint(jax.random.key(7), (rows, length), 0, vocab_size)


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_padding_equal_the_logits_of_transformers(name, tmp_path):
    write_published(name, tmp_path)
    config, params = weights.load(tmp_path)
    arrays = golden(name)
    logits = jax.jit(transformer.apply, static_argnums=1)(params, config, arrays["tokens"], None, arrays["mask"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[arrays["mask"]], arrays["logits"][arrays["mask"]], atol=1e-4, rtol=0)
    assert not arrays["mask"].all()


@pytest.mark.system
@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_equal_the_logits_of_transformers(name, tmp_path):
    write_published(name, tmp_path)
    config, params = weights.load(tmp_path)
    tokens, expected = golden(name)["tokens"], golden(name)["logits"]
    # Decoding starts at token 8 of row 0, and at token 5 of row 2. The prefill of row 2 is shorter, so it has padding
    # on the right.
    tokens, expected = tokens[[0, 2]], expected[[0, 2]]
    step = jax.jit(transformer.apply_cached, static_argnums=1, static_argnames="span")
    lengths = np.array([8, 5])
    prompt = np.where(np.arange(8) < lengths[:, None], tokens[:, :8], 3)
    logits, cache = step(params, config, prompt, transformer.init_cache(config, 2, 20), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(logits[0], expected[0, :8], atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits[1, :5], expected[1, :5], atol=1e-4, rtol=0)
    for _ in range(8):
        token = np.take_along_axis(tokens, lengths[:, None], axis=1)
        logits, cache = step(params, config, token, cache, lengths, span=16)
        np.testing.assert_allclose(logits[:, 0], expected[[0, 1], lengths], atol=1e-4, rtol=0)
        lengths = lengths + 1


@pytest.mark.system
def test_full_cache_drops_further_tokens():
    cache = transformer.init_cache(SMALL, 1, 4)
    _, full = transformer.apply_cached(small(), SMALL, some_tokens(1, 4), cache, jnp.zeros(1, jnp.int32))
    _, after = transformer.apply_cached(small(), SMALL, some_tokens(1, 1), full, jnp.full(1, 4))
    jax.tree.map(np.testing.assert_array_equal, full, after)
    assert np.abs(full.keys[0]).min() > 0


def test_tokens_do_not_attend_to_later_tokens():
    tokens = some_tokens(1, 9)
    other = tokens.at[0, 5].set((tokens[0, 5] + 1) % SMALL.vocab_size)
    before, after = transformer.apply(small(), SMALL, tokens), transformer.apply(small(), SMALL, other)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3


@pytest.mark.system
@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
def test_token_log_probs_are_independent_of_chunk_and_remat(chunk):
    tokens = some_tokens(3, 11)

    def loss(params, remat, chunk):
        return transformer.token_log_probs(params, SMALL, tokens, remat=remat, chunk=chunk).mean()

    log_probs = jax.nn.log_softmax(transformer.apply(small(), SMALL, tokens)[:, :-1])
    expected = np.take_along_axis(np.asarray(log_probs), np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    got = transformer.token_log_probs(small(), SMALL, tokens, remat=True, chunk=chunk)
    assert got.shape == (3, 10) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)
    plain, ours = jax.grad(loss)(small(), False, None), jax.grad(loss)(small(), True, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, ours)


@pytest.mark.system
def test_bfloat16_model_returns_float32_logits():
    half = dataclasses.replace(SMALL, dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small())
    tokens = some_tokens(2, 9)
    logits = transformer.apply(params, half, tokens)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(transformer.init(jax.random.key(0), half))} == {
        jnp.dtype(jnp.bfloat16)
    }
    np.testing.assert_allclose(logits, transformer.apply(small(), SMALL, tokens), atol=0.1)
    cached, cache = transformer.apply_cached(
        params, half, tokens, transformer.init_cache(half, 2, 9), jnp.zeros(2, jnp.int32)
    )
    assert cache.keys[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(cached, logits, atol=0.1)


@pytest.mark.system
def test_initial_predictions_are_nearly_uniform():
    log_probs = transformer.token_log_probs(small(), SMALL, some_tokens(8, 33))
    assert abs(float(log_probs.mean()) + np.log(SMALL.vocab_size)) < 0.2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_attention_heads=6), "hidden_size .128. must be a multiple of num_attention_heads .6. if"),
        (dict(num_key_value_heads=3), "num_attention_heads .4. must be a multiple of num_key_value_heads .3."),
        (dict(vocab_size=0), "vocab_size must be at least 1, got 0"),
        (dict(head_dim=7), "head_dim must be even, since rotary embeddings rotate pairs; got 7"),
        (dict(dtype="float16"), "dtype must be one of float32, bfloat16, got 'float16'"),
        (dict(model_type="gpt2"), "model_type must be one of llama, qwen2, qwen3, got 'gpt2'"),
        (dict(rms_norm_eps=0.0), "rms_norm_eps must be above 0"),
    ],
)
def test_invalid_config_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            dict(model_type="qwen4"),
            "model_type 'qwen4' is not supported. Supported: llama, qwen2, qwen3. Did you mean 'qwen3'",
        ),
        (dict(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (
            dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
            "rope scaling 'yarn' is not supported, only llama3",
        ),
        (dict(rope_scaling={"type": "llama3", "factor": 2.0}), "scaling lacks low_freq_factor, high_freq_factor, orig"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (dict(mlp_bias=True), "mlp_bias = True is not supported"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(vocab_size=None), "config.json lacks vocab_size"),
    ],
)
def test_unsupported_config_json_fields_are_refused_by_name(changed, message):
    with pytest.raises(UsageError, match=message):
        ModelConfig.from_json({**ModelConfig().to_json(), **changed})


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(),
        ModelConfig(model_type="qwen2", attention_bias=True, dtype="bfloat16", tie_word_embeddings=False),
        ModelConfig(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192), head_dim=64, attention_bias=True),
    ],
)
def test_config_is_unchanged_after_to_json_and_from_json(config):
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_config_json_of_transformers_4_is_supported():
    fields = ModelConfig(rope_theta=5e5).to_json() | {"torch_dtype": "float16", "rope_scaling": None}
    assert ModelConfig.from_json(fields) == ModelConfig(rope_theta=5e5, dtype="bfloat16")


@pytest.mark.system
def test_bfloat16_is_the_jax_type_if_tensorflow_is_imported():
    needs("reverb")
    code = (
        "import tensorflow, jax; from rlframe.language.model import ModelConfig, transformer\n"
        "config = ModelConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, dtype='bfloat16')\n"
        "print({str(leaf.dtype) for leaf in jax.tree.leaves(transformer.init(jax.random.key(0), config))})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "{'bfloat16'}", run.stderr
