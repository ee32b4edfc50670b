"""The heads of DQN. A head defines the network outputs for each action, the loss, and the action values.

`Expectation` learns the mean of the return (Mnih et al. 2015). `Quantiles` and `Categories` learn the distribution
of the return.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple, Union

import jax
import jax.numpy as jnp

from rlframe.agents.action_masks import ILLEGAL, is_legal
from rlframe.agents.losses import huber
from rlframe.agents.trees import check_shapes
from rlframe.errors import UsageError, check_above, check_at_least


class HeadLoss(NamedTuple):
    """The loss of each item in a batch, and its priority in the replay buffer."""

    loss: jax.Array  # [B]
    priority: jax.Array  # [B], at least 0


@dataclasses.dataclass(frozen=True)
class Expectation:
    """One output per action: the mean return (Mnih et al. 2015)."""

    name: ClassVar[str] = "expectation"
    size: ClassVar[int] = 1  # number of outputs per action

    # The Huber loss is linear for errors above this threshold. None uses the squared error everywhere.
    huber_threshold: float | None = 1.0

    def __post_init__(self) -> None:
        check_above(self, 0, "huber_threshold")

    def values(self, outputs: jax.Array) -> jax.Array:
        """Return [..., A]: action values for outputs [..., A, 1]."""
        return outputs[..., 0]

    def loss(self, outputs: jax.Array, reward: jax.Array, discount: jax.Array, next_outputs: jax.Array) -> HeadLoss:
        """Return the Huber loss. The priority is the absolute error.

        Args:
            outputs: [B, 1], outputs of the chosen action.
            reward: [B], summed over n steps.
            discount: [B], gamma^n, or 0 if the episode terminated.
            next_outputs: [B, 1], outputs of the target network for the observation and action n steps later.
        """
        _check(outputs, reward, discount, next_outputs, "1")
        target = jax.lax.stop_gradient(reward + discount * next_outputs[:, 0])
        error = target - outputs[:, 0]
        return HeadLoss(huber(error, self.huber_threshold), jnp.abs(error))


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """N quantiles of each action's return (Dabney et al. 2018, arXiv:1710.10044: QR-DQN)."""

    name: ClassVar[str] = "quantiles"

    num_quantiles: int = 200
    huber_threshold: float = 1.0  # kappa; the Huber loss is linear for larger errors

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_quantiles")
        check_above(self, 0, "huber_threshold")
        if self.huber_threshold is None:  # None is an error, because the loss divides by the threshold
            raise UsageError("Quantiles.huber_threshold must be a number above 0, got None.")

    @property
    def size(self) -> int:
        """Number of outputs per action."""
        return self.num_quantiles

    def values(self, outputs: jax.Array) -> jax.Array:
        """Return [..., A]: the mean of quantiles [..., A, N]."""
        return jnp.mean(outputs, axis=-1)

    def loss(self, outputs: jax.Array, reward: jax.Array, discount: jax.Array, next_outputs: jax.Array) -> HeadLoss:
        """Return the quantile regression loss (algorithm 1 of the paper).

        The loss is averaged over targets and summed over quantiles. The Huber loss is divided by its threshold, as in
        IQN (arXiv:1806.06923). With the usual threshold of 1 this makes no difference. The priority is the loss.

        Args:
            outputs: [B, N], quantiles of the chosen action, in increasing order of their fractions.
            reward: [B], summed over n steps.
            discount: [B], gamma^n, or 0 if the episode terminated.
            next_outputs: [B, N], quantiles of the target network for the next action.
        """
        _check(outputs, reward, discount, next_outputs, "N")
        targets = jax.lax.stop_gradient(reward[:, None] + discount[:, None] * next_outputs)
        errors = targets[:, None, :] - outputs[:, :, None]  # [B, N predictions, N targets]
        count = outputs.shape[-1]
        fractions = (jnp.arange(count, dtype=jnp.float32) + 0.5) / count
        weights = jnp.abs(fractions[:, None] - (errors < 0.0))
        threshold = self.huber_threshold
        loss = jnp.sum(jnp.mean(weights * huber(errors, threshold) / threshold, axis=2), axis=1)
        return HeadLoss(loss, loss)


@dataclasses.dataclass(frozen=True)
class Categories:
    """N fixed values of the return, and their logits for each action (Bellemare et al. 2017, arXiv:1707.06887: C51)."""

    name: ClassVar[str] = "categorical"

    num_atoms: int = 51  # number of evenly spaced values
    value_min: float = -10.0  # lowest value; lower returns are clipped to it
    value_max: float = 10.0  # highest value; higher returns are clipped to it

    def __post_init__(self) -> None:
        check_at_least(self, 2, "num_atoms")
        if not -math.inf < self.value_min < self.value_max < math.inf:
            raise UsageError(
                "Categories.value_min must be below value_max, and both must be finite, got "
                f"value_min={self.value_min}, value_max={self.value_max}."
            )

    @property
    def size(self) -> int:
        """Number of outputs per action."""
        return self.num_atoms

    @property
    def support(self) -> jax.Array:
        """[N]: the possible values of the return."""
        return jnp.linspace(self.value_min, self.value_max, self.num_atoms)

    def values(self, outputs: jax.Array) -> jax.Array:
        """Return [..., A]: the means of the distributions with logits [..., A, N], or `ILLEGAL`."""
        return jnp.where(is_legal(outputs[..., 0]), jax.nn.softmax(outputs) @ self.support, ILLEGAL)

    def loss(self, outputs: jax.Array, reward: jax.Array, discount: jax.Array, next_outputs: jax.Array) -> HeadLoss:
        """Return the divergence KL(target || prediction), which is also the priority (algorithm 1 of the paper).

        This divergence is the paper's cross-entropy minus a constant. It is 0 if both distributions are equal. Targets
        outside of [`value_min`, `value_max`] are clipped.

        Args:
            outputs: [B, N], logits of the chosen action.
            reward: [B], summed over n steps.
            discount: [B], gamma^n, or 0 if the episode terminated.
            next_outputs: [B, N], logits of the target network for the next action.
        """
        _check(outputs, reward, discount, next_outputs, "N")
        support = self.support
        targets = jnp.clip(reward[:, None] + discount[:, None] * support, support[0], support[-1])
        # Distribute the probability of each target over the two nearest values. The nearer value gets more.
        distances = jnp.abs(targets[:, None, :] - support[:, None]) / (support[1] - support[0])  # [B, N, N targets]
        projected = jnp.sum(jnp.clip(1.0 - distances, 0.0, 1.0) * jax.nn.softmax(next_outputs)[:, None, :], axis=2)
        projected = jax.lax.stop_gradient(projected)
        log_probs = jax.nn.log_softmax(outputs)
        loss = jnp.sum(jax.scipy.special.xlogy(projected, projected) - projected * log_probs, axis=1)
        return HeadLoss(loss, loss)


ReturnHead = Union[Expectation, Quantiles, Categories]


def _check(outputs: jax.Array, reward: jax.Array, discount: jax.Array, next_outputs: jax.Array, size: str) -> None:
    check_shapes(
        reward=(reward, "B"),
        discount=(discount, "B"),
        outputs=(outputs, f"B {size}"),
        next_outputs=(next_outputs, f"B {size}"),
    )
