"""Test that models are saved to folders in the format of Hugging Face, and loaded from them."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlframe.errors import CheckpointError, UsageError
from rlframe.language import ModelConfig
from rlframe.language.model import transformer, weights

CONFIG = ModelConfig(vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
QWEN = dataclasses.replace(CONFIG, model_type="qwen2", attention_bias=True, tie_word_embeddings=False)


@pytest.fixture
def folder(tmp_path):
    weights.save(tmp_path, CONFIG, transformer.init(jax.random.key(1), CONFIG))
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("config", [CONFIG, QWEN, dataclasses.replace(QWEN, dtype="bfloat16")])
def test_saved_model_is_loaded_unchanged(config, tmp_path):
    params = transformer.init(jax.random.key(1), config)
    weights.save(tmp_path / "new" / "folder", config, params)
    loaded_config, loaded = weights.load(tmp_path / "new" / "folder")
    assert loaded_config == config
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for written, read in zip(jax.tree.leaves(params), jax.tree.leaves(loaded)):
        assert written.dtype == read.dtype
        np.testing.assert_array_equal(written, read)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]


def test_matrices_are_saved_with_shape_out_in(folder):
    params = weights.load(folder)[1]
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (16, 24)
    np.testing.assert_array_equal(
        tensors["model.layers.1.mlp.down_proj.weight"].T, np.asarray(params["layers"][1]["down_proj"])
    )
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], np.asarray(params["embed_tokens"]))


def test_load_converts_to_another_dtype(folder):
    config, params = weights.load(folder, dtype="bfloat16")
    assert config.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_load_reads_shards_and_save_deletes_them(folder):
    params = weights.load(folder)[1]
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, shards = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for shard, part in zip(shards, (names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / shard)
    index = {"weight_map": {name: shards[i % 2] for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    jax.tree.map(np.testing.assert_array_equal, weights.load(folder)[1], params)
    changed = jax.tree.map(lambda x: x + 1, params)
    weights.save(folder, CONFIG, changed)
    jax.tree.map(np.testing.assert_array_equal, weights.load(folder)[1], changed)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / shards[1]).unlink()
    with pytest.raises(CheckpointError, match="lacks the file model-00002-of-00002.safetensors"):
        weights.load(folder)


def test_known_superfluous_tensors_in_files_are_ignored(folder):
    params = weights.load(folder)[1]

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)

    rewrite(folder, change)
    jax.tree.map(np.testing.assert_array_equal, weights.load(folder)[1], params)


def test_error_names_missing_and_unexpected_tensors_and_wrong_shapes(folder):
    tensor = load_file(folder / "model.safetensors")["model.norm.weight"]
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match="but the weights lack these tensors: model.norm.weight"):
        weights.load(folder)
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": tensor, "model.layers.2.extra": tensor}))
    with pytest.raises(CheckpointError, match="the weights contain these unexpected tensors: model.layers.2.extra"):
        weights.load(folder)
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": tensor[:3]}))
    with pytest.raises(
        CheckpointError, match=r"model.norm.weight has the shape \[3\]; its config.json requires \[16\]"
    ):
        weights.load(folder)


def test_folders_without_a_model_are_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="The file .*config.json does not exist"):
        weights.load(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"nothing like it")
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        weights.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor model.safetensors.index.json"):
        weights.load(folder)
    (folder / "config.json").write_text("[1")
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        weights.load(folder)


def test_parameters_of_another_config_are_not_saved(tmp_path):
    with pytest.raises(UsageError, match="do not match the configuration"):
        weights.save(tmp_path, QWEN, transformer.init(jax.random.key(0), CONFIG))
    assert not list(tmp_path.iterdir())
