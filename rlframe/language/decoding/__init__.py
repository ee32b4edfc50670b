"""Sampling, and the engine that decodes many requests in one batch."""

from rlframe.language.decoding.engine import DecodeEngine
from rlframe.language.decoding.requests import Answer, Handle
from rlframe.language.decoding.sampling import Completion, SamplingParams, generate
from rlframe.language.decoding.slots import EngineConfig

__all__ = [
    "Answer",
    "Completion",
    "DecodeEngine",
    "EngineConfig",
    "Handle",
    "SamplingParams",
    "generate",
]
