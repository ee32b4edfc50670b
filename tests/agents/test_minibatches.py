"""Epochs of minibatches: which rows are learned from, for whichever agent."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import GRPO, PPO, Agent, GRPOConfig, PPOConfig
from rlframe.agents.minibatches import MinibatchUpdates, ravel, unraveller
from rlframe.errors import UsageError
from rlframe.language import ModelConfig
from tests.agents import batches
from tests.agents.batches import DISCRETE, VECTOR, learn, started
from tests.agents.token_batches import token_batch


def updates(num_minibatches, num_epochs=3):
    return MinibatchUpdates(PPO(PPOConfig(), VECTOR, DISCRETE), lambda params, data: data, num_epochs, num_minibatches)


def test_one_epoch_visits_every_row_once():
    indices = np.asarray(updates(4).indices(jax.random.PRNGKey(0), 32)).reshape(3, 32)
    for epoch in indices:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(32))
    assert not np.array_equal(indices[0], indices[1])


def test_rows_that_do_not_divide_into_minibatches_leave_a_few_others_out_of_each_epoch():
    indices = np.asarray(updates(5).indices(jax.random.PRNGKey(0), 32)).reshape(3, 30)
    assert all(len(set(epoch)) == 30 for epoch in indices.tolist())
    assert len({frozenset(epoch) for epoch in indices.tolist()}) == 3


def test_ravel_and_unravel_are_inverse_and_refuse_several_dtypes():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": (jnp.float32(7.0), jnp.zeros((0, 2)))}
    assert ravel(tree).shape == (7,)
    batches.assert_trees_equal(unraveller(tree)(ravel(tree)), tree)
    with pytest.raises(UsageError, match="one dtype, got bfloat16, float32"):
        ravel({"a": jnp.zeros(2), "b": jnp.zeros(2, jnp.bfloat16)})


@dataclasses.dataclass(frozen=True)
class MeanConfig:
    learning_rate: float = 0.1


class MeanAgent(Agent):
    """Learns the mean reward, several epochs from each batch; counts the updates of its state."""

    config_cls = MeanConfig

    @functools.cached_property
    def _updates(self):
        return MinibatchUpdates(self, lambda params, data: data.reward, num_epochs=20, num_minibatches=4)

    def initial_params(self, rng):
        return {"mean": jnp.zeros(()), "unused": jnp.ones(2)}

    def initial_learner_state(self, params):
        return super().initial_learner_state(ravel(params))

    def loss(self, params, learner_state, batch):
        return jnp.mean(jnp.square(params["mean"] - batch.data)), {"rows": jnp.float32(len(batch.data))}

    def learner_step(self, params, learner_state, batch):
        return self._updates(params, learner_state, batch)


class LoopedMeanAgent(MeanAgent):
    jit_learner_step = False


@pytest.mark.parametrize("cls", [MeanAgent, LoopedMeanAgent])
def test_an_agent_of_ones_own_learns_by_epochs_of_minibatches(cls):
    agent = cls(MeanConfig(), VECTOR, DISCRETE)
    params, learner_state = started(agent)
    batch = batches.transitions(agent, batch_size=32)
    kept = jax.tree.map(np.array, (params, learner_state))
    for _ in range(20):
        params, learner_state, logs = learn(agent, params, learner_state, batch)
    np.testing.assert_allclose(params["mean"], batch.data.reward.mean(), atol=0.1)
    np.testing.assert_array_equal(params["unused"], [1.0, 1.0])
    assert (int(learner_state.steps), float(logs["rows"])) == (20, 8.0)
    assert np.any(learner_state.rng != kept[1].rng)


class SeveralEpochs(GRPO):
    """GRPO that goes over each batch twice (mu = 2 in the paper). Advantages, of whole groups, come first."""

    @functools.cached_property
    def _updates(self):
        return MinibatchUpdates(self, self._with_advantages, num_epochs=2, num_minibatches=2)

    def _with_advantages(self, params, data):
        rows = self._rows(data)
        advantages = jnp.pad(rows.advantages, ((0, 0), (1, 0)))
        return data._replace(advantages=advantages, has_advantages=jnp.ones(len(data.tokens), bool))

    def initial_learner_state(self, params):
        state = super().initial_learner_state(params)
        return state._replace(opt_state=state.opt_state._replace(inner=self.optimizer.init(ravel(params))))

    def learner_step(self, params, learner_state, batch):
        return self._updates(params, learner_state, batch)


@pytest.mark.system
def test_grpo_may_go_over_a_batch_several_times():
    model = ModelConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    agent = SeveralEpochs(GRPOConfig(model, max_tokens=9, batch_size=4, learning_rate=1e-2))
    params, learner_state = started(agent)
    batch = token_batch(11, lengths=[9, 4, 6, 7], group=[0, 0, 1, 1])
    changed, learner_state, logs = learn(agent, params, learner_state, batch)
    assert learner_state.steps == 1 and np.isfinite(logs["loss"])
    assert np.any(ravel(changed) != ravel(params))
