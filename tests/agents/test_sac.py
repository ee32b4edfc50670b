"""Tests of SAC: acting before and after the first update, the three losses, and the target critics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe.agents import SAC, SACConfig
from rlframe.agents.networks import MLPConfig, Network
from rlframe.agents.recurrent import LSTMConfig
from rlframe.agents.sac import SACParams
from rlframe.errors import UsageError
from rlframe.types import Transition
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, VECTOR, assert_trees_equal, learn, started


def make(**changes) -> SAC:
    cfg = {"batch_size": 16, "min_replay_size": 16, "learning_rate": 1e-2, **changes}
    return SAC(SACConfig(**cfg), VECTOR, BOX, MLPConfig((8,), "relu"))


def test_replay_spec_follows_the_config():
    spec = make(discount=0.9, update_period=4, replay_capacity=500).replay_spec
    assert (spec.kind, spec.item, spec.batch_size) == ("uniform", Transition(1, 0.9), 16)
    assert (spec.capacity, spec.min_size, spec.samples_per_insert) == (500, 16, 4.0)


def actions_after(steps, rows=20_000):
    agent = make()
    params, learner_state = started(agent)
    published = agent.actor_params(params, learner_state._replace(steps=jnp.int32(steps)))
    seen = batches.timestep(VECTOR, rows)
    return agent, params, seen, np.asarray(agent.actor_step(jax.random.PRNGKey(1), published, seen, ())[0].action)


@pytest.mark.system
def test_actions_are_uniform_until_the_first_update():
    actions = actions_after(0)[-1]
    for column, low, high in ((0, -2.0, 2.0), (1, 0.0, 1.0)):
        shares = np.histogram(actions[:, column], bins=4, range=(low, high))[0] / len(actions)
        np.testing.assert_allclose(shares, 0.25, atol=0.015)


def test_actions_are_from_the_policy_after_the_first_update():
    agent, params, seen, actions = actions_after(1)
    logits = agent._nets.policy_outputs(params.policy, seen.observation)
    expected = agent.distribution.to_action(agent.distribution.sample(jax.random.PRNGKey(1), logits))
    np.testing.assert_array_equal(actions, expected)


def test_actors_receive_only_the_policy():
    agent = make()
    params, learner_state = started(agent)
    published = agent.actor_params(params, learner_state)
    assert_trees_equal(published.policy, params.policy)
    assert len(jax.tree.leaves(published)) == len(jax.tree.leaves(params.policy)) + 1


def mlp(params, inputs, head):
    """Compute the output of one head of an `MLPConfig((n,), "relu")` network with NumPy."""
    torso, linear = params[f"torso{head}_dense0"], params[f"head{head}"]
    hidden = np.maximum(inputs @ np.asarray(torso["w"], np.float64) + torso["b"], 0.0)
    return hidden @ np.asarray(linear["w"], np.float64) + linear["b"]


def brute_force(agent, params, target_critics, batch, noises, entropy, min_log_std, max_log_std):
    """Return (critic loss, policy loss, temperature loss), computed in a loop. `entropy` is the target entropy."""
    data, temperature = batch.data, np.exp(float(params.log_temperature))
    half, middle = np.array([2.0, 0.5]), np.array([0.0, 0.5])
    losses = np.zeros(3)
    for i in range(len(data.reward)):

        def act(observation, noise):
            mean, log_std = np.split(mlp(params.policy, observation, 0), 2)
            log_std = np.clip(log_std, min_log_std, max_log_std)
            action = np.tanh(mean + np.exp(log_std) * noise)
            density = np.exp(-0.5 * noise**2) / np.sqrt(2 * np.pi) / np.exp(log_std) / (1 - action**2)
            return action, np.log(density).sum()

        def values(critics, observation, action):
            inputs = np.concatenate(
                [action, observation]
            )  # the network joins the leaves in alphabetical order of their keys
            return [mlp(critics, inputs, head)[0] for head in (0, 1)]

        next_action, next_log_prob = act(data.next_observation[i], noises[1][i])
        soft_value = min(values(target_critics, data.next_observation[i], next_action)) - temperature * next_log_prob
        target = data.reward[i] + data.discount[i] * soft_value
        given = (data.action[i] - middle) / half
        losses[0] += sum(0.5 * (value - target) ** 2 for value in values(params.critics, data.observation[i], given))
        action, log_prob = act(data.observation[i], noises[0][i])
        losses[1] += temperature * log_prob - min(values(params.critics, data.observation[i], action))
        losses[2] += -temperature * (log_prob + entropy)
    return losses / len(data.reward)


@pytest.mark.parametrize("bounds", [(-20.0, 2.0), (-0.2, 0.2)])
@pytest.mark.parametrize("entropy", [None, -0.5])
def test_losses_match_a_loop_over_rows(entropy, bounds):
    agent = make(target_entropy=entropy, min_log_std=bounds[0], max_log_std=bounds[1])
    params, learner_state = started(agent)
    params = params._replace(log_temperature=jnp.float32(-0.7))
    target = agent.initial_params(jax.random.PRNGKey(9)).critics
    learner_state = learner_state._replace(target_params=target, steps=jnp.int32(5))
    batch = batches.transitions(agent)
    rngs = jax.random.split(jax.random.fold_in(learner_state.rng, 5))
    noises = [np.asarray(jax.random.normal(rng, (16, 2)), np.float64) for rng in rngs]
    wanted = -2.0 if entropy is None else entropy
    critic, policy, temperature = brute_force(agent, params, target, batch, noises, wanted, *bounds)
    loss, logs = agent.loss(params, learner_state, batch)
    np.testing.assert_allclose(logs["critic_loss"], critic, rtol=1e-4)
    np.testing.assert_allclose(logs["policy_loss"], policy, rtol=1e-4)
    np.testing.assert_allclose(loss, critic + policy + temperature, rtol=1e-4)


def test_each_loss_has_gradients_only_for_its_own_parameters():
    agent = make()
    params, learner_state = started(agent)
    batch = batches.transitions(agent)

    def part(name):
        return jax.jit(jax.grad(lambda params: agent.loss(params, learner_state, batch)[1][name]))(params)

    critic, policy = part("critic_loss"), part("policy_loss")
    whole = jax.jit(agent.compute_gradients)(params, learner_state, batch)[1]
    assert all(np.all(np.asarray(leaf) == 0.0) for leaf in jax.tree.leaves((critic.policy, critic.log_temperature)))
    assert all(np.all(np.asarray(leaf) == 0.0) for leaf in jax.tree.leaves((policy.critics, policy.log_temperature)))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6),
        SACParams(policy.policy, critic.critics, whole.log_temperature),
        whole,
    )


def test_critic_learning_rate_applies_to_critics_and_temperature():
    agent = make(learning_rate=1e-3, critic_learning_rate=2e-2)
    params, learner_state = started(agent)
    after, _, _ = learn(agent, params, learner_state, batches.transitions(agent))

    def largest(part):  # the first step of Adam has the size of the learning rate
        moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), getattr(after, part), getattr(params, part))
        return max(jax.tree.leaves(moved))

    for part, rate in (("policy", 1e-3), ("critics", 2e-2), ("log_temperature", 2e-2)):
        np.testing.assert_allclose(largest(part), rate, rtol=1e-3)


def test_target_critics_move_toward_the_critics_by_the_target_update_rate():
    agent = make(target_update_rate=0.25)
    params, learner_state = started(agent)
    after, state, _ = learn(agent, params, learner_state, batches.transitions(agent))
    expected = jax.tree.map(lambda new, old: 0.25 * new + 0.75 * old, after.critics, learner_state.target_params)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), state.target_params, expected)


def test_fixed_temperature_does_not_change():
    agent = make(initial_temperature=0.2, learn_temperature=False)
    params, learner_state = started(agent)
    after, _, logs = learn(agent, params, learner_state, batches.transitions(agent))
    np.testing.assert_allclose(logs["temperature"], 0.2, rtol=1e-6)
    assert after.log_temperature == params.log_temperature


@pytest.mark.system
def test_sac_learns_the_best_action_of_a_bandit_at_its_target_entropy():
    agent = SAC(SACConfig(learning_rate=1e-2, target_update_rate=1.0), VECTOR, BOX, MLPConfig((32,), "relu"))
    params, learner_state = started(agent)
    random, entropies = np.random.RandomState(0), []
    step = jax.jit(agent.learner_step)
    batch = batches.transitions(agent, 64)
    for _ in range(1200):
        action = random.uniform([-2.0, 0.0], [2.0, 1.0], (64, 2)).astype(np.float32)
        reward = -np.square((action - [1.0, 0.25]) * [1.0, 4.0]).sum(axis=1).astype(np.float32)
        data = batch.data._replace(action=action, reward=reward, discount=np.zeros(64, np.float32))
        params, learner_state, logs = step(params, learner_state, batch._replace(data=data))
        entropies.append(float(logs["entropy"]))
    assert abs(np.mean(entropies[-100:]) + 2.0) < 0.35
    seen = batches.timestep(VECTOR, 64)._replace(observation=batch.data.observation)
    greedy = agent.eval_step(jax.random.PRNGKey(0), agent.actor_params(params, learner_state), seen, ())[0].action
    np.testing.assert_allclose(np.mean(greedy, axis=0) * np.array([1.0, 4.0]), [1.0, 1.0], atol=0.35)


class PolicyAndCriticsFactory:
    """A net factory that returns a pair: a policy, and critics with `num_values` outputs."""

    def __init__(self, num_values):
        self.num_values = num_values

    def __call__(self, observation_spec, action_spec):
        size = action_spec.shape[0]
        policy, critics = lambda p, o: o @ p["w"], lambda p, x: (x["action"] @ p["w"],) * self.num_values
        return (
            Network(lambda rng, o: {"w": jnp.ones((o.shape[1], 2 * size))}, policy),
            Network(lambda rng, x: {"w": jnp.ones((size, 1))}, critics),
        )


def test_custom_net_factory_returns_policy_and_critics():
    agent = SAC(SACConfig(batch_size=16, min_replay_size=16), VECTOR, BOX, PolicyAndCriticsFactory(2))
    params, learner_state = started(agent)
    after = learn(agent, params, learner_state, batches.transitions(agent))[0]
    assert np.any(after.critics["w"] != params.critics["w"]) and np.any(after.policy["w"] != params.policy["w"])
    with pytest.raises(UsageError, match=r"PolicyAndCriticsFactory \(critics\) gives \(\[B, 1\], \[B, 1\], \[B, 1\]\)"):
        SAC(SACConfig(), VECTOR, BOX, PolicyAndCriticsFactory(3))
    with pytest.raises(UsageError, match=r"net_factory must give a pair for this agent, \(policy, critics\)"):
        SAC(SACConfig(), VECTOR, BOX, lambda observation_spec, action_spec: 7)


def test_recurrent_network_is_rejected():
    with pytest.raises(UsageError, match=r"LSTMConfig \(policy\) has a state, which this agent does not carry"):
        SAC(SACConfig(), VECTOR, BOX, LSTMConfig())


@pytest.mark.parametrize("spec", [DISCRETE, specs.BoundedArray((2,), np.float32, -np.inf, np.inf)])
def test_unbounded_actions_are_rejected(spec):
    with pytest.raises(UsageError, match="SAC needs"):
        SAC(SACConfig(), VECTOR, spec)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"update_period": 0},
        {"discount": 1.5},
        {"target_update_rate": -0.1},
        {"learning_rate": float("nan")},
        {"critic_learning_rate": 0.0},
        {"initial_temperature": 0.0},
        {"min_log_std": 3.0},
        {"min_log_std": -float("inf")},
        {"target_entropy": float("nan")},
        {"min_replay_size": 2_000_000},
    ],
)
def test_options_out_of_range_are_rejected_by_name(change):
    with pytest.raises(UsageError, match=f"SACConfig.{next(iter(change))}"):
        SACConfig(**change)
