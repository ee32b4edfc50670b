"""Recurrent networks: an LSTM or a GRU between a torso and the heads of an agent.

A network of a user's own is recurrent where it has `initial_state` as well (see `RecurrentNetwork`): `net_factory`, or
`--network file.py:make_net`, gives it as any other.
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

from rlframe.agents.net_factory import is_recurrent
from rlframe.agents.networks import (
    Activation,
    Head,
    NatureCNNConfig,
    apply_head,
    check_layers,
    dense_layers,
    dueling_heads,
    dueling_values,
    flatten_observation,
    has_images,
    weight_initializer,
)
from rlframe.agents.trees import flatten_batch_and_time, swap_batch_and_time
from rlframe.errors import check_at_least
from rlframe.types import FIRST, AgentState, Params, Tree


class RecurrentNetwork(NamedTuple):
    """Pure functions of a network with a state, a pytree of `[B, ...]`.

    A network of a user's own needs the first three; without `unroll` it is applied step after step.

    The state travels with the Actor: `apply` gets what it gave for the same environment, and `initial_state` at FIRST.
    """

    init: Callable[[jax.Array, Tree], Params]  # (rng, observation [B, ...]) -> params
    apply: Callable[[Params, Tree, AgentState], tuple[Any, AgentState]]  # [B, ...] -> (outputs [B, ...], state)
    initial_state: Callable[[int], AgentState]  # (batch size) -> state at FIRST, numpy
    # (params, observation [B, T, ...], is_first [B, T], state before step 0) -> (outputs [B, T, ...], state after)
    unroll: Callable[[Params, Tree, jax.Array, AgentState], tuple[Any, AgentState]] | None = None


class SteppedNetwork:
    """A network, recurrent or not, that an agent acts with by `step`, and learns with by `unroll`.

    Args:
        network: has `init` and `apply`, and `initial_state` where it is recurrent.
    """

    def __init__(self, network: Any) -> None:
        self.is_recurrent = is_recurrent(network)
        self._network = network

    def initial_state(self, batch_size: int) -> AgentState:
        """The state at FIRST, `[batch_size, ...]`; `()` of a network without one."""
        return self._network.initial_state(batch_size) if self.is_recurrent else ()

    def step(self, params: Params, observation: Tree, state: AgentState) -> tuple[Any, AgentState]:
        """(outputs `[B, ...]`, state after) of one step."""
        if self.is_recurrent:
            outputs, state = self._network.apply(params, observation, state)
            return outputs, state
        return self._network.apply(params, observation), state

    def unroll(self, params: Params, observation: Tree, step_type: Any, state: AgentState) -> tuple[Any, AgentState]:
        """(outputs `[B, T, ...]`, state after) of contiguous steps.

        Args:
            params: of the network.
            observation: `[B, T, ...]`.
            step_type: `[B, T]`; at FIRST the state is the initial one.
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
    """Apply `step(inputs [B, ...], state) -> (outputs, state)` step after step. Return (outputs `[B, T, ...]`, state).

    Args:
        step: of a network.
        inputs: `[B, T, ...]`.
        is_first: `[B, T]` bool; where it is, `initial` takes the place of the state.
        initial, state: `[B, ...]`.
    """

    def reset_and_step(state: AgentState, now: tuple[Any, jax.Array]) -> tuple[AgentState, Any]:
        outputs, state = step(now[0], reset_where_first(now[1], initial, state))
        return state, outputs

    state = jax.tree.map(jnp.asarray, state)
    state, outputs = jax.lax.scan(reset_and_step, state, swap_batch_and_time((inputs, is_first)))
    return swap_batch_and_time(outputs), state


def reset_where_first(first: jax.Array, initial: AgentState, state: AgentState) -> AgentState:
    """`state` `[B, ...]` with the rows at FIRST (`[B]` bool) taken from `initial`."""

    def choose(fresh: Any, old: jax.Array) -> jax.Array:
        return jnp.where(first.reshape((-1,) + (1,) * (old.ndim - 1)), fresh, old)

    return jax.tree.map(choose, initial, state)


@dataclasses.dataclass(frozen=True)
class _RecurrentConfig:
    """A torso, a recurrent core, and heads on what the core gives.

    The torso is dense layers, and before these, for images, the convolutions of `NatureCNNConfig`. Heads are linear, or
    have a layer of their own as large as the core's output (`dueling`). Weights are orthogonal (of the core with
    gain 1, biases 0), as those of CleanRL's ppo_atari_lstm.py.
    """

    hidden: tuple[int, ...] = (64,)  # dense layers before the core
    size: int = 64  # numbers of the core's output
    activation: Activation = "tanh"
    orthogonal: bool = True  # initial weights; False: truncated normal of deviation 1 / sqrt(inputs)
    dueling: bool = False  # advantages and a value, each with a layer of its own (Wang et al. 2016)

    _gates: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_layers(self)
        check_at_least(self, 1, "size")

    def build(self, observation_spec: Tree, heads: Sequence[Head]) -> RecurrentNetwork:
        """A network whose outputs are a tuple with one `[..., head.size]` for each head."""
        images = NatureCNNConfig(hidden=(), orthogonal=self.orthogonal) if has_images(observation_spec) else None
        own = (self.size,) if self.dueling else ()  # layers of each head
        parts = dueling_heads(heads) if self.dueling else heads

        def forward(observation: Tree, is_first: jax.Array | None, state: AgentState) -> tuple[Any, AgentState]:
            # Without is_first one step [B, ...], else [B, T, ...]: all but the core is applied to all rows at once.
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
            outputs = []
            for i, head in enumerate(parts):
                outputs.append(apply_head(dense_layers(core, self, f"torso{i}", own), self, head, i))
            if self.dueling:
                advantages, value = outputs
                outputs = [dueling_values(advantages, value, heads[0].num_actions)]
            return tuple(output.reshape(*lead, output.shape[-1]) for output in outputs), state

        transformed: Any = hk.without_apply_rng(hk.transform(forward))
        init, apply = transformed

        return RecurrentNetwork(
            lambda rng, observation: init(
                rng, observation, None, self.initial_state(len(jax.tree.leaves(observation)[0]))
            ),
            lambda params, observation, state: apply(params, observation, None, state),
            self.initial_state,
            apply,
        )

    def initial_state(self, batch_size: int) -> AgentState:
        """Zeros `[batch_size, size]`."""
        return np.zeros((batch_size, self.size), np.float32)

    def _step(self, weights: jax.Array, inputs: jax.Array, state: AgentState) -> tuple[jax.Array, AgentState]:
        """(output [B, size], state after) of inputs [B, gates * size]."""
        state = self._cell(weights, inputs, state)
        return self._output(state), state

    def _cell(self, weights: jax.Array, inputs: jax.Array, state: AgentState) -> AgentState:
        """The state after a step: inputs [B, gates * size], weights [size, gates * size]."""
        raise NotImplementedError

    def _output(self, state: AgentState) -> jax.Array:
        """[B, size]"""
        raise NotImplementedError


class LSTMState(NamedTuple):
    """The state of an LSTM."""

    hidden: Any  # [B, size]
    cell: Any  # [B, size]


@dataclasses.dataclass(frozen=True)
class LSTMConfig(_RecurrentConfig):
    """A torso, an LSTM, and heads, which are linear unless they have a layer of their own.

    Hochreiter and Schmidhuber 1997; with forget gates whose bias begins at 1 (Jozefowicz et al. 2015, section 2.2). The
    torso is dense layers, and before these, for images, the convolutions of `NatureCNNConfig`.
    """

    _gates: ClassVar[int] = 4

    def initial_state(self, batch_size: int) -> AgentState:
        """Zeros `[batch_size, size]`, hidden and cell."""
        zeros = np.zeros((batch_size, self.size), np.float32)
        return LSTMState(zeros, zeros)

    def _cell(self, weights: jax.Array, inputs: jax.Array, state: AgentState) -> AgentState:
        enter, new, forget, out = jnp.split(inputs + state.hidden @ weights, 4, axis=-1)
        cell = jax.nn.sigmoid(forget + 1.0) * state.cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
        return LSTMState(jax.nn.sigmoid(out) * jnp.tanh(cell), cell)

    def _output(self, state: AgentState) -> jax.Array:
        return state.hidden


@dataclasses.dataclass(frozen=True)
class GRUConfig(_RecurrentConfig):
    """A torso, a GRU (Cho et al. 2014, arXiv:1406.1078, equations 5 to 8), and heads.

    Heads are linear unless they have a layer of their own. The torso is dense layers, and before these, for images, the
    convolutions of `NatureCNNConfig`.
    """

    _gates: ClassVar[int] = 3

    def _cell(self, weights: jax.Array, inputs: jax.Array, state: AgentState) -> AgentState:
        size = self.size
        gates = jax.nn.sigmoid(inputs[:, : 2 * size] + state @ weights[:, : 2 * size])
        reset, update = gates[:, :size], gates[:, size:]
        candidate = jnp.tanh(inputs[:, 2 * size :] + (reset * state) @ weights[:, 2 * size :])
        return update * state + (1.0 - update) * candidate

    def _output(self, state: AgentState) -> jax.Array:
        return state
