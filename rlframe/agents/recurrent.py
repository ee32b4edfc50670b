"""Recurrent networks: an LSTM or a GRU between a torso and the heads of an agent.

A user's network is recurrent if it also has `initial_state` (see `RecurrentNetwork`). Pass it like any other network,
as `net_factory` or `--network file.py:make_net`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from rlframe.agents.initializers import transformed, weight_initializer
from rlframe.agents.net_factory import fitted_to_images, is_recurrent
from rlframe.agents.networks import (
    Activation,
    Head,
    NatureCNNConfig,
    apply_heads,
    check_layers,
    dense_layers,
    dueling_heads,
    flatten_observation,
    has_images,
)
from rlframe.agents.trees import flatten_batch_and_time, reset_where, swap_batch_and_time
from rlframe.errors import check_at_least
from rlframe.types import FIRST, AgentState, Params, Tree


class RecurrentNetwork(NamedTuple):
    """The pure functions of a network with a state, a pytree of `[B, ...]`.

    A user's network needs `init`, `apply` and `initial_state`. Without `unroll`, `apply` is called for each step.

    The Actor carries the state between steps. `apply` receives the state that it returned for the same environment, or
    `initial_state` at FIRST.
    """

    init: Callable[[jax.Array, Tree], Params]  # (rng, observation [B, ...]) -> params
    apply: Callable[[Params, Tree, AgentState], tuple[Any, AgentState]]  # [B, ...] -> (outputs [B, ...], state)
    initial_state: Callable[[int], AgentState]  # (batch size) -> state at FIRST, NumPy arrays
    # (params, observation [B, T, ...], is_first [B, T], state before step 0) -> (outputs [B, T, ...], state after)
    unroll: Callable[[Params, Tree, jax.Array, AgentState], tuple[Any, AgentState]] | None = None


class SteppedNetwork:
    """Adapter for networks with and without a state: `step` for acting, and `unroll` for learning.

    Args:
        network: has `init` and `apply`, and also `initial_state` if it is recurrent.
    """

    def __init__(self, network: Any) -> None:
        self.is_recurrent = is_recurrent(network)
        self._network = network

    def initial_state(self, batch_size: int) -> AgentState:
        """Return the state at FIRST, `[batch_size, ...]`, or `()` for a network without a state."""
        return self._network.initial_state(batch_size) if self.is_recurrent else ()

    def step(self, params: Params, observation: Tree, state: AgentState) -> tuple[Any, AgentState]:
        """Return (outputs `[B, ...]`, next state) of one step."""
        if self.is_recurrent:
            return self._network.apply(params, observation, state)
        return self._network.apply(params, observation), state

    def unroll(self, params: Params, observation: Tree, step_type: Any, state: AgentState) -> tuple[Any, AgentState]:
        """Return (outputs `[B, T, ...]`, final state) of contiguous steps.

        Args:
            params: parameters of the network.
            observation: `[B, T, ...]`.
            step_type: `[B, T]`. At FIRST, the initial state replaces the state.
            state: `[B, ...]`, before step 0.
        """
        if not self.is_recurrent:
            lead, outputs = step_type.shape, self._network.apply(params, flatten_batch_and_time(observation))
            return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), outputs), state
        is_first = jnp.asarray(step_type) == FIRST
        unroll = getattr(self._network, "unroll", None)
        if unroll is not None:
            return unroll(params, observation, is_first, state)
        initial = self._network.initial_state(is_first.shape[0])
        return scan_with_resets(
            lambda observation, state: self._network.apply(params, observation, state),
            observation,
            is_first,
            initial,
            state,
        )


def scan_with_resets(
    step: Callable[[Any, AgentState], tuple[Any, AgentState]],
    inputs: Tree,
    is_first: jax.Array,
    initial: AgentState,
    state: AgentState,
) -> tuple[Any, AgentState]:
    """Apply a function to each step, starting from `initial` at FIRST. Return (outputs `[B, T, ...]`, final state).

    Args:
        step: `f(inputs [B, ...], state)` that returns (outputs, state).
        inputs: `[B, T, ...]`.
        is_first: `[B, T]` bool. Where it is True, `initial` replaces the state.
        initial: `[B, ...]`, state at the start of an episode.
        state: `[B, ...]`, before step 0.
    """

    def reset_and_step(state: AgentState, now: tuple[Any, jax.Array]) -> tuple[AgentState, Any]:
        outputs, state = step(now[0], reset_where(now[1], state, initial, jnp))
        return state, outputs

    state = jax.tree.map(jnp.asarray, state)
    state, outputs = jax.lax.scan(reset_and_step, state, swap_batch_and_time((inputs, is_first)))
    return swap_batch_and_time(outputs), state


@dataclasses.dataclass(frozen=True)
class _RecurrentConfig:
    """A torso, a recurrent core, and heads on the output of the core.

    The torso consists of dense layers, after the convolutions of `NatureCNNConfig` for images. The heads are linear, or
    have a hidden layer with the size of the core's output (`dueling`). Weights are orthogonal. The core has gain 1 and
    zero biases, as in CleanRL's ppo_atari_lstm.py.
    """

    hidden: tuple[int, ...] = (64,)  # sizes of the dense layers before the core
    size: int = 64  # size of the core's output
    activation: Activation = "tanh"
    orthogonal: bool = True  # orthogonal initial weights; False: truncated normal with deviation 1 / sqrt(inputs)
    dueling: bool = False  # separate hidden layers for advantages and value (Wang et al. 2016)

    _gates: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_layers(self)
        check_at_least(self, 1, "size")

    def build(self, observation_spec: Tree, heads: Sequence[Head]) -> RecurrentNetwork:
        """Build a network that outputs a tuple with one `[..., head.size]` for each head."""
        images = None
        if has_images(observation_spec):
            images = fitted_to_images(NatureCNNConfig(hidden=(), orthogonal=self.orthogonal), observation_spec)
        own = (self.size,) if self.dueling else ()  # sizes of the hidden layers of each head
        parts = dueling_heads(heads) if self.dueling else heads

        def forward(observation: Tree, is_first: jax.Array | None, state: AgentState) -> tuple[Any, AgentState]:
            # If `is_first` is None, the inputs are one step [B, ...]. Otherwise they are [B, T, ...].
            # Only the core processes one step after another.
            lead = jax.tree.leaves(observation)[0].shape[: 1 if is_first is None else 2]
            rows = jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *leaf.shape[len(lead) :])), observation)
            features = (
                images.image_features(observation_spec, rows, "torso")
                if images
                else flatten_observation(observation_spec, rows)
            )
            features = dense_layers(features, self, "torso", self.hidden)
            inputs = hk.Linear(self._gates * self.size, w_init=weight_initializer(self, 1.0), name="core_inputs")(
                features
            )
            shape = (self.size, self._gates * self.size)
            weights = hk.get_parameter("core_weights", shape, init=weight_initializer(self, 1.0))
            if is_first is None:
                core, state = self._step(weights, inputs, state)
            else:
                step = functools.partial(self._step, weights)
                initial = self.initial_state(lead[0])
                core, state = scan_with_resets(step, inputs.reshape(*lead, -1), is_first, initial, state)
                core = core.reshape(-1, self.size)
            outputs = apply_heads(lambda _: core, self, parts, own)
            return tuple(output.reshape(*lead, output.shape[-1]) for output in outputs), state

        init, apply = transformed(forward)

        return RecurrentNetwork(
            lambda rng, observation: init(
                rng, observation, None, self.initial_state(len(jax.tree.leaves(observation)[0]))
            ),
            lambda params, observation, state: apply(params, observation, None, state),
            self.initial_state,
            apply,
        )

    def initial_state(self, batch_size: int) -> AgentState:
        """Return zeros `[batch_size, size]`."""
        return np.zeros((batch_size, self.size), np.float32)

    def _step(self, weights: jax.Array, inputs: jax.Array, state: AgentState) -> tuple[jax.Array, AgentState]:
        """Return (output [B, size], next state) for inputs [B, gates * size] and weights [size, gates * size]."""
        raise NotImplementedError


class LSTMState(NamedTuple):
    """The state of an LSTM."""

    hidden: Any  # [B, size]
    cell: Any  # [B, size]


@dataclasses.dataclass(frozen=True)
class LSTMConfig(_RecurrentConfig):
    """A torso, an LSTM, and heads. The heads are linear unless `dueling` is True.

    Hochreiter and Schmidhuber 1997, with an initial forget gate bias of 1 (Jozefowicz et al. 2015, section 2.2). The
    torso consists of dense layers, after the convolutions of `NatureCNNConfig` for images.
    """

    _gates: ClassVar[int] = 4

    def initial_state(self, batch_size: int) -> AgentState:
        """Return zeros `[batch_size, size]` for the hidden state and the cell."""
        zeros = np.zeros((batch_size, self.size), np.float32)
        return LSTMState(zeros, zeros)

    def _step(self, weights: jax.Array, inputs: jax.Array, state: AgentState) -> tuple[jax.Array, AgentState]:
        enter, new, forget, out = jnp.split(inputs + state.hidden @ weights, 4, axis=-1)
        cell = jax.nn.sigmoid(forget + 1.0) * state.cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        return hidden, LSTMState(hidden, cell)


@dataclasses.dataclass(frozen=True)
class GRUConfig(_RecurrentConfig):
    """A torso, a GRU (Cho et al. 2014, arXiv:1406.1078, equations 5 to 8), and heads.

    The heads are linear unless `dueling` is True. The torso consists of dense layers, after the convolutions of
    `NatureCNNConfig` for images.
    """

    _gates: ClassVar[int] = 3

    def _step(self, weights: jax.Array, inputs: jax.Array, state: AgentState) -> tuple[jax.Array, AgentState]:
        size = self.size
        gates = jax.nn.sigmoid(inputs[:, : 2 * size] + state @ weights[:, : 2 * size])
        reset, update = gates[:, :size], gates[:, size:]
        candidate = jnp.tanh(inputs[:, 2 * size :] + (reset * state) @ weights[:, 2 * size :])
        state = update * state + (1.0 - update) * candidate
        return state, state
