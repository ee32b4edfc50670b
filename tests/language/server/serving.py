"""Run a policy server in a thread. Its tiny model has random weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import openai

from rlframe.language import EngineConfig, ModelConfig
from rlframe.language.model import transformer
from rlframe.language.server import PolicyServer, PolicyServerConfig
from tests.waiting import wait_until

DEADLINE = 120.0  # seconds, enough for a busy machine
TINY = ModelConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
)
LONG = dataclasses.replace(TINY, max_position_embeddings=1 << 15)  # a model for long answers, which take seconds
ENGINE = EngineConfig(slots=4, steps=2, length=512, max_waiting=64)


@functools.cache
def params_of(seed: int) -> Any:
    """Return random parameters as numpy arrays, the form in which a learner publishes parameters."""
    return jax.tree.map(np.asarray, transformer.init(jax.random.key(seed), TINY))


class Learner:
    """A fake learner. The test sets the parameters that this learner publishes."""

    def __init__(self, version: int = 1) -> None:
        self.published = version, params_of(version)

    def publish(self, version: int) -> None:
        self.published = version, params_of(version)

    def get_params(self, known_version: int = -1) -> tuple[int, Any]:
        version, params = self.published
        return version, None if version == known_version else params


@contextlib.contextmanager
def serving_policy(
    learner: Any = None,
    engine: EngineConfig = ENGINE,
    model_config: ModelConfig = TINY,
    params: Any = None,
    tokenizer: Any = "byte",
    **options: Any,
) -> Iterator[PolicyServer]:
    """Run a policy server until the `with` block ends. If `run()` fails, raise its error."""
    config = PolicyServerConfig(**{"port": 0, "engine": engine, **options})
    params = params_of(0) if learner is None else params
    server = PolicyServer(config, model_config, tokenizer, learner, params)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        server.url(DEADLINE)
        wait_until(lambda: server.stats()["version"] >= 0, "no parameters came")
        yield server
    finally:
        server.stop()
        thread.join(DEADLINE)
        assert not thread.is_alive(), "run() did not end"
    if raised:
        raise raised[0]


def client_of(server: PolicyServer, **options: Any) -> openai.OpenAI:
    """Make a client of the `openai` package."""
    return openai.OpenAI(
        **{"base_url": server.url(), "api_key": "none", "timeout": DEADLINE, "max_retries": 0, **options}
    )
