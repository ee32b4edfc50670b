"""Language models: architecture, weights, tokenizers, sampling, and the engine that decodes. See `docs/llm.md`."""

from rlframe.lm.config import ModelConfig, RopeScaling
from rlframe.lm.engine import Engine, EngineConfig
from rlframe.lm.requests import Answer, Handle
from rlframe.lm.sampling import Completion, SamplingParams, generate

__all__ = [
    "Answer",
    "Completion",
    "Engine",
    "EngineConfig",
    "Handle",
    "ModelConfig",
    "RopeScaling",
    "SamplingParams",
    "generate",
]
