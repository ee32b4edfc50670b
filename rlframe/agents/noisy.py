"""Noisy networks (Fortunato et al. 2018, arXiv:1706.10295): noise on the weights explores, as much as is learned."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlframe.errors import UsageError
from rlframe.types import Params


def noisy(network: Any, scale: float) -> Any:
    """The network with learned noise on its dense layers: `apply` takes the means, or what `sample(rng, params)` draws.

    Args:
        network: a `Network` whose parameters are the means.
        scale: the deviation to begin with, times sqrt(inputs); 0.5 in the paper.
    """
    return network._replace(
        init=lambda rng, observation: with_deviations(network.init(rng, observation), scale),
        apply=lambda params, observation: network.apply(params.mean, observation),
        sample=sampled,
    )


class NoisyParams(NamedTuple):
    """Parameters of a network, and how much noise there is on those of its dense layers."""

    mean: Params  # module -> name -> array, as Haiku has them
    deviation: Params  # of the modules that have a `w` [n, m] and a `b` [m], the same of these


def with_deviations(params: Params, scale: float) -> NoisyParams:
    """Parameters with the deviations to begin with: `scale` / sqrt(inputs) (section 3.2).

    Raises:
        UsageError: there is no dense layer among them.
    """
    layers = {name: module for name, module in params.items() if _is_dense(module)}
    if not layers:
        raise UsageError("A noisy network needs dense layers, modules with a w [n, m] and a b [m]; there are none.")
    deviation = {
        name: {leaf: jnp.full(module[leaf].shape, scale * module["w"].shape[0] ** -0.5) for leaf in ("w", "b")}
        for name, module in layers.items()
    }
    return NoisyParams(params, deviation)


def sampled(rng: jax.Array, params: NoisyParams) -> NoisyParams:
    """Parameters whose means have factorized Gaussian noise (equations 10, 11); gradients flow to both."""
    result = dict(params.mean)
    for i, (name, deviation) in enumerate(sorted(params.deviation.items())):
        inputs, outputs = deviation["w"].shape
        noise = jax.random.normal(jax.random.fold_in(rng, i), (inputs + outputs,))
        noise = jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))
        of_inputs, of_outputs = noise[:inputs], noise[inputs:]
        mean = params.mean[name]
        w = mean["w"] + deviation["w"] * of_inputs[:, None] * of_outputs
        result[name] = {**mean, "w": w, "b": mean["b"] + deviation["b"] * of_outputs}
    return params._replace(mean=result)


def _is_dense(module: Any) -> bool:
    return hasattr(module, "keys") and {"w", "b"} <= set(module.keys()) and module["w"].ndim == 2
