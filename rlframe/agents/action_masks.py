"""Action masks in agents: a mask changes the outputs of the network, and the random actions of epsilon-greedy agents.

The network of an agent does not see the mask. Its first output, logits or action values, is `ILLEGAL` for illegal
actions, and has no gradient there. So the probability of an illegal action is 0, it adds nothing to an entropy, and it
is never the maximum of action values. All losses, targets and greedy actions follow from that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlframe.errors import UsageError
from rlframe.types import AgentState, Params, Tree, find_action_mask

ILLEGAL = -1e9  # finite, so that a product with 0 is not NaN


def is_legal(values: jax.Array) -> jax.Array:
    """Return True where a network output of an action is not `ILLEGAL`. Elementwise."""
    return values > 0.5 * ILLEGAL


class ActionMask:
    """The action mask in the observations of an agent, if there is one.

    A custom agent supports masks with `self.network = ActionMask(observation_spec).network(network)`.

    Args:
        observation_spec: spec of one environment. The mask is the entry of a dict whose spec is an `ActionMaskArray`.

    Attributes:
        rest_spec: the spec without the mask, see `rest`.
    """

    def __init__(self, observation_spec: Tree) -> None:
        self._key, self._spec = find_action_mask(observation_spec)
        self.rest_spec = self.rest(observation_spec)

    def rest(self, observation: Tree) -> Tree:
        """Return an observation without its mask. If one other entry of the dict is left, return this entry."""
        if self._spec is None:
            return observation
        rest = {key: value for key, value in observation.items() if key != self._key}
        return next(iter(rest.values())) if len(rest) == 1 else rest

    def legal(self, observation: Tree) -> jax.Array | None:
        """Return `[..., n]` bool: True for legal actions. None if observations have no mask.

        If no action is legal, as after the end of an episode, all are: the environment ignores the action.
        """
        if self._spec is None:
            return None
        mask = jnp.asarray(observation[self._key]) != 0
        return mask | ~self._spec.has_choice(mask, jnp)[..., None]

    def network(self, network: Any) -> Any:
        """Return a network for whole observations. Without a mask, return `network` unchanged.

        Args:
            network: a network for `rest(observation)`, with or without a state. Its first output is `[..., n * k]`: k
                numbers for each of the n actions, ordered by action.
        """
        return network if self._spec is None else _MaskedNetwork(self, network)

    def apply(self, outputs: Any, observation: Tree) -> Any:
        """Return the outputs of a network, a tuple or one array, with `ILLEGAL` in the first output."""
        if isinstance(outputs, (tuple, list)):
            return self.apply(outputs[0], observation), *outputs[1:]
        legal = self.legal(observation)
        if legal is None:
            return outputs
        size, count = outputs.shape[-1], legal.shape[-1]
        if size % count:
            raise UsageError(
                f"The action mask has {count} elements, but the network has {size} outputs for the action: expected a "
                f"multiple of {count}. Use the default distribution (policy_factory), or set action_mask "
                "(--action-mask) to None."
            )
        return jnp.where(jnp.repeat(legal, size // count, axis=-1), outputs, ILLEGAL)


class _MaskedNetwork:
    """A network with a mask on its first output. See `ActionMask.network`."""

    def __init__(self, mask: ActionMask, network: Any) -> None:
        self._mask, self._network = mask, network
        if hasattr(network, "initial_state"):
            self.initial_state = network.initial_state
        self.sample = getattr(network, "sample", None)
        self.unroll = None if getattr(network, "unroll", None) is None else self._unroll

    def init(self, rng: jax.Array, observation: Tree) -> Params:
        return self._network.init(rng, self._mask.rest(observation))

    def apply(self, params: Params, observation: Tree, *state: AgentState) -> Any:
        return self._masked(self._network.apply(params, self._mask.rest(observation), *state), observation, *state)

    def _unroll(self, params: Params, observation: Tree, is_first: jax.Array, state: AgentState) -> Any:
        outputs = self._network.unroll(params, self._mask.rest(observation), is_first, state)
        return self._masked(outputs, observation, state)

    def _masked(self, result: Any, observation: Tree, *state: AgentState) -> Any:
        if not state:
            return self._mask.apply(result, observation)
        return self._mask.apply(result[0], observation), result[1]
