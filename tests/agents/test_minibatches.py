"""Tests of epochs of minibatches: which rows are used, and when gradient steps stop."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import GRPO, PPO, TD3, Agent, GRPOConfig, PPOConfig
from rlframe.agents.minibatches import MinibatchUpdates
from rlframe.errors import UsageError
from rlframe.language import ModelConfig
from rlframe.types import Batch
from tests.agents import batches
from tests.agents.batches import DISCRETE, VECTOR, learn, started
from tests.agents.token_batches import token_batch


def updates(num_minibatches, num_epochs=3):
    agent = PPO(PPOConfig(), VECTOR, DISCRETE)
    return MinibatchUpdates(
        agent, lambda params, data: (data, {}), agent.minibatch_gradients, num_epochs, num_minibatches
    )


def test_one_epoch_visits_every_row_once():
    indices = np.asarray(updates(4).indices(jax.random.PRNGKey(0), 32)).reshape(3, 32)
    for epoch in indices:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(32))
    assert not np.array_equal(indices[0], indices[1])


def test_each_epoch_skips_different_rows_if_the_minibatches_do_not_contain_all_rows():
    indices = np.asarray(updates(5).indices(jax.random.PRNGKey(0), 32)).reshape(3, 30)
    assert all(len(set(epoch)) == 30 for epoch in indices.tolist())
    assert len({frozenset(epoch) for epoch in indices.tolist()}) == 3


@dataclasses.dataclass(frozen=True)
class MeanConfig:
    learning_rate: float = 0.1
    stop_at: float | None = None


class MeanAgent(Agent):
    """An agent that learns the mean reward in several epochs per batch, and counts its updates."""

    config_cls = MeanConfig

    @functools.cached_property
    def _updates(self):
        stops = None if self.cfg.stop_at is None else lambda logs: logs["mean"] > self.cfg.stop_at
        prepare = lambda params, data: (data.reward, {"rewards": jnp.sum(data.reward)})  # noqa: E731
        return MinibatchUpdates(self, prepare, self._gradients, num_epochs=20, num_minibatches=4, stops=stops)

    def initial_params(self, rng):
        return {"mean": jnp.zeros(()), "unused": jnp.ones(2, jnp.bfloat16)}

    def _gradients(self, params, learner_state, rows):
        logs = {"rows": jnp.float32(len(rows)), "mean": params["mean"]}
        return logs, jax.grad(lambda params: jnp.mean(jnp.square(params["mean"] - rows)))(params)

    def learner_step(self, params, learner_state, batch):
        return self._updates(params, learner_state, batch)


class LoopedMeanAgent(MeanAgent):
    jit_learner_step = False


@pytest.mark.parametrize("cls", [MeanAgent, LoopedMeanAgent])
def test_custom_agent_learns_in_epochs_of_minibatches(cls):
    agent = cls(MeanConfig(), VECTOR, DISCRETE)
    params, learner_state = started(agent)
    batch = batches.transitions(agent, batch_size=32)
    kept = jax.tree.map(np.array, (params, learner_state))
    for _ in range(20):
        params, learner_state, logs = learn(agent, params, learner_state, batch)
    np.testing.assert_allclose(params["mean"], batch.data.reward.mean(), atol=0.1)
    np.testing.assert_array_equal(params["unused"], [1.0, 1.0])
    assert params["unused"].dtype == jnp.bfloat16
    assert (int(learner_state.steps), float(logs["rows"])) == (20, 8.0)
    assert logs["rewards"] == pytest.approx(batch.data.reward.sum())
    assert np.any(learner_state.rng != kept[1].rng)


@pytest.mark.parametrize("cls", [MeanAgent, LoopedMeanAgent])
def test_optimizer_state_after_a_learner_step_has_the_structure_of_the_parameters(cls):
    agent = cls(MeanConfig(), VECTOR, DISCRETE)
    params, learner_state = started(agent)
    after, state, _ = learn(agent, params, learner_state, batches.transitions(agent, batch_size=32))
    structure = jax.tree.structure(learner_state.opt_state)
    assert jax.tree.structure(state.opt_state) == structure == jax.tree.structure(agent.optimizer.init(after))
    adam, before = state.opt_state[0], learner_state.opt_state[0]
    assert adam.count == 80 and adam.mu["unused"].shape == (2,) and adam.mu["mean"] != 0.0
    assert before.count == 0 and before.mu["mean"] == 0.0  # the arguments still exist, so they were not donated


@pytest.mark.parametrize("cls", [MeanAgent, LoopedMeanAgent])
def test_gradient_steps_above_the_limit_are_not_applied(cls):
    rewards = np.full(32, 10.0, np.float32)  # each step of Adam adds the learning rate, 0.1, to the mean
    results = []
    for stop_at in (None, 0.35, 0.0):
        agent = cls(MeanConfig(stop_at=stop_at), VECTOR, DISCRETE)
        params, learner_state = started(agent)
        batch = batches.transitions(agent, batch_size=32)
        batch = batch._replace(data=batch.data._replace(reward=rewards))
        params, state, logs = learn(agent, params, learner_state, batch)
        results.append((float(params["mean"]), int(state.opt_state[0].count), float(logs["mean"])))
    (_, count, _), stopped, at_once = results
    assert count == 80
    # Four steps are applied, at the means 0, 0.1, 0.2 and 0.3. The next mean, 0.4, is above the limit of 0.35.
    np.testing.assert_allclose(stopped, (0.4, 4, 0.2), rtol=1e-3)
    np.testing.assert_allclose(at_once, (0.1, 1, 0.05), rtol=1e-3)
    assert logs["minibatch_share"] == pytest.approx(1 / 80)


def test_gradient_step_contains_no_branch_if_it_runs_outside_of_a_scan():
    # On a CPU, the gradient of a convolution is nine times as slow inside a branch.
    agent = LoopedMeanAgent(MeanConfig(stop_at=0.35), VECTOR, DISCRETE)
    params, learner_state = started(agent)
    batch = batches.transitions(agent, batch_size=32)
    learn(agent, params, learner_state, batch)
    carry, rows, indices, _, _ = agent._updates._begin(params, learner_state, batch.data)
    step = jax.make_jaxpr(agent._updates._step)(carry, rows, indices[0], learner_state._replace(opt_state=()))
    assert "cond" not in str(step) and "select_n" in str(step)


@pytest.mark.parametrize(
    ("base", "name", "instead"),
    [
        (PPO, "loss", "minibatch_loss(params, learner_state, rows)"),
        (PPO, "compute_gradients", "minibatch_gradients(params, learner_state, rows)"),
        (TD3, "apply_gradients", "learner_step"),
        (TD3, "update_learner_state", "learner_step"),
    ],
)
def test_subclass_that_defines_an_unused_method_is_rejected(base, name, instead):
    with pytest.raises(UsageError, match=re.escape(f"Mine never calls {name}. Define {instead} instead.")):
        type("Mine", (base,), {name: getattr(base, name)})


class SeveralEpochs(GRPO):
    """GRPO that trains on each batch twice (mu = 2 in the paper). Advantages are computed before the first epoch."""

    @functools.cached_property
    def _updates(self):
        return MinibatchUpdates(self, self._with_advantages, self._gradients, num_epochs=2, num_minibatches=2)

    def _gradients(self, params, learner_state, rows):
        return self.compute_gradients(params, learner_state, Batch(rows, (), (), ()))

    def _with_advantages(self, params, data):
        rows = self._rows(data)
        advantages = jnp.pad(rows.advantages, ((0, 0), (1, 0)))
        return data._replace(advantages=advantages, has_advantages=jnp.ones(len(data.tokens), bool)), {}

    def learner_step(self, params, learner_state, batch):
        return self._updates(params, learner_state, batch)


@pytest.mark.system
def test_grpo_can_learn_from_a_batch_in_several_epochs():
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
    assert any(jax.tree.leaves(jax.tree.map(lambda new, old: bool(np.any(new != old)), changed, params)))
