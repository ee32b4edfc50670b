"""Replays in device memory. Inside the jitted call, they store steps and return batches.

`UnrollQueue` is for agents that learn from each unroll once. `StepRing` is for agents that sample old steps. Both
return the same items as `rlframe.replay.ReplayBuffer` from the same steps, and allow the same number of updates.
"""

from __future__ import annotations

import fractions
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.device.sum_tree import DeviceSumTree
from rlframe.errors import UsageError
from rlframe.replay.tables import MIN_PRIORITY
from rlframe.types import (
    LAST,
    AgentState,
    Batch,
    ReplaySpec,
    Sequence,
    SequenceBatch,
    TimeStep,
    Transition,
    TransitionBatch,
    Tree,
)

_MAX_DENOMINATOR = 10_000  # of `samples_per_insert` as a fraction


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
    """

    steps_per_round: int
    updates_per_round: str

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


class UnrollQueue:
    """Collects unrolls of all environments, and returns each of them in one batch, the oldest first.

    Args:
        spec: the agent's `replay_spec`, a queue of sequences. Without `batch_size`, a batch has one unroll of each
            environment.
        num_envs: number of environments.
    """

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
        self.updates_per_round = "many"
        if self._batch_size == num_envs == self._least:
            self.updates_per_round = "one"
        self._capacity = self._least + num_envs

    def init(self, record: StepRecord) -> _Queue:
        """See `DeviceReplay`."""
        length = self.steps_per_round
        unrolls = jax.eval_shape(
            lambda record: unroll(jax.tree.map(lambda leaf: jnp.stack([leaf] * length), record)), record
        )
        rows = self._num_envs if self.updates_per_round == "one" else self._capacity
        zeros = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), unrolls)
        return _Queue(zeros, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def add(self, queue: _Queue, records: StepRecord) -> _Queue:
        """See `DeviceReplay`."""
        size = queue.size + self._num_envs
        if self.updates_per_round == "one":
            return _Queue(unroll(records), queue.first, size)
        rows = (queue.first + queue.size + jnp.arange(self._num_envs)) % self._capacity
        return _Queue(
            jax.tree.map(lambda old, new: old.at[rows].set(new), queue.unrolls, unroll(records)), queue.first, size
        )

    def is_ready(self, queue: _Queue) -> jax.Array:
        """See `DeviceReplay`."""
        return queue.size >= self._least

    def draw(self, rng: jax.Array, queue: _Queue) -> tuple[_Queue, Batch, None]:
        """See `DeviceReplay`. Remove the oldest unrolls."""
        data, first = queue.unrolls, queue.first
        if self.updates_per_round != "one":
            rows = (first + jnp.arange(self._batch_size)) % self._capacity
            data = jax.tree.map(lambda leaf: leaf[rows], data)
            first = (first + self._batch_size) % self._capacity
        probabilities = jnp.full(self._batch_size, 1.0, jnp.float32) / queue.size
        batch = Batch(data, (), probabilities, ())
        return _Queue(queue.unrolls, first, queue.size - self._batch_size), batch, None

    def set_priorities(self, queue: _Queue, places: Any, priorities: jax.Array) -> _Queue:
        """Do nothing, because a queue has no priorities."""
        return queue


class _Queue(NamedTuple):
    unrolls: SequenceBatch  # [capacity, T, ...]
    first: jax.Array  # [] int32, row of the oldest unroll
    size: jax.Array  # [] int32, number of unrolls


class _Steps(NamedTuple):
    """The arrays of a ring, [rows, N, ...]. Row `t % rows` has the timestep t and the step that begins there."""

    observation: Tree
    step_type: jax.Array
    action: Tree
    reward: jax.Array  # of the step, so it arrived with timestep t + 1
    discount: jax.Array  # of timestep t + 1
    extras: dict[str, Any]
    agent_state: AgentState


class _Ring(NamedTuple):
    steps: _Steps
    head: jax.Array  # [] int32, number of the newest timestep
    ages: jax.Array  # [N] int32, steps of the current episode, at most `n_step`
    size: jax.Array  # [] int32, items in the ring
    inserted: jax.Array  # [] int32, items inserted, counted up to `min_size`
    ahead: jax.Array  # [] int32, `RateLimiter.ahead` times the denominator of `samples_per_insert`
    draws: jax.Array  # [] uint32, number of batches drawn; it determines the random numbers of the next batch
    weights: Any  # the sum tree of a prioritized replay, else ()
    highest: jax.Array  # [] float32, highest priority so far


class StepRing:
    """The newest steps of all environments, from which items are sampled uniformly or by priority.

    Args:
        spec: the agent's `replay_spec`, uniform or prioritized.
        num_envs: number of environments.
    """

    steps_per_round = 1

    def __init__(self, spec: ReplaySpec, num_envs: int) -> None:
        self.updates_per_round = "many" if spec.samples_per_insert else "at most one"
        self._spec, self._num_envs, item = spec, num_envs, spec.item
        if isinstance(item, Transition):
            self._n, self._span, self._period, self._gamma = item.n_step, item.n_step, 1, item.discount
        else:
            self._n, self._span, self._period, self._gamma = 1, item.length, item.period, 1.0
        self.rows = max(-(-spec.capacity // num_envs) + 1, self._span + 4)
        self._batch_size = spec.batch_size or num_envs
        ratio = fractions.Fraction(spec.samples_per_insert or 0).limit_denominator(_MAX_DENOMINATOR)
        self._per_insert, self._per_sample = ratio.numerator, ratio.denominator
        self._tree = DeviceSumTree(self.rows * num_envs) if spec.kind == "prioritized" else None

    def init(self, record: StepRecord) -> _Ring:
        """See `DeviceReplay`."""

        def rows_of(tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jnp.zeros((self.rows, *leaf.shape), leaf.dtype), tree)

        after, zero = record.next_timestep, jnp.zeros((), jnp.int32)
        steps = _Steps(
            rows_of(after.observation),
            rows_of(after.step_type),
            rows_of(record.action),
            rows_of(after.reward),
            rows_of(after.discount),
            rows_of(record.extras),
            rows_of(record.agent_state),
        )
        weights = () if self._tree is None else self._tree.init()
        ages, one = jnp.zeros(self._num_envs, jnp.int32), jnp.ones((), jnp.float32)
        return _Ring(steps, zero, ages, zero, zero, zero, zero.astype(jnp.uint32), weights, one)

    def add(self, ring: _Ring, records: StepRecord) -> _Ring:
        """See `DeviceReplay`."""
        return self.add_step(ring, jax.tree.map(lambda leaf: leaf[0], records))

    def is_ready(self, ring: _Ring) -> jax.Array:
        """See `DeviceReplay`."""
        return (ring.inserted >= self._spec.min_size) & (ring.size > 0) & (ring.ahead >= 0)

    def draw(self, rng: jax.Array, ring: _Ring) -> tuple[_Ring, Batch, Any]:
        """See `DeviceReplay`."""
        times, envs, probabilities, ring = self.draw_places(rng, ring)
        if self._per_insert:
            ring = ring._replace(ahead=ring.ahead - self._batch_size * self._per_sample)
        return ring, self.read(ring, times, envs, probabilities), (times, envs)

    def add_step(self, ring: _Ring, record: StepRecord) -> _Ring:
        """Store one step of all environments. Count the items that it completes and the items that it overwrites."""
        row, next_row = ring.head % self.rows, (ring.head + 1) % self.rows
        steps, after = ring.steps, record.next_timestep
        begins = record.timestep.step_type  # the first record also brings the first timestep
        # The item that began in the next row is overwritten. Items begin at each timestep that is not LAST.
        oldest = ring.head + 1 - self.rows
        begun = jnp.where(oldest % self._period == 0, self._begins(steps.step_type[next_row]), False)
        evicted = jnp.where(oldest >= 0, jnp.count_nonzero(begun), 0).astype(jnp.int32)
        steps = _Steps(
            _put(_put(steps.observation, row, record.timestep.observation), next_row, after.observation),
            _put(_put(steps.step_type, row, begins), next_row, after.step_type),
            _put(steps.action, row, record.action),
            _put(steps.reward, row, after.reward),
            _put(steps.discount, row, after.discount),
            _put(steps.extras, row, record.extras),
            _put(steps.agent_state, row, record.agent_state),
        )
        ages = jnp.where(begins == LAST, 0, jnp.minimum(ring.ages + 1, self._n))
        complete = self._completed(ring.head, ages, after.step_type == LAST)
        weights = ring.weights
        if self._tree is not None:
            envs = jnp.arange(self._num_envs)
            leaf = ring.highest**self._spec.priority_exponent
            leaves, values = [next_row * self._num_envs + envs], [jnp.zeros(self._num_envs)]
            for back, mask in complete:
                leaves.append((ring.head - back) % self.rows * self._num_envs + envs)
                values.append(jnp.where(mask, leaf, weights[0][leaves[-1]]))
            weights = self._tree.set(weights, jnp.concatenate(leaves), jnp.concatenate(values))
        count = jnp.stack([jnp.count_nonzero(mask) for _, mask in complete]).sum().astype(jnp.int32)
        inserted = jnp.minimum(ring.inserted + count, self._spec.min_size)
        beyond = count - (inserted - ring.inserted)  # items after the first `min_size`
        return ring._replace(
            steps=steps,
            head=ring.head + 1,
            ages=ages,
            size=ring.size + count - evicted,
            inserted=inserted,
            ahead=ring.ahead + beyond * self._per_insert,
            weights=weights,
        )

    def _begins(self, step_type: jax.Array) -> jax.Array:
        """Return a mask [N] of the environments in which an item begins at a timestep."""
        if isinstance(self._spec.item, Sequence):
            return jnp.ones(self._num_envs, bool)
        return step_type != LAST

    def _completed(self, time: jax.Array, ages: jax.Array, ends: jax.Array) -> list[tuple[int, jax.Array]]:
        """Return the items that the step from `time` completes: pairs (steps since the item began, mask [N])."""
        if isinstance(self._spec.item, Sequence):
            begin = time - (self._span - 1)
            return [(self._span - 1, jnp.broadcast_to((begin >= 0) & (begin % self._period == 0), (self._num_envs,)))]
        pairs = [(back, (ages > back) & ends) for back in range(self._n - 1)]
        return [*pairs, (self._n - 1, ages > self._n - 1)]

    def draw_places(self, rng: jax.Array, ring: _Ring) -> tuple[jax.Array, jax.Array, jax.Array, _Ring]:
        """Draw a batch. Return (numbers of the first timesteps [B], environments [B], probabilities [B], ring)."""
        rng = jax.random.fold_in(rng, ring.draws)
        ring = ring._replace(draws=ring.draws + 1)
        if self._tree is not None:
            leaves, probabilities = self._tree.draw(rng, ring.weights, self._batch_size)
            rows, envs = leaves // self._num_envs, leaves % self._num_envs
            newest = ring.head % self.rows
            times = ring.head - (newest - rows) % self.rows
            return times, envs, probabilities, ring
        probabilities = jnp.full(self._batch_size, 1.0, jnp.float32) / ring.size
        times, envs = self._draw_uniformly(rng, ring)
        return times, envs, probabilities, ring

    def _draw_uniformly(self, rng: jax.Array, ring: _Ring) -> tuple[jax.Array, jax.Array]:
        """Draw timesteps and environments. Draw again where no complete item begins, so that all items are equal."""
        first = -(-jnp.maximum(ring.head + 1 - self.rows, 0) // self._period)
        last = ring.head - 1 if isinstance(self._spec.item, Transition) else (ring.head - self._span) // self._period

        def again(state: tuple[Any, ...]) -> tuple[Any, ...]:
            number, times, envs, is_item = state
            time_rng, env_rng = jax.random.split(jax.random.fold_in(rng, number))
            new = jax.random.randint(time_rng, (self._batch_size,), first, last + 1) * self._period
            new_envs = jax.random.randint(env_rng, (self._batch_size,), 0, self._num_envs)
            times, envs = jnp.where(is_item, times, new), jnp.where(is_item, envs, new_envs)
            return number + 1, times, envs, self._is_item(ring, times, envs)

        nothing = jnp.zeros(self._batch_size, jnp.int32)
        # Several seeds draw together, even if one of them has no items yet. Its items are not used.
        is_item = jnp.broadcast_to(ring.size == 0, (self._batch_size,))
        state = (jnp.zeros((), jnp.int32), nothing, nothing, is_item)
        return jax.lax.while_loop(lambda state: ~state[3].all(), again, state)[1:3]

    def _is_item(self, ring: _Ring, times: jax.Array, envs: jax.Array) -> jax.Array:
        """Return a mask [B] of the places where a complete item begins."""
        if isinstance(self._spec.item, Sequence):
            return jnp.ones(len(times), bool)
        types = ring.steps.step_type
        is_complete = times + self._n <= ring.head
        for k in range(1, self._n):
            at = times + k
            is_complete |= (at <= ring.head) & (types[at % self.rows, envs] == LAST)
        return is_complete & (types[times % self.rows, envs] != LAST)

    def read(self, ring: _Ring, times: jax.Array, envs: jax.Array, probabilities: jax.Array) -> Batch:
        """Return a batch of the items that begin at the given timesteps and environments, [B] each."""
        read = self._sequences if isinstance(self._spec.item, Sequence) else self._transitions
        return Batch(read(ring.steps, times, envs), (), probabilities, ())

    def _transitions(self, steps: _Steps, times: jax.Array, envs: jax.Array) -> TransitionBatch:
        gamma = np.float32(self._gamma)
        reward, discount = jnp.zeros(len(times)), jnp.ones(len(times))
        length, goes_on = jnp.zeros(len(times), jnp.int32), jnp.ones(len(times), bool)
        for k in range(self._n):
            row = (times + k) % self.rows
            goes_on = goes_on & (steps.step_type[row, envs] != LAST) if k else goes_on
            reward = reward + jnp.where(goes_on, np.float32(gamma**k) * steps.reward[row, envs], 0.0)
            discount = discount * jnp.where(goes_on, steps.discount[row, envs] * gamma, 1.0)
            length = length + goes_on
        row, end = times % self.rows, (times + length) % self.rows
        return TransitionBatch(
            observation=_rows(steps.observation, row, envs),
            action=_rows(steps.action, row, envs),
            reward=reward,
            discount=discount,
            next_observation=_rows(steps.observation, end, envs),
            extras=_rows(steps.extras, row, envs),
        )

    def _sequences(self, steps: _Steps, times: jax.Array, envs: jax.Array) -> SequenceBatch:
        rows = (times[:, None] + jnp.arange(self._span + 1)) % self.rows
        before, envs = rows[:, :-1], envs[:, None]
        return SequenceBatch(
            observation=_rows(steps.observation, rows, envs),
            step_type=steps.step_type[rows, envs],
            action=_rows(steps.action, before, envs),
            reward=steps.reward[before, envs],
            discount=steps.discount[before, envs],
            extras=_rows(steps.extras, before, envs),
            agent_state=_rows(steps.agent_state, rows[:, 0], envs[:, 0]),
        )

    def set_priorities(self, ring: _Ring, places: Any, priorities: jax.Array) -> _Ring:
        """See `DeviceReplay`."""
        if self._tree is None:
            return ring
        times, envs = places
        leaves = times % self.rows * self._num_envs + envs
        values = jnp.maximum(priorities, MIN_PRIORITY) ** self._spec.priority_exponent
        weights = self._tree.set(ring.weights, leaves, values.astype(jnp.float32))
        return ring._replace(weights=weights, highest=jnp.maximum(ring.highest, priorities.max()))


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


def _put(rows: Tree, row: jax.Array, values: Tree) -> Tree:
    return jax.tree.map(lambda leaf, value: leaf.at[row].set(value), rows, values)


def _rows(tree: Tree, rows: jax.Array, envs: jax.Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf[rows, envs], tree)
