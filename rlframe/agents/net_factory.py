"""What a `net_factory` stands for: an agent's default, a named network's config, or a function of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlframe.agents.networks import Head, MLPConfig, NatureCNNConfig, has_images
from rlframe.errors import UsageError
from rlframe.types import Tree


def network_config_for(network_cls: type[Any], configs: Sequence[Any]) -> Any:
    """The one of `configs` that is of this class, or the class's defaults where there is none."""
    return next((config for config in configs if type(config) is network_cls), None) or network_cls()


def default_network_config(configs: Sequence[Any], observation_spec: Tree) -> Any:
    """`network_config_for` of what suits the observation: convolutions for images, else dense layers."""
    return network_config_for(NatureCNNConfig if has_images(observation_spec) else MLPConfig, configs)


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
    """The network that a `net_factory` stands for: a config is told the heads, a function the specs.

    Args:
        net_factory: see `Agent`.
        observation_spec, action_spec: of the environments.
        heads: what the network is to give.
        may_recur: whether the agent carries a network's state, see `rlframe.agents.recurrent`.
        may_be_noisy: whether the agent draws a network's noise, `Network.sample`.
        name: of the network in messages; empty: that of `net_factory`.

    Raises:
        UsageError: the function gives no network, or one whose outputs are not `heads`, or one with a state or with
            noise that the agent does not use.
    """
    name = name or getattr(net_factory, "__qualname__", type(net_factory).__name__)
    is_ours = hasattr(net_factory, "build")
    network = net_factory.build(observation_spec, heads) if is_ours else net_factory(observation_spec, action_spec)
    if is_recurrent(network) and not may_recur:
        raise UsageError(
            f"The network of {name} has a state, which this agent does not carry from step to step. PPO, IMPALA and "
            "R2D2 do; or use a network without one: mlp, nature_cnn."
        )
    if getattr(network, "sample", None) is not None and not may_be_noisy:
        raise UsageError(f"The network of {name} is noisy, which this agent does not use. DQN does; leave noisy None.")
    if is_ours:
        return network
    if not (callable(getattr(network, "init", None)) and callable(getattr(network, "apply", None))):
        raise UsageError(
            "net_factory must give an object with init(rng, observation) and apply(params, observation), "
            f"got {network!r}."
        )
    _check_outputs(name, network, observation_spec, heads)
    return network


def only_output(outputs: Any) -> jax.Array:
    """The output of a network that has one, which may come in a tuple."""
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def is_recurrent(network: Any) -> bool:
    """Whether a network has a state, see `rlframe.agents.recurrent`."""
    return hasattr(network, "initial_state")


def _check_outputs(name: str, network: Any, observation_spec: Tree, heads: Sequence[Head]) -> None:
    """Raises UsageError unless the outputs of the network called `name` are `heads`."""
    batch_size = 5
    zeros = jax.tree.map(lambda leaf: np.zeros((batch_size, *leaf.shape), leaf.dtype), observation_spec)
    state = (network.initial_state(batch_size),) if is_recurrent(network) else ()
    outputs = jax.eval_shape(lambda rng: network.apply(network.init(rng, zeros), zeros, *state), jax.random.PRNGKey(0))
    outputs = outputs[0] if state else outputs
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    given = [tuple(getattr(output, "shape", (type(output).__name__,))) for output in outputs]

    def fits(shape: tuple[Any, ...], head: Head) -> bool:
        # One number per observation may come without an axis of its own.
        return shape == (batch_size, head.size) or (head.size == 1 and shape == (batch_size,))

    if len(given) == len(heads) and all(map(fits, given, heads)):
        return

    def said(shapes: Sequence[tuple[Any, ...]]) -> str:
        names = [["B", *shape[1:]] if shape[:1] == (batch_size,) else shape for shape in shapes]
        parts = [f"[{', '.join(map(str, name))}]" for name in names]
        return f"({', '.join(parts)})" if len(parts) > 1 else "".join(parts)

    wanted = said([(batch_size, head.size) for head in heads])
    raise UsageError(
        f"The network of {name} gives {said(given)}; for this agent and its action spec, apply must give {wanted}."
    )
