"""Builds a network from a `net_factory`: the agent's default, the config of a named network, or a user's function."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlframe.agents.action_masks import ActionMask
from rlframe.agents.networks import Head, MLPConfig, NatureCNNConfig, has_images, is_image
from rlframe.errors import UsageError
from rlframe.types import Tree


def network_config_for(network_cls: type[Any], configs: Sequence[Any]) -> Any:
    """Return the config of class `network_cls` in `configs`, or the defaults of the class if `configs` has none."""
    return next((config for config in configs if type(config) is network_cls), None) or network_cls()


def default_network_config(configs: Sequence[Any], observation_spec: Tree) -> Any:
    """Return the default config for an observation: convolutions for images, otherwise dense layers."""
    if not has_images(observation_spec):
        return network_config_for(MLPConfig, configs)
    return fitted_to_images(network_config_for(NatureCNNConfig, configs), observation_spec)


def fitted_to_images(config: NatureCNNConfig, observation_spec: Tree) -> NatureCNNConfig:
    """Return `config`, with the layers of MinAtar's network if an image is too small for its kernels.

    MinAtar's network has a convolution of 16 filters and a dense layer of 128 (Young and Tian 2019, arXiv:1903.03176).
    A config without dense layers stays so.
    """
    if all(config.fits(leaf) for leaf in jax.tree.leaves(observation_spec) if is_image(leaf)):
        return config
    hidden = (128,) if config.hidden else ()
    return dataclasses.replace(config, channels=(16,), kernels=(3,), strides=(1,), hidden=hidden)


def build_network(
    net_factory: Any,
    observation_spec: Tree,
    action_spec: Tree,
    heads: Sequence[Head],
    *,
    may_recur: bool = False,
    may_be_noisy: bool = False,
    name: str = "",
) -> Any:
    """Build the network of a `net_factory`. A config builds it from the heads, a function from the specs.

    Args:
        net_factory: see `Agent`.
        observation_spec: spec of the environments. If it has an action mask, `net_factory` gets the spec without it.
        action_spec: spec of the environments.
        heads: required outputs of the network. An action mask applies to the first output.
        may_recur: True if the agent carries a network's state, see `rlframe.agents.recurrent`.
        may_be_noisy: True if the agent draws a network's noise with `Network.sample`.
        name: name of the network in messages. If empty, the name of `net_factory`.

    Raises:
        UsageError: the function returned no network, the outputs do not match `heads`, or the network has a state or
            noise that the agent does not support.
    """
    name = name or getattr(net_factory, "__qualname__", type(net_factory).__name__)
    is_ours, mask = hasattr(net_factory, "build"), ActionMask(observation_spec)
    observation_spec = mask.rest_spec
    network = net_factory.build(observation_spec, heads) if is_ours else net_factory(observation_spec, action_spec)
    if is_recurrent(network) and not may_recur:
        raise UsageError(
            f"The network of {name} has a state, which this agent does not carry from step to step. Use "
            "PPO, IMPALA or R2D2, or a network without a state (mlp, nature_cnn)."
        )
    if getattr(network, "sample", None) is not None and not may_be_noisy:
        raise UsageError(
            f"The network of {name} is noisy, which this agent does not use. Leave noisy None, or use DQN."
        )
    if is_ours:
        return mask.network(network)
    if not (callable(getattr(network, "init", None)) and callable(getattr(network, "apply", None))):
        raise UsageError(
            "net_factory must give an object with init(rng, observation) and apply(params, observation), "
            f"got {network!r}."
        )
    _check_outputs(name, network, observation_spec, heads)
    return mask.network(network)


def only_output(outputs: Any) -> jax.Array:
    """Return the only output of a network, which may be in a tuple."""
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def is_recurrent(network: Any) -> bool:
    """Return True if a network has a state, see `rlframe.agents.recurrent`."""
    return hasattr(network, "initial_state")


def _check_outputs(name: str, network: Any, observation_spec: Tree, heads: Sequence[Head]) -> None:
    """Raise UsageError unless the network called `name` has the outputs `heads`."""
    batch_size = 5
    zeros = jax.tree.map(lambda leaf: np.zeros((batch_size, *leaf.shape), leaf.dtype), observation_spec)
    state = (network.initial_state(batch_size),) if is_recurrent(network) else ()
    outputs = jax.eval_shape(lambda rng: network.apply(network.init(rng, zeros), zeros, *state), jax.random.PRNGKey(0))
    outputs = outputs[0] if state else outputs
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    given = [tuple(getattr(output, "shape", (type(output).__name__,))) for output in outputs]

    def fits(shape: tuple[Any, ...], head: Head) -> bool:
        # The output of a head of size 1 may omit the last axis.
        return shape == (batch_size, head.size) or (head.size == 1 and shape == (batch_size,))

    if len(given) == len(heads) and all(map(fits, given, heads)):
        return

    def format_shapes(shapes: Sequence[tuple[Any, ...]]) -> str:
        names = [["B", *shape[1:]] if shape[:1] == (batch_size,) else shape for shape in shapes]
        parts = [f"[{', '.join(map(str, name))}]" for name in names]
        return f"({', '.join(parts)})" if len(parts) > 1 else "".join(parts)

    expected = format_shapes([(batch_size, head.size) for head in heads])
    raise UsageError(
        f"The network of {name} gives {format_shapes(given)}; for this agent and its action spec, apply must give "
        f"{expected}."
    )
