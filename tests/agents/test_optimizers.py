"""Tests that gradient clipping matches a worked example."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents.schedules import clip_gradients


def test_gradients_are_clipped_before_the_optimizer():
    grads = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    for limit, expected in ((5.0, [-3.0, -4.0]), (100.0, [-30.0, -40.0]), (None, [-30.0, -40.0])):
        optimizer = clip_gradients(limit, optax.sgd(1.0))
        updates, _ = optimizer.update(grads, optimizer.init(grads))
        np.testing.assert_allclose([updates["a"][0], updates["b"][0]], expected, rtol=1e-6)
