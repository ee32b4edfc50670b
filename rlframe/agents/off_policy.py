"""Functions for agents that learn from a replay: checks of its size, priorities, and importance weights."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from rlframe.agents.trees import check_shapes
from rlframe.errors import UsageError
from rlframe.types import ReplaySpec, Sequence, Transition


def check_replay_size(cfg: Any) -> None:
    """Raise UsageError if a replay can never contain enough items to start learning.

    Args:
        cfg: an agent's config with `min_replay_size` (items) and `replay_capacity` (steps). If the items are sequences,
            the config also has `period` (steps between the starts of two sequences).
    """
    period = getattr(cfg, "period", 1)
    if cfg.min_replay_size * period > cfg.replay_capacity:
        name, each = type(cfg).__name__, f" sequences, one every {period} steps" if period > 1 else ""
        raise UsageError(
            f"{name}.min_replay_size ({cfg.min_replay_size}{each}) is above replay_capacity ({cfg.replay_capacity}): "
            "learning would never start."
        )


def off_policy_replay_spec(
    cfg: Any, item: Transition | Sequence, kind: Literal["uniform", "prioritized"]
) -> ReplaySpec:
    """Return the replay spec for an agent's config. The agent does one update per `update_period` environment steps."""
    period = item.period if isinstance(item, Sequence) else 1
    return ReplaySpec(
        kind=kind,
        item=item,
        batch_size=cfg.batch_size,
        capacity=cfg.replay_capacity,
        min_size=cfg.min_replay_size,
        samples_per_insert=cfg.batch_size * period / cfg.update_period,
        priority_exponent=getattr(cfg, "priority_exponent", ReplaySpec.priority_exponent),
    )


def importance_weights(probabilities: jax.Array, exponent: jax.Array | float) -> jax.Array:
    """Return [B]: importance weights for prioritized sampling (Schaul et al. 2016, section 3.4).

    The weights are divided by the largest weight, so their maximum is 1 and the buffer size cancels out.
    """
    check_shapes(probabilities=(probabilities, "B"))
    weights = jnp.power(probabilities, -exponent)
    return weights / jnp.max(weights)


def sequence_priorities(errors: jax.Array, mask: jax.Array, max_share: float) -> jax.Array:
    """Return [B]: the priority of each sequence, a weighted sum of its largest error and its mean error.

    See Kapturowski et al. 2019, section 2.3.

    Args:
        errors: [T, B], differences to the targets.
        mask: [T, B] float32, 0 where the environment ignored action t.
        max_share: eta, weight of the largest error.
    """
    check_shapes(errors=(errors, "T B"), mask=(mask, "T B"))
    sizes = jnp.abs(errors) * mask
    means = jnp.sum(sizes, axis=0) / jnp.maximum(jnp.sum(mask, axis=0), 1.0)
    return max_share * jnp.max(sizes, axis=0) + (1.0 - max_share) * means
