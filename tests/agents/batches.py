"""Functions that create artificial batches with the shapes of real batches from a replay buffer."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
from dm_env import specs

from rlframe.agents.networks import NatureCNNConfig
from rlframe.types import AgentOutput, Batch, SequenceBatch, TimeStep, TransitionBatch

VECTOR = specs.Array((3,), np.float32, "vector")
IMAGE = specs.BoundedArray((2, 36, 36), np.uint8, 0, 255, "image")
DISCRETE = specs.DiscreteArray(3, name="action")
MULTI = specs.BoundedArray((2,), np.int32, 0, np.array([1, 2]), "action")
BOX = specs.BoundedArray((2,), np.float32, np.array([-2.0, 0.0]), np.array([2.0, 1.0]), "action")


SMALL_CNN = NatureCNNConfig(channels=(4, 4, 4), hidden=(16,))  # compiles quickly


def random_leaf(spec, lead, random):
    if np.issubdtype(spec.dtype, np.integer):
        high = 255 if spec.dtype == np.uint8 else spec.maximum
        return (random.rand(*lead, *spec.shape) * (np.asarray(high) + 1)).astype(spec.dtype)
    return random.randn(*lead, *spec.shape).astype(spec.dtype)


def random_tree(spec, lead, seed=0):
    random = np.random.RandomState(seed)
    return jax.tree.map(lambda leaf: random_leaf(leaf, lead, random), spec)


def timestep(observation_spec, batch_size, seed=0) -> TimeStep:
    ones = np.ones(batch_size, np.float32)
    observation = random_tree(observation_spec, (batch_size,), seed)
    return TimeStep(np.ones(batch_size, np.uint8), ones, ones, observation)


def act(agent, params, learner_state, batch_size=4, seed=0) -> AgentOutput:
    actor_params = agent.actor_params(params, learner_state)
    observed = timestep(agent.observation_spec, batch_size, seed)
    step = _jitted(agent, "actor_step")
    return step(jax.random.PRNGKey(seed), actor_params, observed, agent.initial_state(batch_size))[0]


def sequences(agent, params, learner_state, batch_size=4, length=8, seed=0) -> Batch:
    """Return a batch of unrolls whose actions come from the agent. One in eight timesteps is LAST."""
    random = np.random.RandomState(seed)
    observation = random_tree(agent.observation_spec, (batch_size, length + 1), seed)
    outputs, state = [], agent.initial_state(batch_size)
    step = _jitted(agent, "actor_step")
    actor_params = agent.actor_params(params, learner_state)
    for t in range(length):
        now = jax.tree.map(lambda leaf, t=t: leaf[:, t], observation)
        seen = timestep(agent.observation_spec, batch_size)._replace(observation=now)
        output, state = step(jax.random.PRNGKey(t), actor_params, seen, state)
        outputs.append(output)
    output = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves], axis=1), *outputs)
    step_type = np.where(random.rand(batch_size, length + 1) < 0.125, 2, 1).astype(np.uint8)
    data = SequenceBatch(
        observation=observation,
        step_type=step_type,
        action=output.action,
        reward=random.randn(batch_size, length).astype(np.float32),
        discount=np.ones((batch_size, length), np.float32),
        extras=output.extras,
        agent_state=agent.initial_state(batch_size),
    )
    return whole(data, batch_size)


def transitions(agent, batch_size=16, seed=0) -> Batch:
    random = np.random.RandomState(seed)
    data = TransitionBatch(
        observation=random_tree(agent.observation_spec, (batch_size,), seed),
        action=random_tree(agent.action_spec, (batch_size,), seed + 1),
        reward=random.randn(batch_size).astype(np.float32),
        discount=np.where(random.rand(batch_size) < 0.1, 0.0, 0.99).astype(np.float32),
        next_observation=random_tree(agent.observation_spec, (batch_size,), seed + 2),
        extras={},
    )
    return whole(data, batch_size)


def whole(data, batch_size) -> Batch:
    probabilities = np.linspace(0.1, 0.2, batch_size).astype(np.float32)
    return Batch(data, np.zeros((batch_size, 3), np.int64), probabilities, np.zeros(batch_size, np.int64))


def learn(agent, params, learner_state, batch):
    """Do one learner step. Jit it if the Learner would jit it, but do not donate the arguments."""
    step = _jitted(agent, "learner_step") if agent.jit_learner_step else agent.learner_step
    return step(params, learner_state, batch)


def gradients(agent, params, learner_state, batch):
    """Return the gradients of the loss, computed by a jitted function."""
    return _jitted(agent, "compute_gradients")(params, learner_state, batch)[1]


@functools.lru_cache(maxsize=32)
def _jitted(agent, method):
    """Return the jitted method of an agent. The cache avoids a new compilation for each call."""
    return jax.jit(getattr(agent, method))


def clip_to_norm(grads, largest):
    """Clip the gradients to the norm `largest`. Fail if their norm was not larger before."""
    norm = optax.global_norm(grads)
    assert norm > largest
    return jax.tree.map(lambda leaf: leaf * (largest / norm), grads)


def started(agent, seed=0):
    """Return (params, learner_state) at step 0."""
    params = agent.initial_params(jax.random.PRNGKey(seed))
    return params, agent.initial_learner_state(params)


def assert_trees_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)
