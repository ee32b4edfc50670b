"""Tests of PPO: the loss, minibatches, and schedules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import PPO, PPOConfig
from rlframe.agents.networks import MLPConfig
from rlframe.agents.ppo import explained_variance
from rlframe.agents.recurrent import GRUConfig
from rlframe.errors import UsageError
from rlframe.types import FIRST, LAST, Sequence
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


def test_replay_spec_follows_the_config():
    spec = make(unroll_length=16).replay_spec
    assert (spec.kind, spec.item, spec.batch_size) == ("queue", Sequence(16), None)


def test_ratios_in_the_first_minibatch_are_one():
    logs = learned(make(normalize_advantages=False))[2]
    assert logs["clip_fraction"] == 0.0
    # If all ratios are 1, the policy loss is minus the mean advantage.
    agent = make(normalize_advantages=False)
    params, learner_state = started(agent)
    rollout = agent.rollout(params, batches.sequences(agent, params, learner_state).data)
    expected = -np.sum(rollout.advantage * rollout.mask) / np.sum(rollout.mask)
    np.testing.assert_allclose(logs["policy_loss"], expected, rtol=1e-4)


def test_loss_is_the_weighted_sum_of_its_terms():
    logs = learned(make(value_cost=0.7, entropy_cost=0.3))[2]
    expected = logs["policy_loss"] + 0.7 * logs["value_loss"] - 0.3 * logs["entropy"]
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)


def reference_loss(cfg, agent, params, data) -> float:
    """Compute the loss in plain Python, step by step, following the paper."""
    rows, length = data.reward.shape
    logits, new_value = np.zeros((rows, length + 1, 3)), np.zeros((rows, length + 1))
    state = data.agent_state
    for t in range(length + 1):
        if agent._stepped.is_recurrent:
            state = np.where((data.step_type[:, t] == FIRST)[:, None], 0.0, state)
            outputs, state = agent.network.apply(params, data.observation[:, t], state)
        else:
            outputs = agent.network.apply(params, data.observation[:, t])
        logits[:, t], new_value[:, t] = outputs[0], outputs[1][:, 0]
    old_value = np.concatenate([data.extras["value"], new_value[:, -1:]], axis=1)
    steps = []  # (advantage, target, ratio, new value, old value, entropy) of each unmasked step
    for row in range(rows):
        following = 0.0
        for t in reversed(range(length)):
            if data.step_type[row, t] == LAST:
                following = 0.0
                continue
            discount = cfg.discount * data.discount[row, t]
            error = data.reward[row, t] + discount * old_value[row, t + 1] - old_value[row, t]
            following = error + discount * cfg.gae_lambda * following
            probabilities = np.exp(logits[row, t]) / np.exp(logits[row, t]).sum()
            ratio = probabilities[data.action[row, t]] / np.exp(data.extras["log_prob"][row, t])
            entropy = -(probabilities * np.log(probabilities)).sum()
            target = following + old_value[row, t]
            steps.append((following, target, ratio, new_value[row, t], old_value[row, t], entropy))
    advantage, target, ratio, value, old, entropy = np.array(steps).T
    if cfg.normalize_advantages:
        advantage = (advantage - advantage.mean()) / advantage.std()
    clipped = np.clip(ratio, 1.0 - cfg.clip_epsilon, 1.0 + cfg.clip_epsilon)
    near = old + np.clip(value - old, -cfg.value_clip, cfg.value_clip)
    policy_loss = -np.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = 0.5 * np.maximum((value - target) ** 2, (near - target) ** 2).mean()
    assert ((ratio != clipped).any() and (ratio == clipped).any()) and ((near != value).any() and (near == value).any())
    return policy_loss + cfg.value_cost * value_loss - cfg.entropy_cost * entropy.mean()


@pytest.mark.parametrize(
    ("network", "normalizes"),
    [
        (SMALL, False),
        (GRUConfig(hidden=(4,), size=3), True),
        pytest.param(SMALL, True, marks=pytest.mark.system),
        pytest.param(GRUConfig(hidden=(4,), size=3), False, marks=pytest.mark.system),
    ],
)
def test_loss_matches_plain_python_implementation(network, normalizes):
    values = {"discount": 0.9, "gae_lambda": 0.8, "value_clip": 0.5, "value_cost": 0.7, "entropy_cost": 0.3}
    cfg = dataclasses.replace(CONFIG, unroll_length=6, normalize_advantages=normalizes, **values)
    agent = PPO(cfg, VECTOR, DISCRETE, network)
    params, learner_state = started(agent)
    data, random = (
        batches.sequences(agent, params, learner_state, batch_size=3, length=6).data,
        np.random.RandomState(1),
    )
    step_type = np.array([[1, 1, 2, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2, 0], [1, 2, 0, 1, 1, 1, 2]], np.uint8)
    # The first LAST of each row is a termination, a truncation, and a termination.
    discount = np.where(step_type[:, 1:] == 2, [[0.0], [1.0], [0.0]], 1.0).astype(np.float32)
    shifted = {
        name: leaf + random.uniform(-0.6, 0.6, leaf.shape).astype(np.float32) for name, leaf in data.extras.items()
    }
    state = jax.tree.map(lambda leaf: leaf + 0.5, data.agent_state)
    data = data._replace(step_type=step_type, discount=discount, extras=shifted, agent_state=state)
    loss, _ = agent.minibatch_loss(params, learner_state, agent.rollout(params, data))
    np.testing.assert_allclose(loss, reference_loss(cfg, agent, params, data), rtol=1e-4)


def test_approx_kl_is_computed_from_the_ratios():
    agent = make()
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state)
    rows, moved = agent.rollout(params, batch.data), jax.tree.map(lambda leaf: 9.0 * leaf + 0.3, params)
    logged = agent.minibatch_loss(moved, learner_state, rows)[1]["approx_kl"]
    ratio = ratios(agent, moved, rows)[np.asarray(rows.mask) > 0]
    np.testing.assert_allclose(logged, np.mean(ratio - 1.0 - np.log(ratio)), rtol=1e-3)


@pytest.mark.system
def test_update_stops_at_target_kl():
    params, learner_state = started(make())
    batch = batches.sequences(make(), params, learner_state)
    whole, stopped = make(num_epochs=8), make(num_epochs=8, target_kl=1e-4)
    _, all_steps, logs = learn(whole, params, learner_state, batch)
    after, some, stopped_logs = learn(stopped, params, learner_state, batch)
    assert all_steps.opt_state[1].count == 8 and logs["approx_kl"] > 1e-4
    count = int(some.opt_state[1].count)
    assert 1 <= count < 8 and stopped_logs["minibatch_share"] == pytest.approx(count / 8)
    rows = stopped.rollout(params, batch.data)
    assert stopped.minibatch_loss(after, learner_state, rows)[1]["approx_kl"] > 1e-4
    expected = explained_variance(rows.value, rows.value + rows.advantage, rows.mask)
    np.testing.assert_allclose(logs["explained_variance"], expected, rtol=1e-4)


class WithoutLogs(PPO):
    def minibatch_loss(self, params, learner_state, rows):
        return super().minibatch_loss(params, learner_state, rows)[0], {}


def test_target_kl_is_rejected_if_the_loss_does_not_log_approx_kl():
    agent = WithoutLogs(dataclasses.replace(CONFIG, target_kl=0.1), VECTOR, DISCRETE, SMALL)
    params, learner_state = started(agent)
    with pytest.raises(
        UsageError, match="WithoutLogs: target_kl needs approx_kl among the logs of minibatch_loss, got loss"
    ):
        learn(agent, params, learner_state, batches.sequences(agent, params, learner_state))


class WrongRollout(PPO):
    def rollout(self, params, data):
        rollout = super().rollout(params, data)
        return rollout.observation, rollout.advantage


def test_rollout_without_the_required_fields_is_rejected():
    agent = WrongRollout(CONFIG, VECTOR, DISCRETE, SMALL)
    params, learner_state = started(agent)
    with pytest.raises(
        UsageError, match="WrongRollout.rollout must return a Rollout.*; got a tuple without value, advantage"
    ):
        learn(agent, params, learner_state, batches.sequences(agent, params, learner_state))


def test_explained_variance_uses_only_unmasked_steps():
    targets, mask = np.array([1.0, 2.0, 3.0, 99.0], np.float32), np.array([1.0, 1.0, 1.0, 0.0], np.float32)
    assert explained_variance(targets - 5.0, targets, mask) == 1.0
    assert explained_variance(np.zeros(4, np.float32), targets, mask) == 0.0
    values = np.array([1.0, 2.0, 4.0, 0.0], np.float32)
    np.testing.assert_allclose(explained_variance(values, targets, mask), 1 - np.var([0, 0, -1]) / np.var([1, 2, 3]))
    assert explained_variance(values, np.ones(4, np.float32), mask) == 0.0


def test_ignored_actions_do_not_change_the_update():
    def disturbed(data):
        ignored = data.step_type[:, :-1] == LAST
        assert ignored.any()
        action = np.where(ignored, (data.action + 1) % 3, data.action)
        reward = np.where(ignored, 1e3, data.reward).astype(np.float32)
        log_prob = np.where(ignored, -7.0, data.extras["log_prob"]).astype(np.float32)
        return data._replace(action=action, reward=reward, extras={**data.extras, "log_prob": log_prob})

    assert_same_update(learned(make()), learned(make(), disturbed))


def test_truncated_episode_bootstraps_and_terminated_episode_does_not():
    agent = make(gae_lambda=1.0, discount=1.0)
    params, learner_state = started(agent)
    data = batches.sequences(agent, params, learner_state, batch_size=1, length=2).data
    data = data._replace(step_type=np.array([[1, 2, 0]], np.uint8), reward=np.array([[3.0, 9.0]], np.float32))
    value = data.extras["value"][0]
    truncated = agent.rollout(params, data._replace(discount=np.ones((1, 2), np.float32))).advantage
    terminated = agent.rollout(params, data._replace(discount=np.array([[0.0, 1.0]], np.float32))).advantage
    np.testing.assert_allclose(truncated, [3.0 + value[1] - value[0], 0.0], rtol=1e-5)
    np.testing.assert_allclose(terminated, [3.0 - value[0], 0.0], rtol=1e-5)


def test_batch_with_fewer_rows_than_minibatches_is_rejected():
    agent = make(num_minibatches=33)
    with pytest.raises(UsageError, match=r"PPO: num_minibatches=33 is above the number of rows in a batch \(32\)"):
        agent.check_num_envs(4)
    agent.check_num_envs(5)


def test_schedule_counts_a_smaller_batch_as_a_fraction_of_a_step():
    agent = make(learning_rate="linear:1e-2:0", total_learner_steps=2, envs_per_batch=8)
    params, learner_state = started(agent)
    rates = []
    for _ in range(4):
        batch = batches.sequences(agent, params, learner_state)  # 4 environments
        params, learner_state, logs = learn(agent, params, learner_state, batch)
        rates.append(float(logs["learning_rate"]))
    np.testing.assert_allclose(rates, 1e-2 * np.array([1.0, 0.75, 0.5, 0.25]), rtol=1e-6)
    assert learner_state.steps == 2.0
    whole = make(learning_rate="linear:1e-2:0", total_learner_steps=2)
    assert learn(whole, params, whole.initial_learner_state(params), batch)[1].steps == 1.0


def test_max_staleness_of_the_replay_is_zero_by_default():
    assert make().replay_spec.max_staleness == 0
    assert make(max_staleness=2).replay_spec.max_staleness == 2
    with pytest.raises(UsageError, match="max_staleness must be at least 0"):
        make(max_staleness=-1)


@pytest.mark.system
def test_loop_for_images_gives_the_same_result_as_the_scan(monkeypatch):
    cfg = dataclasses.replace(CONFIG, num_epochs=2, num_minibatches=4)
    looped = PPO(cfg, IMAGE, DISCRETE, SMALL_CNN)
    assert not looped.jit_learner_step
    result = learned(looped)
    monkeypatch.setattr(PPO, "jit_learner_step", True)
    scanned = learned(PPO(cfg, IMAGE, DISCRETE, SMALL_CNN))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), result[0], scanned[0])
    assert result[2].keys() == scanned[2].keys()
    np.testing.assert_allclose(result[2]["loss"], scanned[2]["loss"], rtol=1e-3)


class OnlyValues(PPO):
    """A PPO whose loss trains only the value function."""

    def minibatch_loss(self, params, learner_state, rows):
        _, value = self.network.apply(params, rows.observation)
        return jnp.mean(jnp.square(value - 3.0)), {"value": jnp.mean(value)}


@pytest.mark.system
@pytest.mark.parametrize("observation_spec", [VECTOR, pytest.param(IMAGE, marks=pytest.mark.system)])
def test_subclass_can_replace_the_loss(observation_spec):
    cfg = dataclasses.replace(CONFIG, num_epochs=2, num_minibatches=2, learning_rate=1e-3)
    network = SMALL if observation_spec is VECTOR else SMALL_CNN
    params, learner_state = started(PPO(cfg, observation_spec, DISCRETE, network))
    results = {}
    for cls in (PPO, OnlyValues):
        agent = cls(cfg, observation_spec, DISCRETE, network)
        batch = batches.sequences(agent, params, learner_state)
        results[cls], _, logs = learn(agent, params, learner_state, batch)
    assert set(logs) == {"loss", "value", "learning_rate", "explained_variance"}
    batch = batches.sequences(agent, params, learner_state)
    before, after, theirs = (
        agent.network.apply(tree, batch.data.observation[:, 0]) for tree in (params, results[OnlyValues], results[PPO])
    )
    assert np.mean(np.abs(after[1] - 3.0)) < np.mean(np.abs(before[1] - 3.0))
    assert np.any(theirs[0] != before[0])
    if observation_spec is VECTOR:  # the heads have separate layers, so the policy did not change
        np.testing.assert_array_equal(after[0], before[0])


class Frozen(PPO):
    def apply_gradients(self, params, grads, learner_state):
        return params, learner_state.opt_state, {"size": sum(leaf.size for leaf in jax.tree.leaves(grads))}


class Flipped(PPO):
    def minibatch_gradients(self, params, learner_state, rows):
        logs, grads = super().minibatch_gradients(params, learner_state, rows)
        return logs, jax.tree.map(jnp.negative, grads)


def test_subclass_may_override_each_part_of_a_learner_step():
    agent = Frozen(CONFIG, VECTOR, DISCRETE, SMALL)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state)
    same, state, logs = learn(agent, params, learner_state, batch)
    batches.assert_trees_equal(same, params)
    assert state.steps == 1 and logs["size"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    there, _, _ = learn(make(), params, learner_state, batch)
    back, _, _ = learn(Flipped(CONFIG, VECTOR, DISCRETE, SMALL), params, learner_state, batch)
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a - c, c - b, atol=1e-5), there, back, params)


def test_gradients_are_clipped_by_their_global_norm():
    agent = make(max_grad_norm=0.5)
    updates, _ = agent.optimizer.update(jnp.array([30.0, 40.0]), agent.optimizer.init(jnp.zeros(2)), steps=0)
    # Adam's first step has size 1 for every norm, so compare its first moment.
    clipped = agent.optimizer.update(jnp.array([30.0, 40.0]), agent.optimizer.init(jnp.zeros(2)), steps=0)[1][1].mu
    np.testing.assert_allclose(clipped, 0.1 * np.array([0.3, 0.4]), rtol=1e-5)
    assert updates.shape == (2,)


def test_schedules_of_learning_rate_clip_range_and_entropy_cost_reach_zero():
    falling = {"learning_rate": "linear:1e-2:0", "clip_epsilon": "linear:0.2:0", "entropy_cost": "linear:0.1:0"}
    agent = make(**falling, total_learner_steps=10)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state)
    for steps, left in [(0, 1.0), (4, 0.6), (10, 0.0), (15, 0.0)]:
        changed, _, logs = learn(agent, params, learner_state._replace(steps=jnp.int32(steps)), batch)
        for name, start in (("learning_rate", 1e-2), ("clip_epsilon", 0.2), ("entropy_cost", 0.1)):
            np.testing.assert_allclose(logs[name], start * left, rtol=1e-5)
        loss = logs["policy_loss"] + agent.cfg.value_cost * logs["value_loss"] - 0.1 * left * logs["entropy"]
        np.testing.assert_allclose(logs["loss"], loss, rtol=1e-5)
        if not left:
            batches.assert_trees_equal(changed, params)
        # Change the parameters, so that the ratios are not 1. A smaller clip range clips more ratios.
        moved = jax.tree.map(lambda leaf: 1.1 * leaf + 0.01, params)
        rows = agent.rollout(params, batch.data)
        clipped = agent.minibatch_loss(moved, learner_state._replace(steps=jnp.int32(steps)), rows)[1]["clip_fraction"]
        ratio = np.abs(ratios(agent, moved, rows) - 1.0)
        np.testing.assert_allclose(clipped, np.mean(ratio[rows.mask > 0] > 0.2 * left), rtol=1e-5)


def ratios(agent, params, rows):
    logits, _ = agent.network.apply(params, rows.observation)
    return np.exp(agent.distribution.log_prob(logits, rows.sample) - rows.log_prob)


def test_continuous_action_is_clipped_to_the_bounds_and_the_unclipped_sample_is_stored():
    agent = make(action_spec=BOX)
    params, learner_state = started(agent)
    output = batches.act(agent, params, learner_state, batch_size=200)
    low, high = BOX.minimum, BOX.maximum
    assert np.all(output.action >= low) and np.all(output.action <= high)
    np.testing.assert_allclose(output.action, agent.distribution.to_action(output.extras["sample"]))
    assert np.any(np.abs(output.extras["sample"]) > 1.0)
    assert learned(agent)[2]["clip_fraction"] == 0.0  # the learner uses the sample, not the clipped action


def test_probability_of_the_rewarded_action_increases():
    agent = make(num_epochs=10, gae_lambda=0.0, discount=0.0, learning_rate=3e-2)
    params, learner_state = started(agent)
    batch = batches.sequences(agent, params, learner_state, batch_size=16)
    data = batch.data._replace(reward=(batch.data.action == 1).astype(np.float32))

    def probability(params):
        logits, _ = agent.network.apply(params, data.observation[:, 0])
        return float(jnp.mean(jax.nn.softmax(logits)[:, 1]))

    before = probability(params)
    step = jax.jit(agent.learner_step)
    for _ in range(5):
        params, learner_state, _ = step(params, learner_state, batch._replace(data=data))
    assert probability(params) > before + 0.2


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
def test_options_out_of_range_are_rejected_by_name(change):
    with pytest.raises(UsageError, match=f"PPOConfig.{next(iter(change))}"):
        PPOConfig(**change)
