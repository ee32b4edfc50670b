"""Asynchronous environments add the same items to the replay as synchronous environments."""

from __future__ import annotations

import collections
import time

import dm_env
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe import Actor, AsyncEnv, Inferencer, InferencerConfig, ReplayBuffer, SyncEnv
from rlframe.types import FIRST, AgentOutput, ReplaySpec, Sequence, Transition
from tests.fakes import CountingAgent, CountingConfig, FixedParams

NUM_ENVS, LENGTH = 5, 6
SPEC = specs.Array((3,), np.int32, "observation")
ITEMS = {"transitions": Transition(3, 0.5), "sequences": Sequence(4, 2)}


class UnevenEnv(dm_env.Environment):
    """An environment with `LENGTH` steps per episode. Each step takes a random time.

    The observation is (seed of the environment, episode, step).
    """

    def __init__(self, seed: int) -> None:
        self._now = np.array([seed % 1_000_003, -1, 0], np.int32)
        self._random = np.random.default_rng(seed)

    def reset(self):
        self._now = self._now * [1, 1, 0] + np.array([0, 1, 0], np.int32)
        return dm_env.restart(self._now.copy())

    def step(self, action):
        time.sleep(self._random.exponential(0.001))
        self._now[2] += 1
        reward = float(10 * self._now[1] + self._now[2] + 0.25 * action)
        end = dm_env.termination if self._now[1] % 2 else dm_env.truncation
        return (end if self._now[2] == LENGTH else dm_env.transition)(reward, self._now.copy())

    def observation_spec(self):
        return SPEC

    def action_spec(self):
        return specs.DiscreteArray(2, np.int32, "action")


class RememberingAgent(CountingAgent):
    """An agent whose action depends on the step count of the episode. The replay is a queue of completed items."""

    def __init__(self, item, observation_spec, action_spec):
        super().__init__(CountingConfig(), observation_spec, action_spec)
        self._item = item

    def actor_step(self, rng, params, timestep, state):
        seen = state["seen"]
        return AgentOutput((seen % 2).astype(jnp.int32), {"seen": seen}), {"seen": seen + 1.0}

    @property
    def replay_spec(self):
        return ReplaySpec("queue", self._item, batch_size=1, capacity=20_000)


def act(make_pool, item, count):
    """Step until there are `count` items. Return the Actor, all items in order of completion, and the added steps."""
    pool = make_pool(seed=3)
    agent = RememberingAgent(ITEMS[item], pool.observation_spec, pool.action_spec)
    buffer = ReplayBuffer(agent)
    added = []
    buffer_add = buffer.add
    buffer.add = lambda env_ids, step: (added.append(step), buffer_add(env_ids, step))
    actor = Actor(pool, Inferencer(InferencerConfig(), agent, FixedParams({"w": np.float32(0.5)})), buffer)
    items = []
    while len(items) < count:
        actor.step()
        while (batch := buffer.sample()) is not None:
            items.append(jax.tree.map(np.asarray, batch.data))
    actor.close()
    return actor, items, added


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.system)])
@pytest.mark.parametrize("wait_num", [1, 3])
def test_asynchronous_environments_add_the_same_items_as_synchronous_environments(kind, wait_num, item):
    _, sync_items, _ = act(lambda seed: SyncEnv(UnevenEnv, NUM_ENVS, "loop", seed=seed), item, 300)
    actor, items, added = act(
        lambda seed: AsyncEnv(UnevenEnv, NUM_ENVS, wait_num, kind, seed=seed, num_workers=3), item, 150
    )
    expected, received = by_environment(sync_items), by_environment(items)
    assert received.keys() == expected.keys() and len(received) == NUM_ENVS
    for env, env_items in received.items():
        # the number of items of each environment depends on the speed of the machine
        num_common = min(len(env_items), len(expected[env]))
        assert num_common >= 10
        assert env_items[:num_common] == expected[env][:num_common]
    # Only completed steps are counted. Resets are not counted, because they ignore the action.
    stats = actor.stats()
    assert stats["env_steps"] == sum(int((step.next_timestep.step_type != FIRST).sum()) for step in added)
    assert stats["length_sum"] == stats["episodes"] * LENGTH


@pytest.mark.parametrize("item", ITEMS)
def test_envpool_adds_the_same_items_as_a_synchronous_run(item):
    _, sync_items, _ = act(lambda seed: SyncEnv("CartPole-v1", NUM_ENVS, "envpool", seed=seed), item, 400)
    _, items, _ = act(lambda seed: AsyncEnv("CartPole-v1", NUM_ENVS, 2, "envpool", seed=seed), item, 100)
    assert {as_bytes(one) for one in items} <= {as_bytes(one) for one in sync_items}
    assert len({as_bytes(one) for one in items}) == len(items)


def by_environment(items):
    found = collections.defaultdict(list)
    for one in items:
        found[int(one.observation.reshape(-1)[0])].append(as_bytes(one))
    return found


def as_bytes(item):
    return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(item))
