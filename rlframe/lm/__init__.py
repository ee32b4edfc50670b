"""Language models: architecture, weights, tokenizers, sampling, and the engine that decodes. See `docs/llm.md`."""

from rlframe.lm.config import ModelConfig, RopeScaling

__all__ = ["ModelConfig", "RopeScaling"]
