"""Clipped gradients and annealed values, by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents.optimizers import annealed, clipped


def test_gradients_are_clipped_before_the_optimizer_sees_them():
    grads = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    for limit, expected in ((5.0, [-3.0, -4.0]), (100.0, [-30.0, -40.0]), (None, [-30.0, -40.0])):
        optimizer = clipped(limit, optax.sgd(1.0))
        updates, _ = optimizer.update(grads, optimizer.init(grads))
        np.testing.assert_allclose([updates["a"][0], updates["b"][0]], expected, rtol=1e-6)


def test_a_value_falls_to_zero_at_the_last_step_and_stays_there():
    values = [float(annealed(0.5, steps, 10)) for steps in (0, 4, 10, 15)]
    np.testing.assert_allclose(values, [0.5, 0.3, 0.0, 0.0], rtol=1e-6)
    assert annealed(0.5, 7, None) == 0.5 and annealed(0.5, 7, None).dtype == np.float32
