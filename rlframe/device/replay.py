"""The replays of the topology `fused` in device memory.

`DeviceReplay` is the protocol. `UnrollQueue` is the replay of agents that learn from each unroll once, such as PPO and
IMPALA. `ring.py` has the replay of agents that sample old steps.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rlframe.errors import UsageError
from rlframe.sharding import divide_rows, keep_whole
from rlframe.types import AgentState, Batch, ReplaySpec, Sequence, SequenceBatch, TimeStep, Tree


class StepRecord(NamedTuple):
    """One step of all environments."""

    timestep: TimeStep  # [N, ...], before the step
    action: Tree  # [N, ...]
    extras: dict[str, Any]  # [N, ...]
    agent_state: AgentState  # [N, ...], before the step
    next_timestep: TimeStep  # [N, ...], after the step


class DeviceReplay(Protocol):
    """A replay of `Rounds`. All methods are pure functions of the replay's arrays.

    Attributes:
        steps_per_round: environment steps between two calls of `add`.
        updates_per_round: "one" if each round has exactly one update, "at most one", or "many".
        how_to_shrink: a sentence for the error of a replay that does not fit into memory.
    """

    steps_per_round: int
    updates_per_round: Literal["one", "at most one", "many"]
    how_to_shrink: str

    def init(self, record: StepRecord) -> Any:
        """Return the arrays of an empty replay. `record` has the shapes and dtypes of one step of all environments."""

    def add(self, replay: Any, records: StepRecord) -> Any:
        """Add the records [T, N, ...] of a round."""

    def is_ready(self, replay: Any) -> jax.Array:
        """Return [] bool: True if a batch can be drawn now, like `RateLimiter.may_sample`."""

    def draw(self, rng: jax.Array, replay: Any) -> tuple[Any, Batch, Any]:
        """Return (replay, batch, places). `rng` is a constant key. `set_priorities` needs the places of the items."""

    def set_priorities(self, replay: Any, places: Any, priorities: jax.Array) -> Any:
        """Set the priorities [B] of items."""

    def divide(self, replay: Any) -> Any:
        """Divide the steps of the environments between the learner's devices. See `sharding.divide_rows`."""


class QueueArrays(NamedTuple):
    """The arrays of an `UnrollQueue`."""

    unrolls: SequenceBatch  # [capacity, T, ...]
    first: jax.Array  # [] int32, row of the oldest unroll
    size: jax.Array  # [] int32, number of unrolls


class UnrollQueue:
    """Collects unrolls of all environments, and returns each of them in one batch, the oldest first.

    It returns the same items as `rlframe.replay.ReplayBuffer` from the same steps, at the same steps. It overwrites
    unrolls if `add` is called while it is ready.

    Args:
        spec: the agent's `replay_spec`, a queue of sequences. Without `batch_size`, a batch has one unroll of each
            environment.
        num_envs: number of environments.
    """

    updates_per_round: Literal["one", "at most one", "many"]
    how_to_shrink = "Lower --num-envs, the batch size, or the length of the unrolls."

    def __init__(self, spec: ReplaySpec, num_envs: int) -> None:
        item = spec.item
        if not isinstance(item, Sequence) or item.period != item.length or spec.samples_per_insert is not None:
            raise UsageError(
                f"The topology fused needs a queue of sequences that do not overlap, without samples_per_insert; the "
                f"agent's replay_spec is {spec}. Use the topology single_process."
            )
        self.steps_per_round, self._num_envs = item.length, num_envs
        self._batch_size = spec.batch_size or num_envs
        self._least = max(self._batch_size, spec.min_size)
        self.updates_per_round = "one" if self._batch_size == num_envs == self._least else "many"
        self._capacity = self._least + num_envs

    def init(self, record: StepRecord) -> QueueArrays:
        """See `DeviceReplay`."""
        length = self.steps_per_round
        unrolls = jax.eval_shape(
            lambda record: unroll(jax.tree.map(lambda leaf: jnp.stack([leaf] * length), record)), record
        )
        rows = self._num_envs if self.updates_per_round == "one" else self._capacity
        zeros = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), unrolls)
        return QueueArrays(zeros, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def add(self, queue: QueueArrays, records: StepRecord) -> QueueArrays:
        """See `DeviceReplay`."""
        size = queue.size + self._num_envs
        if self.updates_per_round == "one":
            return QueueArrays(unroll(records), queue.first, size)
        rows = (queue.first + queue.size + jnp.arange(self._num_envs)) % self._capacity
        return QueueArrays(
            jax.tree.map(lambda old, new: old.at[rows].set(new), queue.unrolls, unroll(records)), queue.first, size
        )

    def is_ready(self, queue: QueueArrays) -> jax.Array:
        """See `DeviceReplay`."""
        return queue.size >= self._least

    def draw(self, rng: jax.Array, queue: QueueArrays) -> tuple[QueueArrays, Batch, None]:
        """See `DeviceReplay`. Remove the oldest unrolls."""
        data, first = queue.unrolls, queue.first
        if self.updates_per_round != "one":
            rows = (first + jnp.arange(self._batch_size)) % self._capacity
            data = jax.tree.map(lambda leaf: leaf[rows], data)
            first = (first + self._batch_size) % self._capacity
        probabilities = jnp.full(self._batch_size, 1.0, jnp.float32) / queue.size
        batch = Batch(data, (), probabilities, ())
        return QueueArrays(queue.unrolls, first, queue.size - self._batch_size), batch, None

    def set_priorities(self, queue: QueueArrays, places: Any, priorities: jax.Array) -> QueueArrays:
        """Do nothing, because a queue has no priorities."""
        return queue

    def divide(self, queue: QueueArrays) -> QueueArrays:
        """See `DeviceReplay`."""
        return QueueArrays(divide_rows(queue.unrolls), *keep_whole((queue.first, queue.size)))


def unroll(records: StepRecord) -> SequenceBatch:
    """Return the sequences [N, T, ...] of the records [T, N, ...] of T steps."""
    before, after = records.timestep, records.next_timestep

    def with_end(tree: Tree, following: Tree) -> Tree:
        return _batch_first(jax.tree.map(lambda some, more: jnp.concatenate([some, more[-1:]]), tree, following))

    return SequenceBatch(
        observation=with_end(before.observation, after.observation),
        step_type=with_end(before.step_type, after.step_type),
        action=_batch_first(records.action),
        reward=_batch_first(after.reward),
        discount=_batch_first(after.discount),
        extras=_batch_first(records.extras),
        agent_state=jax.tree.map(lambda leaf: leaf[0], records.agent_state),
    )


def _batch_first(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)
