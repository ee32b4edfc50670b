"""What the agents' optimizers share: clipped gradients, and values that fall to 0 over a run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clipped(max_grad_norm: float | None, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimizer behind a clip of the gradients' global norm; None: without."""
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    return optax.chain(clip, optimizer)


def annealed(value: float, steps: Any, total_steps: int | None) -> jax.Array:
    """Return [] float32: a value that falls linearly to 0 over `total_steps` learner steps; None: it stays."""
    left: Any = 1.0 if total_steps is None else jnp.maximum(1.0 - steps / total_steps, 0.0)
    return jnp.asarray(value * left, jnp.float32)
