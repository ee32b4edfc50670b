"""A custom replay buffer: `python examples/custom_replay_store.py` checks the buffer, and trains DQN with it.

`rlframe train --agent dqn --replay examples/custom_replay_store.py:ListReplay` also trains with it. The buffer keeps
items in a Python list, which is easy to change. It works in one process only. The built-in buffers are faster.
"""

import collections
import threading

import jax
import numpy as np

from rlframe import Actor, Evaluator, Inferencer, InferencerConfig, Learner, LearnerConfig, SyncEnv
from rlframe.agents import DQN
from rlframe.programs import make_experiment
from rlframe.replay import BaseReplayBuffer, ItemAssembler, ItemCounts, RateLimiter
from rlframe.testing import check_replay

LEARNER_STEPS = 10_000  # 20,000 environment steps, a fifth of the steps that solve CartPole


class ListReplay(BaseReplayBuffer):
    """A replay buffer that samples uniformly from the newest `capacity` items."""

    def __init__(self, agent, seed=0, capacity=None):
        self.spec = agent.replay_spec
        self._assembler = ItemAssembler(agent)  # makes items from steps
        self._limiter = RateLimiter(self.spec)  # decides when a batch may be sampled
        self._items = collections.deque(maxlen=capacity or self.spec.capacity)
        self._incarnations = collections.Counter()
        self._steps = self._added = self._sampled = 0
        self._rng = np.random.default_rng(seed)
        self._lock = threading.RLock()

    # An Actor calls these methods.

    def claim_rank(self, num_envs=None, rank=None):
        with self._lock:
            if rank is None:
                rank = next(r for r in range(len(self._incarnations) + 1) if r not in self._incarnations)
            self._incarnations[rank] += 1
            if num_envs is not None:
                self.open_segment(rank, num_envs)
            return rank, self._incarnations[rank] - 1

    def open_segment(self, rank, num_envs):
        with self._lock:
            self._assembler.open(rank, self._incarnations[rank] - 1, num_envs)

    def add(self, env_ids, step):
        with self._lock:
            self._steps += len(env_ids)
            items = self._assembler.add(env_ids, step)
            if items is not None:
                self._added += len(items.keys)
                leaves, treedef = jax.tree.flatten(items)
                self._items.extend(treedef.unflatten(rows) for rows in zip(*leaves))

    # A Learner calls these methods, and `make_dataset` of the base class.

    def sample(self):
        with self._lock:
            size, count = len(self._items), self.spec.batch_size
            if not self._limiter.may_sample(count, ItemCounts(size, self._added, self._sampled)):
                return None
            self._sampled += count
            chosen = [self._items[i] for i in self._rng.integers(size, size=count)]
            batch = jax.tree.map(lambda *rows: np.stack(rows), *chosen)
            return batch._replace(probabilities=np.full(count, 1 / size, np.float32))

    def stats(self):
        with self._lock:
            return {
                "items": len(self._items),
                "steps": self._steps,
                "added": self._added,
                "sampled": self._sampled,
                "evicted": self._added - len(self._items),
                "evicted_unsampled": 0,
                "dropped_priorities": 0,
                "bytes": 0,
            }


def main():
    check_replay(lambda agent, num_writers: ListReplay(agent), kinds=["uniform"])
    print("ListReplay passed all checks")

    preset = make_experiment("dqn", "CartPole-v1", preset="dqn/cartpole", total_learner_steps=LEARNER_STEPS)
    env = SyncEnv("CartPole-v1", preset.num_envs, "loop", seed=1)
    agent = DQN(preset.agent_config, env.observation_spec, env.action_spec)
    replay_buffer = ListReplay(agent)
    learner = Learner(LearnerConfig(seed=1), agent, replay_buffer)
    actor = Actor(env, Inferencer(InferencerConfig(), agent, learner), replay_buffer)
    while learner.learner_steps < LEARNER_STEPS:
        actor.step()
        while learner.learner_steps < LEARNER_STEPS and (batch := replay_buffer.sample()) is not None:
            learner.step(batch)
    greedy = Inferencer(InferencerConfig(greedy=True), agent, learner)
    evaluator = Evaluator(lambda seed: SyncEnv("CartPole-v1", 8, "loop", seed=seed), greedy, episodes=20)
    print(f"return {evaluator.evaluate()['return_mean']:.1f} over 20 episodes")
    evaluator.close()
    actor.close()


if __name__ == "__main__":
    main()
