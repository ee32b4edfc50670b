"""Text that a server streams in pieces which end within characters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from rlframe.language import EngineConfig, ModelConfig
from rlframe.language.model import transformer
from tests.language.server.serving import TINY, Learner, client_of, serving_policy

SAID = "中é😀Я"  # 11 bytes, which all differ


def that_says(text: str) -> tuple[ModelConfig, Any]:
    """A model and parameters by which each byte of the text is followed by the next, and the last by the first."""
    model = dataclasses.replace(TINY, tie_word_embeddings=False)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), transformer.init(jax.random.key(0), model))
    said = text.encode()
    for place, (byte, after) in enumerate(zip(said, said[1:] + said[:1])):
        params["embed_tokens"][byte, place] = params["lm_head"][place, after] = 10.0
    return model, {**params, "norm": np.ones_like(params["norm"])}


@pytest.mark.system
def test_a_stream_in_pieces_that_end_within_characters_is_the_whole_text():
    learner, engine = Learner(), EngineConfig(slots=1, length=128)
    model, params = that_says(SAID)
    learner.published = 1, params
    assert engine.steps == 8  # by default; so the pieces end at every place of the text
    with serving_policy(learner, engine, model) as server, client_of(server) as client:
        for stop in (None, ["never said"]):
            options = {"model": "policy", "prompt": list(SAID.encode()), "max_tokens": 88, "stop": stop}
            options["temperature"] = 0
            assert client.completions.create(**options).choices[0].text == SAID * 8
            pieces = [event.choices[0].text for event in client.completions.create(**options, stream=True)]
            assert "".join(pieces) == SAID * 8 and len(pieces) > 8
