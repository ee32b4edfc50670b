"""Tests of the example agent: it learns, and its file is short and uses only public names."""

from __future__ import annotations

import importlib.util
import pathlib
import pickle
import sys

import jax
import numpy as np
import pytest

from rlframe.types import LAST
from tests.agents import batches
from tests.agents.batches import DISCRETE, VECTOR, assert_trees_equal, started

PATH = pathlib.Path(__file__).parents[2] / "examples" / "custom_agent.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("custom_agent_example", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def agent(example):
    return example.Reinforce(example.ReinforceConfig(unroll_length=8, learning_rate=1e-2), VECTOR, DISCRETE)


def test_example_fits_in_eighty_lines():
    assert len(PATH.read_text().splitlines()) < 80


def test_example_agent_can_be_pickled(agent):
    copied = pickle.loads(pickle.dumps(agent))
    assert_trees_equal(started(copied), started(agent))


def test_returns_of_example_stop_at_termination_and_bootstrap_at_truncation(agent):
    params, learner_state = started(agent)
    data = batches.sequences(agent, params, learner_state, batch_size=2, length=3).data
    data = data._replace(
        reward=np.full((2, 3), 1.0, np.float32),
        step_type=np.array([[0, 1, LAST, 0], [0, 1, 1, 1]], np.uint8),
        discount=np.array([[1, 0, 1], [1, 1, 1]], np.float32),
    )
    baseline = np.full((2, 4), 10.0, np.float32)
    gamma = agent.cfg.discount
    last = 1 + gamma * 10.0
    expected = [[1 + gamma, 1.0, last], [1 + gamma * (1 + gamma * last), 1 + gamma * last, last]]
    np.testing.assert_allclose(agent._returns(data, baseline), expected, rtol=1e-5)


def test_example_agent_learns_the_rewarded_action(agent):
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, batch_size=16)
    data = batch.data
    batch = batch._replace(data=data._replace(reward=(data.action == 1).astype(np.float32), discount=0 * data.discount))
    step = jax.jit(agent.learner_step)
    for _ in range(150):
        params, learner_state, logs = step(params, learner_state, batch)
    assert np.isfinite(logs["loss"])
    logits, _ = agent.network.apply(params, data.observation[:, 0])
    assert float(np.mean(jax.nn.softmax(logits)[:, 1])) > 0.6
