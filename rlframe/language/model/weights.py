"""Load and save weights in the format of Hugging Face: `config.json`, and `model.safetensors` or its shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlframe import extras
from rlframe.errors import CheckpointError, UsageError
from rlframe.interprocess.files import replacing, write_atomically
from rlframe.language.model import transformer
from rlframe.language.model.config import ModelConfig
from rlframe.types import Params

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_NAMED = 5  # maximum number of tensor names in an error message


def load(folder: str | os.PathLike[str], *, dtype: str | None = None) -> tuple[ModelConfig, Params]:
    """Load a model in the format of Hugging Face.

    Args:
        folder: Folder with `config.json` and the weights.
        dtype: float32 or bfloat16. None means the dtype in `config.json`.

    Returns:
        (config, parameters on the default device). `transformer.init` returns the same tree of parameters.

    Raises:
        UsageError: The architecture is not supported, or the package safetensors is missing.
        CheckpointError: A file is missing or damaged; or tensors are missing, unexpected, or have wrong shapes.
    """
    folder = Path(folder)
    config = read_config(folder, dtype=dtype)
    expected, treedef = _expected(config)
    found: dict[str, jax.Array] = {}
    unexpected = []
    for name, tensor in _tensors(folder):
        if name in expected:
            found[name] = _convert(name, tensor, expected[name], folder)
        elif not _is_superfluous(name, config):
            unexpected.append(name)
    missing = [name for name in expected if name not in found]
    for names, what in ((missing, "lack these tensors"), (unexpected, "contain these unexpected tensors")):
        if names:
            raise CheckpointError(
                f"{CONFIG} in {folder} describes a {config.model_type} with {config.num_hidden_layers} layers, but the "
                f"weights {what}: {_listed(names)}."
            )
    return config, jax.tree.unflatten(treedef, [found[name] for name in expected])


def read_config(folder: str | os.PathLike[str], *, dtype: str | None = None) -> ModelConfig:
    """Return only the config, without loading weights. See `load` for the errors."""
    fields = _read_json(Path(folder) / CONFIG)
    return ModelConfig.from_json({**fields, "dtype": dtype} if dtype else fields)


def save(folder: str | os.PathLike[str], config: ModelConfig, params: Params) -> None:
    """Write `config.json` and `model.safetensors` to a folder. `load` and transformers can read them.

    Existing files with these names are replaced, each atomically.
    """
    save_file = _safetensors().numpy.save_file
    folder = Path(folder)
    fields = json.dumps(config.to_json(), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as new:
        save_file(published(config, params), new, metadata={"format": "pt"})  # transformers requires this metadata
    (folder / INDEX).unlink(missing_ok=True)  # delete the index of an earlier model's shards
    write_atomically(folder / CONFIG, fields)


def published(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Convert the parameters to a dict: Hugging Face's name -> numpy array. Matrices are `[out, in]`."""
    expected, treedef = _expected(config)
    if jax.tree.structure(params) != treedef:
        raise UsageError(f"The parameters do not match the configuration. Expected: {treedef}.")
    tensors = {}
    for name, leaf in zip(expected, jax.tree.leaves(params)):
        array = np.asarray(leaf)
        # Copy transposed views, because safetensors ignores strides, and would save wrong values without an error.
        tensors[name] = np.ascontiguousarray(array.T if _is_transposed(name) else array)
    return tensors


def _expected(config: ModelConfig) -> tuple[dict[str, jax.ShapeDtypeStruct], Any]:
    """Return (dict in the tree's order: Hugging Face's name -> array shape; structure of the tree)."""
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    return {_published_name(path): leaf for path, leaf in leaves}, treedef


def _published_name(path: tuple[Any, ...]) -> str:
    last = path[-1].key
    if len(path) == 1:
        return "lm_head.weight" if last == "lm_head" else f"model.{last}.weight"
    layer = f"model.layers.{path[1].idx}"
    name, kind = (last.removesuffix("_bias"), "bias") if last.endswith("_bias") else (last, "weight")
    if name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        name = f"self_attn.{name}"
    elif name in ("gate_proj", "up_proj", "down_proj"):
        name = f"mlp.{name}"
    return f"{layer}.{name}.{kind}"


def _is_transposed(name: str) -> bool:
    return name.endswith("_proj.weight") or name == "lm_head.weight"


def _is_superfluous(name: str, config: ModelConfig) -> bool:
    # Older files contain rotary frequencies in each layer. Some files contain the head, although it is tied.
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _convert(name: str, tensor: np.ndarray, expected: jax.ShapeDtypeStruct, folder: Path) -> jax.Array:
    shape = expected.shape[::-1] if _is_transposed(name) else expected.shape
    if tensor.shape != shape:
        raise CheckpointError(
            f"The model in {folder}: {name} has the shape {list(tensor.shape)}; its {CONFIG} requires {list(shape)}."
        )
    if tensor.dtype.name == "bfloat16":  # if TensorFlow is imported, this is TensorFlow's bfloat16, which JAX refuses
        tensor = tensor.view(np.uint16).view(jnp.bfloat16)
    array = jnp.asarray(tensor, expected.dtype)  # convert the dtype first, then transpose on the device
    return array.T if _is_transposed(name) else array


def _tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    safetensors = _safetensors()
    for file in _files(folder):
        try:
            with safetensors.safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  not iterable
                    yield name, opened.get_tensor(name)
        except FileNotFoundError as error:
            raise CheckpointError(f"The model in {folder} lacks the file {file.name}.") from error
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"The file {file} cannot be read: {error}") from error


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise CheckpointError(f"The folder {folder} has neither {WEIGHTS} nor {INDEX}.")
    shards = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(f"The file {folder / INDEX} has no weight_map.")
    return [folder / name for name in sorted(set(shards.values()))]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"The file {file} does not exist. A published model needs it.") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"The file {file} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"The file {file} does not contain a JSON object.")
    return fields


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _safetensors() -> Any:
    with extras.explain_import_error("A published model", "lm"):
        import safetensors
        import safetensors.numpy
    return safetensors
