"""Time R2D2's Learner on sequences from a prioritized replay and its jitted update alone, in alternating turns.

The Learner samples a batch, learns from it, publishes, and updates priorities, one after the other. The update alone
uses the same batches as device arrays. Prints one JSON object.

python -m benchmarks.ours.sequences paper --seconds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.processor import Stopwatch
from benchmarks.report import median, processor
from rlframe import compilation
from rlframe.agents import R2D2, R2D2Config
from rlframe.learners import Learner, LearnerConfig
from rlframe.replay import ReplayBuffer
from rlframe.types import FIRST, LAST, MID, AgentOutput, Batch, Step, TimeStep, global_env_ids, specs

NUM_ENVS, NUM_STEPS = 64, 2_000  # environments; steps of each environment
TURNS = 4
KEPT = 8  # batches that the update alone cycles through
# Sequences of the paper and of the preset for CartPole, with one update per step, so that sampling never waits.
CONFIGS = {
    "paper": R2D2Config(update_period=1, replay_capacity=NUM_ENVS * NUM_STEPS),
    "small": R2D2Config(32, 32, 8, 16, update_period=1, replay_capacity=NUM_ENVS * NUM_STEPS),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", choices=CONFIGS)
    parser.add_argument("--seconds", type=float, default=5.0, help="total seconds for each way")
    args = parser.parse_args()
    print(json.dumps(measure(CONFIGS[args.config], args.seconds)))


def measure(cfg: R2D2Config, seconds: float) -> dict[str, Any]:
    """Measure both ways.

    Returns:
        {way: sequences per second} (medians over the turns), and `processor_us`, the Learner's processor time per
        sequence.
    """
    agent = R2D2(cfg, specs.Array((2,), np.float32), specs.DiscreteArray(2))
    buffer = ReplayBuffer(agent)
    _fill(agent, buffer)
    learner = Learner(LearnerConfig(), agent, buffer)
    batches = []
    for _ in range(KEPT):  # the first update compiles
        batches.append(buffer.sample())
        learner.step(batches[-1])
    alone = _Alone(agent, batches)
    rate = alone.run(seconds / TURNS)
    learned, bare = [], []
    for _ in range(TURNS):
        learned.append(_learn(learner, buffer, max(4, int(rate * seconds / TURNS / cfg.batch_size))))
        bare.append(alone.run(seconds / TURNS))
    learner.close()
    found = {"learner": median(rate["steps_per_second"] for rate in learned), "processor_us": processor(learned)}
    return {**found, "alone": statistics.median(bare)}


def _fill(agent: R2D2, buffer: ReplayBuffer) -> None:
    """Add random episodes of 100 steps."""
    buffer.claim_rank(NUM_ENVS)
    rng, env_ids = np.random.default_rng(0), global_env_ids(0, np.arange(NUM_ENVS))
    ones = np.ones(NUM_ENVS, np.float32)

    def timestep(t: int) -> TimeStep:
        place = t % 100
        step_type = np.full(NUM_ENVS, FIRST if place == 0 else LAST if place == 99 else MID, np.uint8)
        observation = rng.standard_normal((NUM_ENVS, 2)).astype(np.float32)
        return TimeStep(step_type, ones, ones * (place != 99), observation)

    now, state = timestep(0), agent.initial_state(NUM_ENVS)
    for t in range(1, NUM_STEPS):
        action, after = rng.integers(0, 2, NUM_ENVS).astype(np.int32), timestep(t)
        buffer.add(env_ids, Step(now, AgentOutput(action), state, 0, after))
        now = after


def _learn(learner: Learner, buffer: ReplayBuffer, count: int) -> dict[str, float]:
    watch, sequences = Stopwatch(), 0
    for _ in range(count):
        batch = buffer.sample()
        learner.step(batch)
        sequences += len(batch.keys)
    learner.get_params()  # waits for the last update and fetches its parameters
    return watch.rate(sequences)


class _Alone:
    def __init__(self, agent: R2D2, batches: list[Batch]) -> None:
        self._size = len(batches[0].keys)
        self._batches = [jax.tree.map(jnp.asarray, batch._replace(keys=(), params_version=())) for batch in batches]
        self._update = compilation.jit(agent.learner_step, donate_argnums=(0, 1), differentiates=True)
        params = agent.initial_params(jax.random.PRNGKey(0))
        self._state: Any = jax.tree.map(jnp.copy, (params, agent.initial_learner_state(params)))
        self.run(0.0)

    def run(self, seconds: float) -> float:
        """Return sequences per second."""
        sequences, start = 0, time.perf_counter()
        while not sequences or time.perf_counter() - start < seconds:
            for batch in self._batches:
                *self._state, _ = self._update(*self._state, batch)
                sequences += self._size
            jax.block_until_ready(self._state)
        return sequences / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
