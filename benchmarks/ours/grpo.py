"""Time the updates of GRPO on a random model. Prints one JSON object.

python -m benchmarks.ours.grpo half_billion --devices 2 --seconds 30
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.ours import simulate_devices


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("half_billion", "tiny"))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--shard-params", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    simulate_devices(args.devices)
    print(json.dumps(measure(args.model, args.devices, args.shard_params, args.seconds)))


def measure(model: str, devices: int, shard_params: bool, seconds: float) -> dict[str, Any]:
    """Return the tokens per second of updates, and the number of parameters."""
    import jax
    import numpy as np

    from benchmarks.processor import Stopwatch
    from rlframe.agents import GRPO, GRPOConfig
    from rlframe.language.model import ModelConfig
    from rlframe.learners import Learner, LearnerConfig
    from rlframe.types import Batch, TokenBatch

    if model == "tiny":
        shape, sequences, length, micro = ModelConfig(hidden_size=64, num_hidden_layers=2), 8, 32, 4
    else:  # the sizes of Qwen2.5-0.5B
        shape = ModelConfig(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4_864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            attention_bias=True,
            model_type="qwen2",
            dtype="bfloat16",
        )
        sequences, length, micro = 32, 512, 8
    cfg = GRPOConfig(
        model=shape,
        max_tokens=length,
        batch_size=sequences,
        micro_batch_size=micro,
        remat=True,
        logits_chunk=128,
        kl_cost=0.0,
        total_learner_steps=1_000,
    )
    agent, rng = GRPO(cfg), np.random.default_rng(0)
    mask = np.ones((sequences, length), np.float32)
    data = TokenBatch(
        tokens=rng.integers(0, shape.vocab_size, (sequences, length)).astype(np.int32),
        mask=mask,
        advantages=mask,
        has_advantages=np.zeros(sequences, bool),
        scores=rng.random(sequences).astype(np.float32),
        temperature=None,
        inference_logprobs=-3.0 * mask,
        ref_logprobs=None,
        lengths=np.full(sequences, length, np.int32),
        group=(np.arange(sequences) // 4).astype(np.int32),
    )
    batch = Batch(data, (), np.full(sequences, 1 / sequences, np.float32), np.zeros(sequences, np.int64))
    learner = Learner(LearnerConfig(devices=devices, shard_params=shard_params), agent, None)
    for _ in range(2):  # compile
        learner.step(batch)
    learner.wait_for_update()
    watch, updates = Stopwatch(), 0
    while updates < 2 or watch.seconds < seconds:
        learner.step(batch)
        updates += 1
    learner.wait_for_update()
    rate = watch.rate(updates * sequences * length)
    learner.close()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(learner.state[0]))
    return {"tokens_per_second": rate["steps_per_second"], "devices": devices, "parameters": parameters}


if __name__ == "__main__":
    main()
