"""Gradient clipping."""

from __future__ import annotations

import optax


def clip_gradients(
    max_grad_norm: float | None, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return an optimizer that first clips the gradients by their global norm. If the maximum is None, do not clip."""
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    return optax.chain(clip, optimizer)
