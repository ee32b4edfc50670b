"""PPO: what enters its loss, how it goes over the data, and what anneals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import PPO, PPOConfig
from rlframe.agents.networks import MLPConfig
from rlframe.errors import UsageError
from rlframe.types import LAST, Sequence
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, IMAGE, SMALL_CNN, VECTOR, learn, started

CONFIG = PPOConfig(unroll_length=8, num_epochs=1, num_minibatches=1, learning_rate=1e-2)
SMALL = MLPConfig(hidden=(8,))


def make(cfg=CONFIG, action_spec=DISCRETE, **changes) -> PPO:
    return PPO(dataclasses.replace(cfg, **changes), VECTOR, action_spec, SMALL)


def learned(agent, change=lambda data: data, seed=0):
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, seed=seed)
    batch = batch._replace(data=change(batch.data))
    return learn(agent, params, learner_state, batch)


def assert_same_update(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), left[0], right[0])


def test_what_it_asks_of_the_replay():
    spec = make(unroll_length=16).replay_spec
    assert (spec.kind, spec.item, spec.batch_size) == ("queue", Sequence(16), None)


def test_the_first_pass_starts_on_policy():
    logs = learned(make(normalise_advantages=False))[2]
    assert logs["clip_fraction"] == 0.0
    # With every ratio 1 the policy loss is minus the mean advantage.
    agent = make(normalise_advantages=False)
    params, learner_state = started(agent)
    rollout = agent._rollout(params, batches.sequences(agent, params, learner_state).data)
    expected = -np.sum(rollout.advantage * rollout.mask) / np.sum(rollout.mask)
    np.testing.assert_allclose(logs["policy_loss"], expected, rtol=1e-4)


def test_the_loss_is_the_sum_of_its_parts():
    logs = learned(make(value_cost=0.7, entropy_cost=0.3))[2]
    expected = logs["policy_loss"] + 0.7 * logs["value_loss"] - 0.3 * logs["entropy"]
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)


def test_actions_that_the_environment_ignored_change_nothing():
    def disturbed(data):
        ignored = data.step_type[:, :-1] == LAST
        assert ignored.any()
        action = np.where(ignored, (data.action + 1) % 3, data.action)
        reward = np.where(ignored, 1e3, data.reward).astype(np.float32)
        log_prob = np.where(ignored, -7.0, data.extras["log_prob"]).astype(np.float32)
        return data._replace(action=action, reward=reward, extras={**data.extras, "log_prob": log_prob})

    assert_same_update(learned(make()), learned(make(), disturbed))


def test_a_terminated_episode_does_not_bootstrap_and_a_cut_one_does():
    agent = make(gae_lambda=1.0, discount=1.0)
    params, learner_state = started(agent)
    data = batches.sequences(agent, params, learner_state, batch_size=1, length=2).data
    data = data._replace(step_type=np.array([[1, 2, 0]], np.uint8), reward=np.array([[3.0, 9.0]], np.float32))
    value = data.extras["value"][0]
    cut = agent._rollout(params, data._replace(discount=np.ones((1, 2), np.float32))).advantage
    ended = agent._rollout(params, data._replace(discount=np.array([[0.0, 1.0]], np.float32))).advantage
    np.testing.assert_allclose(cut, [3.0 + value[1] - value[0], 0.0], rtol=1e-5)
    np.testing.assert_allclose(ended, [3.0 - value[0], 0.0], rtol=1e-5)


def test_one_epoch_visits_every_row_once():
    agent = make(num_epochs=3, num_minibatches=4)
    indices = np.asarray(agent._minibatches(jax.random.PRNGKey(0), 32)).reshape(3, 32)
    for epoch in indices:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(32))
    assert not np.array_equal(indices[0], indices[1])


def test_rows_that_do_not_divide_into_minibatches_leave_a_few_others_out_of_each_epoch():
    agent = make(num_epochs=3, num_minibatches=5)
    indices = np.asarray(agent._minibatches(jax.random.PRNGKey(0), 32)).reshape(3, 30)
    assert all(len(set(epoch)) == 30 for epoch in indices.tolist())
    assert len({frozenset(epoch) for epoch in indices.tolist()}) == 3
    learned(agent)


def test_fewer_rows_than_minibatches_are_refused():
    with pytest.raises(UsageError, match=r"32 steps .* cannot fill num_minibatches=33"):
        learned(make(num_minibatches=33))


def test_a_replay_of_ppo_holds_what_the_newest_version_acted_unless_told_otherwise():
    assert make().replay_spec.max_staleness == 0
    assert make(max_staleness=2).replay_spec.max_staleness == 2
    with pytest.raises(UsageError, match="max_staleness must be at least 0"):
        make(max_staleness=-1)


def test_the_loop_for_images_gives_what_the_scan_gives(monkeypatch):
    cfg = dataclasses.replace(CONFIG, num_epochs=2, num_minibatches=4)
    looped = PPO(cfg, IMAGE, DISCRETE, SMALL_CNN)
    assert not looped.jit_learner_step
    result = learned(looped)
    monkeypatch.setattr(PPO, "jit_learner_step", True)
    scanned = learned(PPO(cfg, IMAGE, DISCRETE, SMALL_CNN))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), result[0], scanned[0])
    assert result[2].keys() == scanned[2].keys()
    np.testing.assert_allclose(result[2]["loss"], scanned[2]["loss"], rtol=1e-3)


def test_gradients_are_clipped_by_their_global_norm():
    agent = make(max_grad_norm=0.5)
    updates, _ = agent.optimizer.update(jnp.array([30.0, 40.0]), agent.optimizer.init(jnp.zeros(2)))
    # Adam's first step has size 1 whatever the norm, so look at its first moment instead.
    clipped = agent.optimizer.update(jnp.array([30.0, 40.0]), agent.optimizer.init(jnp.zeros(2)))[1][1].mu
    np.testing.assert_allclose(clipped, 0.1 * np.array([0.3, 0.4]), rtol=1e-5)
    assert updates.shape == (2,)


def test_learning_rate_and_clip_anneal_to_zero_over_the_run():
    agent = make(anneal_learning_rate=True, anneal_clip=True, total_learner_steps=10, clip_epsilon=0.2)
    for steps, left in [(0, 1.0), (4, 0.6), (10, 0.0), (15, 0.0)]:
        schedules = agent._schedules(jnp.int32(steps))
        np.testing.assert_allclose(schedules.learning_rate, 1e-2 * left, rtol=1e-5)
        np.testing.assert_allclose(schedules.clip_epsilon, 0.2 * left, rtol=1e-5)


def test_without_a_total_nothing_anneals():
    schedules = make(anneal_learning_rate=True)._schedules(jnp.int32(1000))
    np.testing.assert_allclose(schedules.learning_rate, 1e-2)


def test_a_continuous_action_is_inside_its_bounds_and_its_sample_is_kept():
    agent = make(action_spec=BOX)
    params, learner_state = started(agent)
    output = batches.act(agent, params, learner_state, batch_size=200)
    low, high = BOX.minimum, BOX.maximum
    assert np.all(output.action >= low) and np.all(output.action <= high)
    np.testing.assert_allclose(output.action, agent.policy.to_action(output.extras["sample"]))
    assert np.any(np.abs(output.extras["sample"]) > 1.0)
    assert learned(agent)[2]["clip_fraction"] == 0.0  # the learner scores the sample, not the clipped action


def test_repeating_a_rewarded_action_makes_it_likelier():
    agent = make(num_epochs=10, gae_lambda=0.0, discount=0.0, learning_rate=3e-2)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, batch_size=16)
    data = batch.data._replace(reward=(batch.data.action == 1).astype(np.float32))

    def chance(params):
        logits, _ = agent.network.apply(params, data.observation[:, 0])
        return float(jnp.mean(jax.nn.softmax(logits)[:, 1]))

    before = chance(params)
    step = jax.jit(agent.learner_step)
    for _ in range(5):
        params, learner_state, _ = step(params, learner_state, batch._replace(data=data))
    assert chance(params) > before + 0.2


@pytest.mark.parametrize(
    "change",
    [
        {"unroll_length": 0},
        {"discount": 1.5},
        {"gae_lambda": -0.1},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"clip_epsilon": float("nan")},
    ],
)
def test_options_out_of_range_are_refused_by_name(change):
    with pytest.raises(UsageError, match=f"PPOConfig.{next(iter(change))}"):
        PPOConfig(**change)
