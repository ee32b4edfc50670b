"""A streamed text is correct even if each piece of tokens ends in the middle of a character."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from rlframe.language import EngineConfig, ModelConfig
from rlframe.language.model import transformer
from tests.language.server.serving import TINY, Learner, client_of, serving_policy

TEXT = "中é😀Я"  # 4 characters with 11 different bytes in UTF-8


def model_that_repeats(text: str) -> tuple[ModelConfig, Any]:
    """Return a model that generates the bytes of `text` again and again at temperature 0."""
    model = dataclasses.replace(TINY, tie_word_embeddings=False)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), transformer.init(jax.random.key(0), model))
    content = text.encode()
    for position, (byte, after) in enumerate(zip(content, content[1:] + content[:1])):
        params["embed_tokens"][byte, position] = params["lm_head"][position, after] = 10.0
    return model, {**params, "norm": np.ones_like(params["norm"])}


@pytest.mark.system
def test_streamed_pieces_with_split_characters_add_up_to_the_complete_text():
    learner, engine = Learner(), EngineConfig(slots=1, length=128)
    model, params = model_that_repeats(TEXT)
    learner.published = 1, params
    assert engine.steps == 8  # 8 and 11 have no common divisor, so some piece ends at each byte of the text
    with serving_policy(learner, engine, model) as server, client_of(server) as client:
        for stop in (None, ["never said"]):
            options = {"model": "policy", "prompt": list(TEXT.encode()), "max_tokens": 88, "stop": stop}
            options["temperature"] = 0
            assert client.completions.create(**options).choices[0].text == TEXT * 8
            pieces = [event.choices[0].text for event in client.completions.create(**options, stream=True)]
            assert "".join(pieces) == TEXT * 8 and len(pieces) > 8
