"""Time the decode engine and the model's jitted decoding step alone, in alternating turns. Print one JSON object.

The step alone does only the unavoidable work: the model with its cache (donated), and the most likely token, for one
row per slot of the engine. It does not sample, stop, prefill, or fetch tokens before the last one. But it attends to
the whole cache, while the engine attends only to the part that its longest row uses.

python -m benchmarks.ours.decode small --seconds 5
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.processor import Stopwatch
from benchmarks.report import median, processor
from rlframe.language import DecodeEngine, EngineConfig, ModelConfig, SamplingParams
from rlframe.language.decoding.sampling import power_of_two
from rlframe.language.model import transformer

SLOTS = 32
PROMPTS, ANSWERS = (8, 16), (32, 128)  # range of lengths in tokens, uniformly distributed
TURNS = 4
SMALL = ModelConfig()
LARGE = ModelConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8)
MODELS = {"small": SMALL, "large": LARGE}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--seconds", type=float, default=5.0, help="total seconds for each way")
    args = parser.parse_args()
    print(json.dumps(measure(MODELS[args.model], args.seconds)))


def measure(config: ModelConfig, seconds: float) -> dict[str, Any]:
    """Measure both ways.

    Returns:
        {way: tokens per second} (medians over the turns), the engine's processor time per token, and the number of
        parameters.
    """
    params = transformer.init(jax.random.key(0), config)
    length = power_of_two(PROMPTS[1] + ANSWERS[1])
    engine = DecodeEngine(config, params, EngineConfig(slots=SLOTS, length=length))
    with engine:
        ways = {"engine": functools.partial(decode, engine), "alone": _alone(config, params, length)}
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for turn in range(TURNS + 1):
            for way, run in ways.items():
                rate = run(seconds / TURNS)
                if turn:  # the first turn compiles
                    measured[way].append(rate)
    found = {way: median(rate["steps_per_second"] for rate in rates) for way, rates in measured.items()}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {**found, "processor_us": processor(measured["engine"]), "parameters": parameters}


def decode(engine: DecodeEngine, seconds: float) -> dict[str, float]:
    """Return the token rate for requests of various lengths, some of which are always waiting."""
    rng = np.random.default_rng(0)
    handles: list[Any] = []

    def submit() -> None:
        prompt = rng.integers(0, 256, rng.integers(PROMPTS[0], PROMPTS[1] + 1)).tolist()
        sampling = SamplingParams(max_tokens=int(rng.integers(ANSWERS[0], ANSWERS[1] + 1)), seed=len(handles))
        handles.append(engine.submit(prompt, sampling))

    for _ in range(2 * SLOTS):
        submit()
    for handle in handles[:SLOTS]:  # reach a steady state in which requests start and end all the time
        handle.result()
        submit()
    watch, before, num_completed = Stopwatch(), engine.stats()["tokens"], SLOTS
    while watch.seconds < seconds:
        handles[num_completed].result()
        num_completed += 1
        submit()
    rate = watch.rate(engine.stats()["tokens"] - before)
    for handle in handles:
        handle.cancel()
    return rate


def _alone(config: ModelConfig, params: Any, length: int) -> Any:
    @functools.partial(jax.jit, static_argnames="span", donate_argnums=(1, 2))
    def step(params, token, cache, lengths, *, span):  # type: ignore[no-untyped-def]
        logits, cache = transformer.apply_cached(params, config, token, cache, lengths, span=span)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache, lengths + 1

    def run(seconds: float) -> dict[str, float]:
        steps, spent = 0, 0.0
        while spent < seconds:
            token = jnp.zeros((SLOTS, 1), jnp.int32)
            cache, lengths = transformer.init_cache(config, SLOTS, length), jnp.full(SLOTS, PROMPTS[1], jnp.int32)
            jax.block_until_ready((token, cache, lengths))
            start = time.perf_counter()
            for _ in range(ANSWERS[1]):
                token, cache, lengths = step(params, token, cache, lengths, span=length)
            jax.block_until_ready(token)
            spent += time.perf_counter() - start
            steps += ANSWERS[1]
        return {"steps_per_second": steps * SLOTS / spent}

    return run


if __name__ == "__main__":
    main()
