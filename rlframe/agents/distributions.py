"""Distributions over actions. A policy network outputs the parameters of the distribution."""

from __future__ import annotations

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.errors import UsageError
from rlframe.types import Tree, category_counts, specs


class Distribution(Protocol):
    """A distribution over the actions of one action spec. A `policy_factory` may return any object with these members.

    The defaults are for samples that are actions. A subclass of this class inherits them.

    Attributes:
        num_params: number of network outputs per observation.
        num_free: number of outputs that may be independent of the observation. These are the last outputs.
        clips: True if `to_action` can change a sample. The learner then needs the sample.
    """

    num_params: int
    num_free: int = 0
    clips: bool = False

    def sample(self, rng: jax.Array, params: jax.Array) -> jax.Array:
        """Draw a sample [B, ...] for params [B, num_params]."""

    def mode(self, params: jax.Array) -> jax.Array:
        """Return the most likely sample [B, ...]."""

    def log_prob(self, params: jax.Array, sample: jax.Array) -> jax.Array:
        """Return the log-probability [B] float32 of a sample."""

    def entropy(self, params: jax.Array) -> jax.Array:
        """Return the entropy [B] float32."""

    def to_action(self, sample: jax.Array) -> jax.Array:
        """Return the action for the environment, within the bounds of its spec."""
        return sample


class Categorical(Distribution):
    """One of n actions. The parameters are logits `[B, n]`."""

    def __init__(self, num_actions: int, dtype: Any = np.int32) -> None:
        self.num_params = num_actions
        self._dtype = dtype

    def sample(self, rng: jax.Array, params: jax.Array) -> jax.Array:
        """Draw a sample `[B]` by inverse transform sampling, with one uniform number per row."""
        weights = jnp.exp(params - jnp.max(params, axis=-1, keepdims=True))
        cumulative = jnp.cumsum(weights, axis=-1)
        # Scale by the last sum, so that rounding never selects an action with probability zero.
        threshold = jax.random.uniform(rng, params.shape[:-1]) * cumulative[..., -1]
        return jnp.sum(cumulative[..., :-1] <= threshold[..., None], axis=-1).astype(self._dtype)

    def mode(self, params: jax.Array) -> jax.Array:
        return jnp.argmax(params, axis=-1).astype(self._dtype)

    def log_prob(self, params: jax.Array, sample: jax.Array) -> jax.Array:
        index = sample[..., None].astype(jnp.int32)
        return jnp.take_along_axis(jax.nn.log_softmax(params), index, axis=-1)[..., 0]

    def entropy(self, params: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(params)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


class MultiCategorical(Distribution):
    """Several independent choices `[B, k]`. The parameters are the concatenated logits of all choices."""

    def __init__(self, num_actions: tuple[int, ...], dtype: Any = np.int32) -> None:
        self.num_params = sum(num_actions)
        self._parts = [Categorical(n, dtype) for n in num_actions]
        self._splits = list(np.cumsum(num_actions)[:-1])

    def sample(self, rng: jax.Array, params: jax.Array) -> jax.Array:
        rngs = jax.random.split(rng, len(self._parts))
        return jnp.stack([part.sample(rng, logits) for rng, (part, logits) in zip(rngs, self._split(params))], axis=-1)

    def mode(self, params: jax.Array) -> jax.Array:
        return jnp.stack([part.mode(logits) for part, logits in self._split(params)], axis=-1)

    def log_prob(self, params: jax.Array, sample: jax.Array) -> jax.Array:
        log_probs = [part.log_prob(logits, sample[..., i]) for i, (part, logits) in enumerate(self._split(params))]
        return jnp.sum(jnp.stack(log_probs), axis=0)

    def entropy(self, params: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack([part.entropy(logits) for part, logits in self._split(params)]), axis=0)

    def _split(self, params: jax.Array) -> list[tuple[Categorical, jax.Array]]:
        """Return the distribution of each choice and its logits."""
        return list(zip(self._parts, jnp.split(params, self._splits, axis=-1)))


class ActionRange:
    """Converts the actions of a box to flat vectors in [-1, 1], and back. -1 is the lower bound and 1 the upper bound.

    A dimension without a lower or an upper bound is not scaled.
    """

    def __init__(self, spec: specs.BoundedArray) -> None:
        self.size = int(np.prod(spec.shape))
        self._shape = tuple(spec.shape)
        self._dtype = spec.dtype
        self._low = np.broadcast_to(np.asarray(spec.minimum, np.float32), self._shape)
        self._high = np.broadcast_to(np.asarray(spec.maximum, np.float32), self._shape)
        bounded = np.isfinite(self._low) & np.isfinite(self._high)
        low, high = np.where(bounded, self._low, -1.0), np.where(bounded, self._high, 1.0)
        self._scale = (0.5 * (high - low)).astype(np.float32)
        self._middle = (0.5 * (high + low)).astype(np.float32)

    def to_action(self, units: jax.Array) -> jax.Array:
        """Convert `units` [B, size] to actions [B, *shape] in the spec's dtype, clipped to the bounds."""
        action = units.reshape(*units.shape[:-1], *self._shape) * self._scale + self._middle
        return jnp.clip(action, self._low, self._high).astype(self._dtype)

    def to_units(self, action: jax.Array) -> jax.Array:
        """Convert actions [B, *shape] to units [B, size] float32."""
        units = (jnp.asarray(action, jnp.float32) - self._middle) / self._scale
        return units.reshape(len(units), self.size)


class ClippedGaussian:
    """A diagonal Gaussian. `to_action` clips its samples to the action bounds of the environment.

    `log_prob` is for the sample before clipping, as in OpenAI Baselines and Stable-Baselines3. Samples are not squashed
    (no tanh). If the spec is bounded on both sides, samples are in units of half the range: -1 is the lower bound and 1
    the upper bound. The parameters are means and log standard deviations. The standard deviations may be independent
    of the observation (Schulman et al. 2017, section 6.1).
    """

    clips = True

    def __init__(self, spec: specs.BoundedArray) -> None:
        self._range = ActionRange(spec)
        self.num_params = 2 * self._range.size
        self.num_free = self._range.size

    def sample(self, rng: jax.Array, params: jax.Array) -> jax.Array:
        mean, log_std = self._split(params)
        return mean + jnp.exp(log_std) * jax.random.normal(rng, mean.shape)

    def mode(self, params: jax.Array) -> jax.Array:
        return self._split(params)[0]

    def log_prob(self, params: jax.Array, sample: jax.Array) -> jax.Array:
        mean, log_std = self._split(params)
        errors = (sample - mean) * jnp.exp(-log_std)
        return -jnp.sum(0.5 * jnp.square(errors) + log_std, axis=-1) - 0.5 * math.log(2.0 * math.pi) * mean.shape[-1]

    def entropy(self, params: jax.Array) -> jax.Array:
        log_std = self._split(params)[1]
        return jnp.sum(log_std, axis=-1) + 0.5 * math.log(2.0 * math.pi * math.e) * log_std.shape[-1]

    def to_action(self, sample: jax.Array) -> jax.Array:
        return self._range.to_action(sample)

    def _split(self, params: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = jnp.split(params, 2, axis=-1)
        return mean, log_std


class SquashedGaussian(ClippedGaussian):
    """A diagonal Gaussian followed by tanh, so that every action is within the bounds.

    See Haarnoja et al. 2018, appendix C. A sample is the input of the tanh. `log_prob` is the log-probability of the
    action, in units of half the range. The parameters are means and log standard deviations, which depend on the
    observation. The log standard deviations are clipped to [`min_log_std`, `max_log_std`]. `entropy` is the entropy of
    the Gaussian, because the entropy after the tanh has no closed form.

    Raises:
        UsageError: an action is not bounded on both sides.
    """

    def __init__(self, spec: specs.BoundedArray, min_log_std: float = -20.0, max_log_std: float = 2.0) -> None:
        super().__init__(spec)
        check_bounds("A SquashedGaussian", spec)
        self.num_free = 0
        self._bounds = min_log_std, max_log_std

    def log_prob(self, params: jax.Array, sample: jax.Array) -> jax.Array:
        # log(1 - tanh(x)^2), in a form that is exact even where tanh(x) rounds to 1
        log_slope = 2.0 * (math.log(2.0) - sample - jax.nn.softplus(-2.0 * sample))
        return super().log_prob(params, sample) - jnp.sum(log_slope, axis=-1)

    def to_action(self, sample: jax.Array) -> jax.Array:
        return super().to_action(jnp.tanh(sample))

    def _split(self, params: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = super()._split(params)
        return mean, jnp.clip(log_std, *self._bounds)


def default_distribution(action_spec: Tree) -> Distribution:
    """Return the distribution for an action spec: Discrete, MultiDiscrete with one axis, or a box of floats.

    Raises:
        UsageError: there is no distribution for this kind of spec.
    """
    if isinstance(action_spec, specs.DiscreteArray):
        return Categorical(action_spec.num_values, action_spec.dtype)
    if isinstance(action_spec, specs.BoundedArray) and np.issubdtype(action_spec.dtype, np.floating):
        return ClippedGaussian(action_spec)
    if (counts := category_counts(action_spec)) is not None:
        return MultiCategorical(counts, action_spec.dtype)
    if isinstance(action_spec, specs.Array) and action_spec.dtype.kind in "iu" and len(action_spec.shape) > 1:
        raise UsageError(
            f"The actions are integers of shape {action_spec.shape}: expected a MultiDiscrete of one axis. "
            "Flatten the action space of the environment (`MultiDiscrete(nvec.ravel())`) and reshape the action in its "
            "step(), or pass a policy_factory."
        )
    raise UsageError(
        f"No policy for the action spec {action_spec!r}: expected Discrete, MultiDiscrete with one axis (with "
        "`start=` if the numbers do not start at 0), or a Box of floats. For other actions, pass a policy_factory."
    )


def check_bounds(owner: str, action_spec: Tree) -> None:
    """Raise UsageError unless the actions are a box of floats that is bounded on both sides."""
    if not (isinstance(action_spec, specs.BoundedArray) and np.issubdtype(action_spec.dtype, np.floating)):
        raise UsageError(f"{owner} needs continuous actions, a Box of floats; got the action spec {action_spec!r}.")
    low, high = np.asarray(action_spec.minimum), np.asarray(action_spec.maximum)
    if not (np.all(np.isfinite(low)) and np.all(np.isfinite(high)) and np.all(low < high)):
        raise UsageError(
            f"{owner} needs actions with a lower bound and a higher upper bound, got {action_spec!r}. "
            "Set the bounds in the environment."
        )
