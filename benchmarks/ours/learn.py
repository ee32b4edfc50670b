"""Time the Learner on a language model and its jitted update alone, in alternating turns. Print one JSON object.

The Learner draws batches from a full queue of the trajectory service. This includes requests, decoding and padding of
the responses, acknowledging leases, and publishing parameters. The update alone uses the same batches as device arrays.

python -m benchmarks.ours.learn small --seconds 5
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ours.decode import MODELS
from benchmarks.ours.trajectories import serving
from benchmarks.processor import Stopwatch
from benchmarks.report import median, processor
from rlframe import compilation
from rlframe.agents import GRPO, GRPOConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.trajectories import Group, TrajectoryBuffer, TrajectoryClient
from rlframe.types import Batch

GROUPS, GROUP_SIZE = 4, 8  # groups in a batch; sequences in a group
LENGTHS = 32, 128  # range of lengths in tokens, uniformly distributed; a batch is padded to its longest sequence
MAX_TOKENS = 128
TURNS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--seconds", type=float, default=5.0, help="total seconds for each way")
    parser.add_argument("--batches", type=int, default=8, help="batches that the update alone repeats")
    args = parser.parse_args()
    print(json.dumps(measure(args.model, args.seconds, args.batches)))


def measure(model: str, seconds: float, num_batches: int) -> dict[str, Any]:
    """Measure both ways. The update alone repeats `num_batches` batches.

    Returns:
        {way: tokens per second without padding} (medians over the turns), the fraction of padding, and `processor_us`,
        the processor time of the Learner and the service per token.
    """
    agent = GRPO(GRPOConfig(MODELS[model], max_tokens=MAX_TOKENS, batch_size=GROUPS * GROUP_SIZE))
    with serving(None) as server, TrajectoryClient(server.url) as client:
        client.register(batch_size=GROUPS * GROUP_SIZE, max_token_len=MAX_TOKENS, num_steps=1_000_000)
        rng = np.random.default_rng(0)
        post = functools.partial(_post, client, rng, agent.model_config.vocab_size)
        buffer = TrajectoryBuffer(server.url)
        learner = Learner(LearnerConfig(), agent, buffer)
        batches = []
        for _ in range(num_batches):  # compiles for the lengths of the batches
            post(1)
            batches.append(buffer.wait_for_batch(60.0))
            learner.step(batches[-1])
        alone = _Alone(agent, batches)
        rate = alone.run(seconds / TURNS)
        learned, bare = [], []
        for _ in range(TURNS):
            count = max(4, int(rate * seconds / TURNS / _tokens(batches)))
            post(count + 2)  # plus the batches that are fetched ahead
            learned.append(_learn(learner, buffer, count))
            bare.append(alone.run(seconds / TURNS))
        learner.close()
        buffer.close()
    padded = sum(batch.data.tokens.size for batch in batches)
    padding = 1 - sum(int(batch.data.lengths.sum()) for batch in batches) / padded
    found = {"learner": median(rate["steps_per_second"] for rate in learned), "processor_us": processor(learned)}
    return {**found, "alone": statistics.median(bare), "padding": padding}


def _post(client: TrajectoryClient, rng: np.random.Generator, vocab_size: int, batches: int) -> None:
    for _ in range(batches):
        groups = []
        for _ in range(GROUPS):
            tokens = [rng.integers(0, vocab_size, rng.integers(*LENGTHS) + 1).tolist() for _ in range(GROUP_SIZE)]
            masks = [[-100] * 8 + row[8:] for row in tokens]
            logprobs = [[1.0] * 8 + [-5.0] * (len(row) - 8) for row in tokens]
            groups.append(Group(tokens, masks, rng.random(GROUP_SIZE).tolist(), inference_logprobs=logprobs))
        client.post(groups)


def _tokens(batches: list[Batch]) -> float:
    """Return the mean number of tokens in a batch."""
    return float(np.mean([batch.data.lengths.sum() for batch in batches]))


def _learn(learner: Learner, buffer: TrajectoryBuffer, count: int) -> dict[str, float]:
    tokens = 0
    with buffer.make_dataset() as dataset:
        learner.step(next(dataset))
        watch = Stopwatch()
        for batch in itertools.islice(dataset, count):
            learner.step(batch)
            tokens += int(batch.data.lengths.sum())
        learner.get_params()  # waits for the last update and fetches its parameters
        return watch.rate(tokens)


class _Alone:
    def __init__(self, agent: GRPO, batches: list[Batch]) -> None:
        self._lengths = [int(batch.data.lengths.sum()) for batch in batches]
        self._batches = [jax.tree.map(jnp.asarray, batch._replace(keys=(), params_version=())) for batch in batches]
        self._update = compilation.jit(agent.learner_step, donate_argnums=(0, 1), differentiates=True)
        params = agent.initial_params(jax.random.PRNGKey(0))
        self._state: Any = jax.tree.map(jnp.copy, (params, agent.initial_learner_state(params)))
        self.run(0.0)

    def run(self, seconds: float) -> float:
        """Return tokens per second."""
        tokens, start = 0, time.perf_counter()
        while not tokens or time.perf_counter() - start < seconds:
            for batch, length in zip(self._batches, self._lengths):
                *self._state, _ = self._update(*self._state, batch)
                tokens += length
            jax.block_until_ready(self._state)
        return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
