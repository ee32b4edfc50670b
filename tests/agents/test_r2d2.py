"""Tests of R2D2: burn-in, targets, priorities, and exploration."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlframe import compilation
from rlframe.agents import R2D2, R2D2Config
from rlframe.agents.networks import MLPConfig
from rlframe.agents.r2d2 import Explorer, ladder_positions
from rlframe.agents.recurrent import GRUConfig, LSTMConfig
from rlframe.errors import UsageError
from rlframe.types import FIRST, LAST, MID, Sequence, SequenceBatch
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, IMAGE, VECTOR, assert_trees_equal, started

BURN_IN, LENGTH, ROWS = 3, 8, 4


def make(network=None, **changes) -> R2D2:
    cfg = {"batch_size": ROWS, "sequence_length": LENGTH, "burn_in": BURN_IN, "period": 4, "min_replay_size": 4}
    cfg |= {"learning_rate": 1e-2, "n_step": 3, "discount": 0.9, **changes}
    return R2D2(R2D2Config(**cfg), VECTOR, DISCRETE, network or GRUConfig(hidden=(4,), size=3, dueling=True))


def sequences(seed=0):
    """Return a batch with episodes that end during the burn-in and later, by termination and by truncation."""
    random, length = np.random.RandomState(seed), BURN_IN + LENGTH
    step_type = np.full((ROWS, length + 1), MID, np.uint8)
    discount = np.ones((ROWS, length), np.float32)
    for row, last, terminated in ((0, 1, True), (1, 5, True), (2, 6, False), (3, BURN_IN, True)):
        step_type[row, last : last + 2] = LAST, FIRST
        discount[row, last - 1] = 0.0 if terminated else 1.0
    data = SequenceBatch(
        observation=batches.random_tree(VECTOR, (ROWS, length + 1), seed),
        step_type=step_type,
        action=batches.random_tree(DISCRETE, (ROWS, length), seed),
        reward=random.randn(ROWS, length).astype(np.float32),
        discount=discount,
        extras={},
        agent_state=Explorer(random.randn(ROWS, 3).astype(np.float32), np.zeros(ROWS, np.float32)),
    )
    return batches.whole(data, ROWS)


def reference_values(agent, params, data):
    """Return [B, T + 1, A]: values after the burn-in, computed step by step in plain Python."""
    values = []
    core = np.array(data.agent_state.core)
    for t in range(data.step_type.shape[1]):
        core = np.where((data.step_type[:, t] == FIRST)[:, None], 0.0, core)
        (found,), core = agent.network.apply(params, data.observation[:, t], core)
        values.append(np.asarray(found))
    return np.stack(values, axis=1)[:, BURN_IN:]


def h(x, epsilon):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1.0) - 1.0) + epsilon * x


def inverse_of_h(y, epsilon):
    """Compute the inverse of the rescaling h by bisection."""
    low, high = np.full_like(y, -1e6, np.float64), np.full_like(y, 1e6, np.float64)
    for _ in range(100):
        middle = 0.5 * (low + high)
        above = h(middle, epsilon) > y
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return 0.5 * (low + high)


def reference_errors(agent, params, target_params, data):
    """Return [B, T]: targets minus values, computed step by step from the definition. 0 for ignored actions."""
    cfg = agent.cfg
    values, target_values = reference_values(agent, params, data), reference_values(agent, target_params, data)
    step_type, reward = data.step_type[:, BURN_IN:], data.reward[:, BURN_IN:]
    discount, action = data.discount[:, BURN_IN:], data.action[:, BURN_IN:]
    errors = np.zeros((ROWS, LENGTH))
    for row in range(ROWS):
        for t in range(LENGTH):
            if step_type[row, t] == LAST:
                continue
            total, factor, k = 0.0, 1.0, t
            while k < LENGTH and k < t + cfg.n_step and step_type[row, k] != LAST:
                total += factor * reward[row, k]
                factor *= cfg.discount * discount[row, k]
                k += 1
            best = target_values[row, k, values[row, k].argmax()]
            if cfg.rescaling is None:
                target = total + factor * best
            else:
                target = h(total + factor * inverse_of_h(best, cfg.rescaling), cfg.rescaling)
            errors[row, t] = target - values[row, t, action[row, t]]
    return errors


def test_replay_spec_follows_the_config():
    spec = make(replay_capacity=500, update_period=8, priority_exponent=0.7).replay_spec
    assert (spec.kind, spec.item, spec.batch_size) == ("prioritized", Sequence(BURN_IN + LENGTH, 4), ROWS)
    assert (spec.capacity, spec.min_size, spec.priority_exponent) == (500, 4, 0.7)
    # In 8 environment steps, 2 sequences are added, and one update samples 4 sequences.
    assert spec.samples_per_insert == 2.0


@pytest.mark.parametrize("changes", [{}, {"rescaling": None, "n_step": 1, "max_share": 0.5}])
def test_loss_and_priorities_match_plain_python_implementation(changes):
    agent = make(**changes)
    params, learner_state = started(agent)
    target = agent.initial_params(jax.random.PRNGKey(9))
    batch = sequences()
    loss, logs = jax.jit(agent.loss)(params, learner_state._replace(target_params=target), batch)
    errors = reference_errors(agent, params, target, batch.data)
    weights = batch.probabilities**-0.6
    weights /= weights.max()
    np.testing.assert_allclose(loss, np.mean(weights * (0.5 * errors**2).sum(axis=1)), rtol=1e-4)
    counts = (batch.data.step_type[:, BURN_IN:-1] != LAST).sum(axis=1)
    share = agent.cfg.max_share
    expected = share * np.abs(errors).max(axis=1) + (1 - share) * np.abs(errors).sum(axis=1) / counts
    np.testing.assert_allclose(logs["priorities"], expected, rtol=1e-4)
    np.testing.assert_allclose(logs["td_error"], np.abs(errors).sum() / counts.sum(), rtol=1e-4)


def test_loss_has_no_gradient_for_the_steps_of_the_burn_in():
    agent = make()
    params, learner_state = started(agent)
    batch = sequences()

    def of_observation(observation):
        data = batch.data._replace(observation=observation)
        return agent.loss(params, learner_state, batch._replace(data=data))[0]

    gradient = np.abs(jax.jit(jax.grad(of_observation))(batch.data.observation)).max(axis=(0, 2))
    assert np.all(gradient[:BURN_IN] == 0.0) and np.all(gradient[BURN_IN:-1] > 0.0)


def test_stored_state_affects_values_until_the_episode_ends():
    agent = make()
    params, _ = started(agent)
    batch = sequences()
    before = np.asarray(agent._unroll(params, batch.data))
    state = batch.data.agent_state._replace(core=batch.data.agent_state.core + 1.0)
    after = np.asarray(agent._unroll(params, batch.data._replace(agent_state=state)))
    changed = np.abs(after - before).max(axis=2) > 1e-7  # [T + 1, B]
    assert not changed[:, 0].any()  # row 0: an episode starts during the burn-in and resets the state
    assert changed[0, 1:].all() and not changed[6 - BURN_IN :, 1].any()  # row 1: an episode starts at step 6


def test_epsilon_of_each_environment_does_not_change_between_steps():
    agent = make(epsilon=0.4, epsilon_exponent=7.0)
    np.testing.assert_allclose(agent.initial_state(3).exponent, [4.5, 1.0, 8.0])
    params = agent.actor_params(*started(agent))
    rows = 30_000
    seen = jax.tree.map(lambda leaf: np.repeat(leaf, rows, axis=0), batches.timestep(VECTOR, 1))
    state = agent.initial_state(rows)._replace(exponent=np.full(rows, np.log(0.3) / np.log(0.4), np.float32))
    output, after = jax.jit(agent.actor_step)(jax.random.PRNGKey(1), params, seen, state)
    greedy, _ = agent.eval_step(jax.random.PRNGKey(1), params, seen, state)
    np.testing.assert_array_equal(after.exponent, state.exponent)
    expected = np.full(3, 0.1)
    expected[greedy.action[0]] += 0.7
    np.testing.assert_allclose(np.bincount(output.action, minlength=3) / rows, expected, atol=0.01)
    assert output.action.dtype == greedy.action.dtype == np.int32


def test_ladder_positions_are_evenly_spread_and_do_not_depend_on_the_count():
    np.testing.assert_array_equal(ladder_positions(9), [1 / 2, 0, 1, 1 / 4, 3 / 4, 1 / 8, 5 / 8, 3 / 8, 7 / 8])
    for exponent in range(1, 6):
        np.testing.assert_array_equal(
            np.sort(ladder_positions(2**exponent + 1)), np.linspace(0.0, 1.0, 2**exponent + 1)
        )
    for count in range(1, 40):
        np.testing.assert_array_equal(ladder_positions(count), ladder_positions(40)[:count])


@pytest.mark.system
@pytest.mark.parametrize("rate", [1e-2, "linear:1e-2:0"])
def test_optimizer_is_adam_with_gradient_clipping(rate):
    agent = make(max_grad_norm=0.01, adam_epsilon=0.1, learning_rate=rate, total_learner_steps=4)
    params, learner_state = started(agent)
    batch, adam = sequences(), optax.adam(rate if rate == 1e-2 else optax.linear_schedule(1e-2, 0.0, 4), eps=0.1)
    opt_state = adam.init(params)
    for _ in range(2):
        grads = batches.clip_to_norm(batches.gradients(agent, params, learner_state, batch), 0.01)
        updates, opt_state = adam.update(grads, opt_state)
        expected = optax.apply_updates(params, updates)
        params, learner_state, _ = batches.learn(agent, params, learner_state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)


def test_actions_are_greedy_if_epsilon_is_zero():
    agent = make(epsilon=0.0)
    params = agent.actor_params(*started(agent))
    seen, state = batches.timestep(VECTOR, 50), agent.initial_state(50)
    output, _ = agent.actor_step(jax.random.PRNGKey(1), params, seen, state)
    np.testing.assert_array_equal(output.action, agent.eval_step(jax.random.PRNGKey(1), params, seen, state)[0].action)


def test_target_network_is_copied_once_per_target_update_period():
    agent = make(target_update_period=2)
    params, learner_state = started(agent)
    first, batch, step = params, sequences(), jax.jit(agent.learner_step)
    for number in range(1, 5):
        params, learner_state, _ = step(params, learner_state, batch)
        first = params if number % 2 == 0 else first
        assert_trees_equal(learner_state.target_params, first)


@pytest.mark.system
@pytest.mark.parametrize(("network", "error"), [(GRUConfig((8,), 8, dueling=True), 0.0), (MLPConfig((8,)), 0.67)])
def test_recurrent_network_learns_a_memory_task(network, error):
    """The reward of the third action is the first observation times -1, 0 or 1, depending on the action."""
    agent = make(network, burn_in=0, sequence_length=3, n_step=1, rescaling=None)
    params, learner_state = started(agent)
    step, random, rows = jax.jit(agent.learner_step), np.random.RandomState(0), 64
    for _ in range(300):
        observation = np.zeros((rows, 4, 3), np.float32)
        observation[:, 0, 0] = random.choice([-1.0, 1.0], rows)
        action = random.randint(0, 3, (rows, 3)).astype(np.int32)
        reward = np.zeros((rows, 3), np.float32)
        reward[:, 2] = observation[:, 0, 0] * (action[:, 2] - 1)
        step_type = np.repeat(np.array([[FIRST, MID, MID, LAST]], np.uint8), rows, axis=0)
        discount = np.repeat(np.array([[1.0, 1.0, 0.0]], np.float32), rows, axis=0)
        data = SequenceBatch(observation, step_type, action, reward, discount, {}, agent.initial_state(rows))
        params, learner_state, logs = step(params, learner_state, batches.whole(data, rows))
    errors = (
        logs["priorities"].mean() - 0.1 * logs["td_error"]
    ) / 0.9  # the largest error of each sequence, averaged over sequences
    np.testing.assert_allclose(errors, error, atol=0.15)


def test_network_without_a_state_can_be_trained_at_the_sizes_of_the_paper():
    agent = R2D2(R2D2Config(), VECTOR, DISCRETE, MLPConfig())
    params, learner_state = started(agent)
    rows, steps = agent.cfg.batch_size, agent.cfg.burn_in + agent.cfg.sequence_length
    data = SequenceBatch(
        observation=batches.random_tree(VECTOR, (rows, steps + 1)),
        step_type=np.full((rows, steps + 1), MID, np.uint8),
        action=batches.random_tree(DISCRETE, (rows, steps)),
        reward=np.ones((rows, steps), np.float32),
        discount=np.ones((rows, steps), np.float32),
        extras={},
        agent_state=agent.initial_state(rows),
    )
    # Compile in the same way as the Learner. In the past, this compilation aborted the process.
    step = compilation.jit(agent.learner_step, differentiates=True)
    assert np.isfinite(step(params, learner_state, batches.whole(data, rows))[2]["loss"])


@pytest.mark.system
def test_default_network_for_images_is_the_network_of_the_paper():
    agent, paper = (
        R2D2(R2D2Config(), IMAGE, DISCRETE, factory)
        for factory in (None, LSTMConfig((), 512, "relu", orthogonal=False, dueling=True))
    )
    observation, state = batches.random_tree(IMAGE, (2,)), paper.initial_state(2).core
    params = agent.initial_params(jax.random.PRNGKey(0))
    streams = ("torso0_dense0", "torso1_dense0")
    assert [params[name]["w"].shape for name in ("core_inputs", *streams)] == [(64, 2048), (512, 512), (512, 512)]
    outputs, expected = (each.network.apply(params, observation, state)[0] for each in (agent, paper))
    assert_trees_equal(outputs, expected)
    assert min(float(jnp.std(output)) for output in outputs) > 0.0


def test_actions_that_are_not_discrete_are_rejected():
    with pytest.raises(UsageError, match=r"R2D2 needs Discrete actions, got .*BoundedArray.*Use SAC, PPO or IMPALA"):
        R2D2(R2D2Config(), VECTOR, BOX)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"burn_in": -1},
        {"max_share": 2.0},
        {"learning_rate": float("nan")},
        {"rescaling": -1.0},
        {"epsilon_exponent": -9.0},
        {"max_grad_norm": 0.0},
        {"priority_exponent": float("nan")},
    ],
)
def test_options_out_of_range_are_rejected_by_name(change):
    with pytest.raises(UsageError, match=f"R2D2Config.{next(iter(change))}"):
        R2D2Config(**change)


def test_min_replay_size_above_capacity_is_rejected():
    with pytest.raises(UsageError, match=r"min_replay_size \(100 sequences, one every 40 steps\) is above"):
        dataclasses.replace(R2D2Config(), replay_capacity=3_999, min_replay_size=100)
