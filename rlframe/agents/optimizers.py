"""Gradient clipping, and values that change linearly during a run."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_gradients(
    max_grad_norm: float | None, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return an optimizer that first clips the gradients by their global norm. If the maximum is None, do not clip."""
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    return optax.chain(clip, optimizer)


def interpolated(begin: float, end: float, done: Any) -> jax.Array:
    """Return [] float32: a value that moves linearly from `begin` to `end` while `done` goes from 0 to 1."""
    return jnp.asarray(begin + jnp.minimum(done, 1.0) * (end - begin), jnp.float32)


def annealed(value: float, steps: Any, total_steps: int | None) -> jax.Array:
    """Return [] float32: a value that falls linearly to 0 in `total_steps` learner steps. None keeps it constant."""
    left: Any = 1.0 if total_steps is None else jnp.maximum(1.0 - steps / total_steps, 0.0)
    return jnp.asarray(value * left, jnp.float32)


def learning_rate(cfg: Any, steps: Any) -> jax.Array:
    """Return [] float32: the learning rate of an agent's config after `steps` learner steps."""
    return annealed(cfg.learning_rate, steps, cfg.total_learner_steps if cfg.anneal_learning_rate else None)


def learning_rate_schedule(cfg: Any) -> Any:
    """Return the learning rate for optax: a number, or a function of the steps if it is annealed."""
    is_annealed = cfg.anneal_learning_rate and cfg.total_learner_steps is not None
    return functools.partial(learning_rate, cfg) if is_annealed else cfg.learning_rate
