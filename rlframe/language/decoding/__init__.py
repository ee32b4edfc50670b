"""Sampling, and the engine that decodes many requests in one batch.

    engine = DecodeEngine(config, params, EngineConfig(slots=8))
    handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=32))    # requests.py: a `Handle`, a future
      DecodeEngine._fill                # engine.py: a waiting request gets a free slot
        Slots.fill                      # slots.py: the prompt goes through the model (prefill); a token is drawn
      DecodeEngine._decode              # again and again, for all slots together
        Slots.decode -> sampling.decode # sampling.py: some steps of the model, each of which draws a token
    handle.result()                     # an `Answer`: tokens, their log-probabilities, the versions of the parameters

`sampling.py` also has the likeliest tokens, and the scores of a prompt.
"""

from rlframe.language.decoding.engine import DecodeEngine, generate
from rlframe.language.decoding.requests import Answer, Handle
from rlframe.language.decoding.sampling import SamplingParams
from rlframe.language.decoding.slots import EngineConfig

__all__ = [
    "Answer",
    "DecodeEngine",
    "EngineConfig",
    "Handle",
    "SamplingParams",
    "generate",
]
