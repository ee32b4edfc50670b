"""Tests of gradient clipping, and of the optimizer of agents that learn from minibatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents import PPO, PPOConfig
from rlframe.agents.minibatches import MinibatchAgent
from rlframe.agents.networks import MLPConfig
from rlframe.agents.schedules import clip_gradients
from tests.agents.batches import DISCRETE, VECTOR, started


def test_gradients_are_clipped_before_the_optimizer():
    grads = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    for limit, expected in ((5.0, [-3.0, -4.0]), (100.0, [-30.0, -40.0]), (None, [-30.0, -40.0])):
        optimizer = clip_gradients(limit, optax.sgd(1.0))
        updates, _ = optimizer.update(grads, optimizer.init(grads))
        np.testing.assert_allclose([updates["a"][0], updates["b"][0]], expected, rtol=1e-6)


class PlainDescent(PPO):
    def make_optimizer(self):
        return optax.sgd(0.5)


class DefaultOptimizer(PPO):
    make_optimizer = MinibatchAgent.make_optimizer


def descent_of(agent_cls, steps):
    """Return the change of a parameter in a gradient step, if all gradients are 1."""
    cfg = PPOConfig(learning_rate="linear:0.1:0", total_learner_steps=10)
    agent = agent_cls(cfg, VECTOR, DISCRETE, net_factory=MLPConfig(hidden=(4,)))
    params, learner_state = started(agent)
    after, _, _ = agent.apply_gradients(
        params, jax.tree.map(jnp.ones_like, params), learner_state._replace(steps=jnp.float32(steps))
    )
    changes = jax.tree.leaves(jax.tree.map(lambda new, old: np.asarray(new - old).ravel(), after, params))
    return np.concatenate(changes)


def test_subclass_of_ppo_can_use_any_optimizer():
    np.testing.assert_allclose(descent_of(PlainDescent, 5), -0.5, rtol=1e-5)


def test_learning_rate_follows_the_number_of_learner_steps():
    np.testing.assert_allclose(descent_of(DefaultOptimizer, 0), -0.1, rtol=1e-4)  # Adam's first step has size 1
    np.testing.assert_allclose(descent_of(DefaultOptimizer, 5), -0.05, rtol=1e-4)
