"""Tests that gradient clipping and annealed values match worked examples."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents import IMPALAConfig
from rlframe.agents.optimizers import annealed, clip_gradients, interpolated, learning_rate, learning_rate_schedule


def test_gradients_are_clipped_before_the_optimizer():
    grads = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    for limit, expected in ((5.0, [-3.0, -4.0]), (100.0, [-30.0, -40.0]), (None, [-30.0, -40.0])):
        optimizer = clip_gradients(limit, optax.sgd(1.0))
        updates, _ = optimizer.update(grads, optimizer.init(grads))
        np.testing.assert_allclose([updates["a"][0], updates["b"][0]], expected, rtol=1e-6)


def test_annealed_value_falls_to_zero_and_stays_there():
    values = [float(annealed(0.5, steps, 10)) for steps in (0, 4, 10, 15)]
    np.testing.assert_allclose(values, [0.5, 0.3, 0.0, 0.0], rtol=1e-6)
    assert annealed(0.5, 7, None) == 0.5 and annealed(0.5, 7, None).dtype == np.float32


def test_interpolated_value_reaches_its_end_value_and_stays_there():
    values = [float(interpolated(1.0, 0.2, done)) for done in (0.0, 0.5, 1.0, 3.0)]
    np.testing.assert_allclose(values, [1.0, 0.6, 0.2, 0.2], rtol=1e-6)


def test_learning_rate_anneals_only_if_enabled_and_the_total_is_known():
    cfg = IMPALAConfig(learning_rate=1e-2, anneal_learning_rate=True, total_learner_steps=10)
    schedule = learning_rate_schedule(cfg)
    for steps, left in [(0, 1.0), (4, 0.6), (10, 0.0), (15, 0.0)]:
        np.testing.assert_allclose(learning_rate(cfg, jnp.int32(steps)), 1e-2 * left, rtol=1e-5)
        np.testing.assert_allclose(schedule(jnp.int32(steps)), 1e-2 * left, rtol=1e-5)
    for changes in ({"anneal_learning_rate": False}, {"total_learner_steps": None}):
        constant = dataclasses.replace(cfg, **changes)
        np.testing.assert_allclose(learning_rate(constant, jnp.int32(9)), 1e-2)
        assert learning_rate_schedule(constant) == 1e-2
