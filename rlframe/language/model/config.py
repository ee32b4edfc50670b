"""Configuration of a decoder-only transformer of the Llama family. `config.json` uses the same field names."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.errors import UsageError, check_above, check_at_least, suggest

DTYPES = ("float32", "bfloat16")
ARCHITECTURES = {  # model_type -> name of the architecture in `config.json`
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary embeddings for longer contexts, as in Llama 3.1 (`"rope_type": "llama3"`)."""

    factor: float  # divisor of low frequencies
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # context length before the scaling, in tokens

    def __post_init__(self) -> None:
        check_at_least(self, 1, "factor", "original_max_position_embeddings")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise UsageError(
                "RopeScaling.low_freq_factor must be above 0 and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a model. The defaults give a byte-level model that two CPU cores train in minutes.

    A ModelConfig is hashable, so it can be a static argument of a jitted function.
    """

    vocab_size: int = 264  # `rlframe.language.model.tokenizers.ByteTokenizer` has 263 tokens
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2  # number of groups of query heads that share keys and values (Ainslie et al. 2023)
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True  # True: the head is the transposed embedding
    # Add biases to queries, keys and values, and to the output of attention. In qwen2, the output has no bias.
    attention_bias: bool = False
    max_position_embeddings: int = 2048  # tokens
    model_type: str = "llama"  # llama, qwen2 or qwen3
    dtype: str = "float32"  # float32 or bfloat16; norms, softmax and logits are always computed in float32

    def __post_init__(self) -> None:
        check_at_least(
            self,
            1,
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "max_position_embeddings"),
        )
        check_above(self, 0, "rope_theta", "rms_norm_eps")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"ModelConfig.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UsageError(
                f"ModelConfig.hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}) if head_dim is not given."
            )
        if self.head_size < 2 or self.head_size % 2:
            raise UsageError(
                f"ModelConfig.head_dim must be even, since rotary embeddings rotate pairs; got {self.head_size}."
            )
        if self.model_type not in ARCHITECTURES:
            raise UsageError(
                f"ModelConfig.model_type must be one of {', '.join(ARCHITECTURES)}, got {self.model_type!r}."
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"ModelConfig.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")

    @property
    def array_dtype(self) -> Any:
        """`dtype` as a JAX type. Do not pass the name to numpy: it can become TensorFlow's bfloat16."""
        import jax.numpy as jnp  # presets contain configs, and `rlframe status` must not import JAX

        return jnp.bfloat16 if self.dtype == "bfloat16" else jnp.float32

    @property
    def head_size(self) -> int:
        """Size of a head: `head_dim` if it is set, else its default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def output_bias(self) -> bool:
        """True if the attention's output has a bias. Qwen2 has biases only for queries, keys and values."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def normalizes_queries(self) -> bool:
        """True if queries and keys are normalized in each head before the rotary embedding, as in Qwen3."""
        return self.model_type == "qwen3"

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ModelConfig:
        """Make a config from the content of a `config.json` of transformers 4 or 5.

        Raises:
            UsageError: The architecture, or one of its options, is not supported.
        """
        model_type = fields.get("model_type")
        if model_type not in ARCHITECTURES:
            raise UsageError(
                f"config.json: model_type {model_type!r} is not supported. Supported: {', '.join(ARCHITECTURES)}."
                + suggest(str(model_type), ARCHITECTURES)
            )
        architectures = fields.get("architectures") or [ARCHITECTURES[model_type]]
        if architectures != [ARCHITECTURES[model_type]]:
            raise UsageError(
                f"config.json: architectures {architectures} are not supported for model_type {model_type!r}, only "
                f"{ARCHITECTURES[model_type]}."
            )
        _refuse_variants(fields)
        theta, scaling = _rope_fields(fields)
        known = {
            **{name: fields[name] for name in _PLAIN if fields.get(name) is not None},
            **dict(model_type=model_type, rope_theta=theta, rope_scaling=scaling, dtype=_read_dtype(fields)),
        }
        missing = [name for name in _NEEDED if name not in known]
        if missing:
            raise UsageError(f"config.json lacks {', '.join(missing)}.")
        if model_type == "qwen3":
            known.setdefault("head_dim", 128)  # transformers' default
        if known.get("head_dim", 0) * known["num_attention_heads"] == known["hidden_size"]:
            del known["head_dim"]  # equal to the default of `ModelConfig`
        known.setdefault("num_key_value_heads", known["num_attention_heads"])
        known.setdefault("tie_word_embeddings", False)  # transformers' default
        if model_type == "qwen2":
            known["attention_bias"] = True  # qwen2 always has these biases, but its config.json omits the field
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """Return the content of a `config.json`, which transformers and `from_json` can read."""
        fields = {**dataclasses.asdict(self), "head_dim": self.head_size}
        if self.rope_scaling is not None:
            fields["rope_scaling"]["rope_type"] = "llama3"
        if self.model_type == "qwen2":
            if not self.attention_bias:
                raise UsageError("A published qwen2 model has attention_bias. Save this model as model_type llama.")
            del fields["attention_bias"]  # Qwen2's config.json does not have this field
        dtype = fields.pop("dtype")
        return {
            "architectures": [ARCHITECTURES[self.model_type]],
            **fields,
            "hidden_act": "silu",
            "torch_dtype": dtype,
            "use_cache": True,
        }


_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"),
    "max_position_embeddings",
)
_PLAIN = (*_NEEDED, "num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias")


def _refuse_variants(fields: dict[str, Any]) -> None:
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UsageError(f"config.json: hidden_act {fields['hidden_act']!r} is not supported, only silu.")
    for name in ("mlp_bias", "use_sliding_window", "quantization_config"):
        if fields.get(name):
            raise UsageError(f"config.json: {name} = {fields[name]!r} is not supported.")


def _rope_fields(fields: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes rope_theta and the scaling into one field, rope_parameters.
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", fields.get("rope_theta", 10_000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UsageError(f"config.json: rope scaling {kind!r} is not supported, only llama3.")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if name not in scaling]
    if missing:
        raise UsageError(f"config.json: The rope scaling lacks {', '.join(missing)}.")
    return theta, RopeScaling(**{name: scaling[name] for name in names})


def _read_dtype(fields: dict[str, Any]) -> str:
    published = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    return "bfloat16" if published == "float16" else published  # float16 can overflow, because its range is smaller
