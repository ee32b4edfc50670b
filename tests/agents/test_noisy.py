"""Tests of noisy networks: sampling of the noise, and DQN with noise."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import DQN, SAC, DQNConfig, SACConfig
from rlframe.agents.dqn_heads import Categories, Quantiles
from rlframe.agents.networks import MLPConfig, NoisyParams, add_noise, with_deviations
from rlframe.agents.off_policy import importance_weights
from rlframe.errors import UsageError
from tests.agents import batches
from tests.agents.batches import BOX, DISCRETE, VECTOR, started

RNG = jax.random.PRNGKey(0)


def test_initial_deviations_are_scaled_by_one_over_the_square_root_of_the_inputs():
    layer = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    params = with_deviations({"dense": layer, "norm": {"scale": jnp.ones(3)}}, 0.5)
    assert list(params.deviation) == ["dense"]
    np.testing.assert_allclose(params.deviation["dense"]["w"], np.full((4, 3), 0.25))
    np.testing.assert_allclose(params.deviation["dense"]["b"], np.full(3, 0.25))
    with pytest.raises(UsageError, match="needs dense layers"):
        with_deviations({"norm": {"scale": jnp.ones(3)}}, 0.5)


def test_weight_noise_is_the_product_of_input_and_output_noise():
    mean = {"dense": {"w": jnp.full((4, 3), 7.0), "b": jnp.full(3, 2.0)}, "norm": {"scale": jnp.ones(3)}}
    params = with_deviations(mean, 0.5)
    sample = add_noise(RNG, params)
    noise, of_outputs = (
        (np.asarray(sample.mean["dense"]["w"]) - 7.0) / 0.25,
        (np.asarray(sample.mean["dense"]["b"]) - 2.0) / 0.25,
    )
    np.testing.assert_allclose(noise / of_outputs, np.repeat((noise / of_outputs)[:, :1], 3, axis=1), rtol=1e-4)
    np.testing.assert_array_equal(sample.mean["norm"]["scale"], mean["norm"]["scale"])
    draws = jax.vmap(lambda rng: add_noise(rng, params).mean["dense"]["b"])(jax.random.split(RNG, 4_000))
    squares = jnp.square((draws - 2.0) / 0.25)  # each square is |x| for a Gaussian x
    np.testing.assert_allclose(squares.mean(), np.sqrt(2.0 / np.pi), atol=0.03)
    np.testing.assert_allclose(draws.mean(), 2.0, atol=0.02)


def make(noisy=0.5, dueling=False, **changes) -> DQN:
    cfg = {"batch_size": 16, "min_replay_size": 16, "optimizer": "adam", "epsilon": 0.0, "importance_exponent": 0.4}
    return DQN(DQNConfig(**cfg, **changes), VECTOR, DISCRETE, MLPConfig((8,), "relu", dueling=dueling, noisy=noisy))


def test_actor_step_uses_noise_and_eval_step_does_not():
    agent = make()
    params, learner_state = started(agent)
    published, seen = agent.actor_params(params, learner_state), batches.timestep(VECTOR, 64)
    acts = jax.jit(lambda rng: agent.actor_step(rng, published, seen, ())[0].action)
    assert len({acts(jax.random.PRNGKey(i)).tobytes() for i in range(8)}) > 4
    evaluates = {agent.eval_step(jax.random.PRNGKey(i), published, seen, ())[0].action.tobytes() for i in range(3)}
    (values,) = make(noisy=None).network.apply(params.mean, seen.observation)
    assert evaluates == {np.asarray(values.argmax(axis=1), np.int32).tobytes()}


RAINBOW = {"double": True, "dueling": True, "head": Categories(3), "prioritized": True}


def loss_of_samples(plain, batch, online, target, selecting):
    """Return the double DQN loss of a network without noise, for the given sampled parameters.

    `online`, `target` and `selecting` are used for predictions, targets, and the selection of next actions.
    """
    head, data, rows = plain.cfg.head, batch.data, np.arange(len(batch.data.action))
    choices = head.values(plain._outputs(selecting, data.next_observation)).argmax(axis=1)
    chosen = plain._outputs(online, data.observation)[rows, data.action]
    following = plain._outputs(target, data.next_observation)[rows, choices]
    loss = head.loss(chosen, data.reward, data.discount, following).loss
    weights = importance_weights(batch.probabilities, plain.cfg.importance_exponent)
    return jnp.mean(loss * weights if plain.cfg.prioritized else loss)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(
            pytest.param(one, marks=pytest.mark.system)
            for one in (RAINBOW, {"head": Quantiles(3)}, {"head": Categories(3)}, {"double": True})
        ),
    ],
)
def test_loss_samples_noisy_parameters_and_trains_the_deviations_of_the_noise(changes):
    agent = make(**changes)
    plain = make(**changes, noisy=None)
    params, learner_state = started(agent)
    batch = batches.transitions(agent)
    rngs = jax.random.split(jax.random.fold_in(learner_state.rng, learner_state.steps), 3)
    samples = map(add_noise, rngs, (params, learner_state.target_params, params))
    online, target, selecting = (sample.mean for sample in samples)
    weights = [each["head0"]["w"] for each in (params.mean, online, target, selecting)]
    assert all((one != other).any() for one, other in itertools.combinations(weights, 2))
    loss, _ = agent.loss(params, learner_state, batch)
    if changes.get("double"):  # double DQN uses two noise samples of the online parameters
        of_samples = loss_of_samples(plain, batch, online, target, selecting)
    else:
        of_samples, _ = plain.loss(online, plain.initial_learner_state(target), batch)
    np.testing.assert_allclose(loss, of_samples, rtol=1e-5)
    new, after, _ = jax.jit(agent.learner_step)(params, learner_state, batch)
    assert isinstance(after.target_params, NoisyParams)
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(params.deviation), jax.tree.leaves(new.deviation)))
    assert agent.loss(params, learner_state._replace(steps=jnp.int32(1)), batch)[0] != loss


def test_noise_scale_of_zero_is_rejected():
    with pytest.raises(UsageError, match=r"MLPConfig.noisy must be above 0, got 0.0"):
        make(noisy=0.0)


def test_noisy_network_is_rejected_by_agents_that_do_not_use_noise():
    with pytest.raises(UsageError, match=r"MLPConfig( \(policy\))? is noisy, which this agent does not use"):
        SAC(SACConfig(), VECTOR, BOX, MLPConfig((8,), noisy=0.5))
