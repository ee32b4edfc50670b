"""The transformer, its published weights, and tokenizers."""

from rlframe.language.model.config import ModelConfig, RopeScaling

__all__ = ["ModelConfig", "RopeScaling"]
