"""Sampling of tokens, and an engine that answers many requests in one batch. The steps of a request:

    engine = DecodeEngine(config, params, EngineConfig(slots=8))
    handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=32))    # slots.py: a `Handle` with a future
      DecodeEngine._fill                # engine.py: a waiting request gets a free slot
        Slots.fill                      # slots.py: the model reads the prompt (prefill); the first token is sampled
      DecodeEngine._decode              # repeated, for all slots together
        Slots.decode -> sampling.decode # sampling.py: several steps of the model, each of which samples a token
    handle.result()                     # an `Answer`: tokens, each with log-probability and version

`sampling.py` also computes top tokens and the scores of prompts.
"""

from rlframe.language.decoding.engine import DecodeEngine, generate
from rlframe.language.decoding.sampling import SamplingParams
from rlframe.language.decoding.slots import Answer, EngineConfig, Handle

__all__ = [
    "Answer",
    "DecodeEngine",
    "EngineConfig",
    "Handle",
    "SamplingParams",
    "generate",
]
