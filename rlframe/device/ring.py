"""The replay in device memory for agents that sample old steps, such as DQN and SAC.

`DeviceSumTree` has the priorities of prioritized replay. See `rlframe.replay.sum_tree` for the same tree on the host.
"""

from __future__ import annotations

import fractions
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.device.replay import StepRecord
from rlframe.errors import UsageError
from rlframe.replay.tables import MIN_PRIORITY
from rlframe.sharding import divide_rows, keep_whole
from rlframe.types import (
    LAST,
    AgentState,
    Batch,
    ReplaySpec,
    Sequence,
    SequenceBatch,
    TransitionBatch,
    Tree,
)

_FANOUT = 16

Levels = list[jax.Array]  # float32 arrays: the leaves, then the sums of 16 nodes each, up to at most 16 nodes


class DeviceSumTree:
    """Draws leaves with probabilities proportional to their values.

    Each sum is computed from the node's children, so rounding errors do not accumulate, and a restored tree continues
    exactly.

    Args:
        size: number of leaves.
    """

    def __init__(self, size: int) -> None:
        self._sizes = [-(-size // _FANOUT) * _FANOUT]
        while self._sizes[-1] > _FANOUT:
            self._sizes.append(-(-(self._sizes[-1] // _FANOUT) // _FANOUT) * _FANOUT)

    def init(self) -> Levels:
        """Return a tree of zeros."""
        return [jnp.zeros(size, jnp.float32) for size in self._sizes]

    def set(self, levels: Levels, leaves: jax.Array, values: jax.Array) -> Levels:
        """Set the leaves ([n] int) to `values` [n], and compute their sums.

        Make one call for all leaves: XLA copies the whole tree if it is read between two calls.
        """
        levels = [levels[0].at[leaves].set(values), *levels[1:]]
        nodes = leaves
        for depth in range(1, len(levels)):
            nodes = nodes // _FANOUT
            sums = levels[depth - 1].reshape(-1, _FANOUT)[nodes].sum(axis=1)
            levels[depth] = levels[depth].at[nodes].set(sums)
        return levels

    def draw(self, rng: jax.Array, levels: Levels, count: int) -> tuple[jax.Array, jax.Array]:
        """Return (leaves [count] int32, probabilities [count] float32). The sum must be positive.

        The draws are stratified, as in Schaul et al. 2016, B.2.1.
        """
        total = levels[-1].sum()
        mass = (jax.random.uniform(rng, (count,)) + jnp.arange(count)) * (total / count)
        nodes = jnp.zeros(count, jnp.int32)
        for level in reversed(levels):
            values = level.reshape(-1, _FANOUT)[nodes]
            sums = jnp.cumsum(values, axis=1)
            # Rounding can leave a mass that is at least the sum. Then take the last child that is not 0.
            is_beyond = sums <= jnp.minimum(mass[:, None], jnp.nextafter(sums[:, -1:], jnp.float32(0.0)))
            child = jnp.count_nonzero(is_beyond, axis=1).astype(jnp.int32)
            value, before = (
                jnp.take_along_axis(each, child[:, None], axis=1)[:, 0] for each in (values, sums - values)
            )
            mass = jnp.maximum(mass - before, 0.0)
            nodes = nodes * _FANOUT + child
        return nodes, value / total


_MAX_DENOMINATOR = 10_000  # of `samples_per_insert` as a fraction
_END_OF_INT32 = 2**31


class StoredSteps(NamedTuple):
    """The steps of a ring, [rows, N, ...]. Row `t % rows` has the timestep t and the step that begins there."""

    observation: Tree
    step_type: jax.Array
    action: Tree
    reward: jax.Array  # of the step, so it arrived with timestep t + 1
    discount: jax.Array  # of timestep t + 1
    extras: dict[str, Any]
    agent_state: AgentState


class RingArrays(NamedTuple):
    """The arrays of a `StepRing`."""

    steps: StoredSteps
    head: jax.Array  # [] int32, number of the newest timestep; see `StepRing._next_time`
    ages: jax.Array  # [N] int32, steps of the current episode, at most `n_step`
    size: jax.Array  # [] int32, items in the ring
    inserted: jax.Array  # [] int32, items inserted, counted up to `min_size`
    ahead: jax.Array  # [] int32, `RateLimiter.ahead` times the denominator of `samples_per_insert`
    draws: jax.Array  # [] uint32, number of batches drawn; it determines the random numbers of the next batch
    weights: Any  # the sum tree of a prioritized replay, else ()
    highest: jax.Array  # [] float32, highest priority so far


class StepRing:
    """The newest steps of all environments, from which items are sampled uniformly or by priority.

    It has the same items as `rlframe.replay.ReplayBuffer` after the same steps, and allows the same number of updates.

    A timestep has the same number in all environments. An item is named by its place: the number of its first timestep,
    and its environment.

    Args:
        spec: the agent's `replay_spec`, uniform or prioritized. The ring keeps more than `capacity` timesteps if
            `capacity` is less than four more than the length of an item in each environment.
        num_envs: number of environments.

    Raises:
        UsageError: a counter of the ring could exceed 32 bits, or `samples_per_insert` is almost 0.
    """

    steps_per_round = 1
    updates_per_round: Literal["one", "at most one", "many"]
    how_to_shrink = "Lower --replay-capacity."

    def __init__(self, spec: ReplaySpec, num_envs: int) -> None:
        self.updates_per_round = "at most one" if spec.samples_per_insert is None else "many"
        self._spec, self._num_envs, self._batch_size = spec, num_envs, spec.batch_size or num_envs
        self._tree: DeviceSumTree | None = None
        # A Transition has 1 to `_n_step` steps, and a Sequence always has `_length`.
        item = spec.item
        if isinstance(item, Sequence):
            self._n_step, self._length, self._period = 1, item.length, item.period
        else:
            self._n_step, self._length, self._period = item.n_step, item.n_step, 1
        # An item must be complete before it is overwritten, so a ring has at least `_length + 1` timesteps. The other
        # three rows are for LAST and incomplete items, so that a ring with a tiny capacity is not empty.
        self.rows = max(-(-spec.capacity // num_envs) + 1, self._length + 4)
        self._cycle = math.lcm(self.rows, self._period)  # see `_next_time`
        ratio = fractions.Fraction(spec.samples_per_insert or 0).limit_denominator(_MAX_DENOMINATOR)
        self._per_insert, self._per_sample = ratio.numerator, ratio.denominator
        self._check_counters()
        if spec.kind == "prioritized":
            self._tree = DeviceSumTree(self.rows * num_envs)

    def _check_counters(self) -> None:
        """Raise UsageError if an int32 of the ring can overflow."""
        spec, ratio = self._spec, self._spec.samples_per_insert
        if max(2 * self._cycle, self.rows * self._num_envs) >= _END_OF_INT32:
            raise UsageError(
                f"The topology fused numbers the timesteps of a replay with 32 bits, which is too little for a "
                f"capacity of {spec.capacity} steps with items of {spec.item}. {self.how_to_shrink}"
            )
        if ratio is None:
            return
        if not self._per_insert:
            raise UsageError(
                f"The topology fused needs samples_per_insert of at least {1 / _MAX_DENOMINATOR}, got {ratio}. "
                "Sample more often, or use the topology single_process."
            )
        # A step completes at most `n_step` items in an environment, and a batch is drawn only while `ahead` >= 0.
        largest = max(self._num_envs * self._n_step * self._per_insert, self._batch_size * self._per_sample)
        if largest >= _END_OF_INT32 // 2:
            raise UsageError(
                f"The topology fused counts samples with 32 bits, which is too little for samples_per_insert={ratio} "
                f"(the fraction {self._per_insert} / {self._per_sample}), {self._num_envs} environments and batches of "
                f"{self._batch_size}. Use a ratio that is a fraction of small numbers, or fewer environments."
            )

    def init(self, record: StepRecord) -> RingArrays:
        """See `DeviceReplay`."""

        def rows_of(tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: jnp.zeros((self.rows, *leaf.shape), leaf.dtype), tree)

        after, zero = record.next_timestep, jnp.zeros((), jnp.int32)
        steps = StoredSteps(
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
        return RingArrays(steps, zero, ages, zero, zero, zero, zero.astype(jnp.uint32), weights, one)

    def is_ready(self, ring: RingArrays) -> jax.Array:
        """See `DeviceReplay`."""
        return (ring.inserted >= self._spec.min_size) & (ring.size > 0) & (ring.ahead >= 0)

    def add(self, ring: RingArrays, records: StepRecord) -> RingArrays:
        """See `DeviceReplay`. Count the items that the step completes and the items that it overwrites."""
        record = jax.tree.map(lambda leaf: leaf[0], records)
        row, next_row = ring.head % self.rows, (ring.head + 1) % self.rows
        steps, after = ring.steps, record.next_timestep
        step_type = record.timestep.step_type
        # The items that begin at the oldest timestep are overwritten.
        oldest = ring.head + 1 - self.rows
        overwritten = jnp.where(oldest % self._period == 0, self._may_begin(steps.step_type[next_row]), False)
        evicted = jnp.where(oldest >= 0, jnp.count_nonzero(overwritten), 0).astype(jnp.int32)
        steps = StoredSteps(
            # Write also the timestep before the step, because the first record brings the first timestep.
            _put(_put(steps.observation, row, record.timestep.observation), next_row, after.observation),
            _put(_put(steps.step_type, row, step_type), next_row, after.step_type),
            _put(steps.action, row, record.action),
            _put(steps.reward, row, after.reward),
            _put(steps.discount, row, after.discount),
            _put(steps.extras, row, record.extras),
            _put(steps.agent_state, row, record.agent_state),
        )
        ages = jnp.where(step_type == LAST, 0, jnp.minimum(ring.ages + 1, self._n_step))
        completed = self._completed(ring.head, ages, after.step_type == LAST)
        weights = ring.weights
        if self._tree is not None:
            envs = jnp.arange(self._num_envs)
            new_weight = ring.highest**self._spec.priority_exponent
            leaves, values = [next_row * self._num_envs + envs], [jnp.zeros(self._num_envs)]
            for back, mask in completed:
                leaves.append((ring.head - back) % self.rows * self._num_envs + envs)
                values.append(jnp.where(mask, new_weight, weights[0][leaves[-1]]))
            weights = self._tree.set(weights, jnp.concatenate(leaves), jnp.concatenate(values))
        count = jnp.stack([jnp.count_nonzero(mask) for _, mask in completed]).sum().astype(jnp.int32)
        inserted = jnp.minimum(ring.inserted + count, self._spec.min_size)
        beyond = count - (inserted - ring.inserted)  # items after the first `min_size`
        return ring._replace(
            steps=steps,
            head=self._next_time(ring.head),
            ages=ages,
            size=ring.size + count - evicted,
            inserted=inserted,
            ahead=ring.ahead + beyond * self._per_insert,
            weights=weights,
        )

    def _next_time(self, time: jax.Array) -> jax.Array:
        """Return the number of the next timestep.

        The numbers 0, 1, 2, ... go back by one cycle when they reach two cycles, so they never overflow. Sequences
        begin at multiples of the period, and a cycle is a multiple of the period and of the number of rows. A number
        of at least one cycle means that the ring is full.
        """
        return jnp.where(time + 1 == 2 * self._cycle, self._cycle, time + 1)

    def _may_begin(self, step_type: jax.Array) -> jax.Array:
        """Return a mask [N] of the environments in which an item can begin at a timestep with these step types."""
        if isinstance(self._spec.item, Sequence):
            return jnp.ones(self._num_envs, bool)
        return step_type != LAST

    def _completed(self, time: jax.Array, ages: jax.Array, ends: jax.Array) -> list[tuple[int, jax.Array]]:
        """Return the items that the step from `time` completes: pairs (steps since the item began, mask [N])."""
        if isinstance(self._spec.item, Sequence):
            first = time - (self._length - 1)
            is_complete = (first >= 0) & (first % self._period == 0)
            return [(self._length - 1, jnp.broadcast_to(is_complete, (self._num_envs,)))]
        pairs = [(back, (ages > back) & ends) for back in range(self._n_step - 1)]
        return [*pairs, (self._n_step - 1, ages > self._n_step - 1)]

    def draw(self, rng: jax.Array, ring: RingArrays) -> tuple[RingArrays, Batch, tuple[jax.Array, jax.Array]]:
        """See `DeviceReplay`. The places are (numbers of the first timesteps [B], environments [B])."""
        rng = jax.random.fold_in(rng, ring.draws)
        ahead = ring.ahead - self._batch_size * self._per_sample if self._per_insert else ring.ahead
        if self._tree is not None:
            leaves, probabilities = self._tree.draw(rng, ring.weights, self._batch_size)
            rows, envs = leaves // self._num_envs, leaves % self._num_envs
            times = ring.head - (ring.head % self.rows - rows) % self.rows
        else:
            times, envs = self._draw_uniformly(rng, ring)
            probabilities = jnp.full(self._batch_size, 1.0, jnp.float32) / ring.size
        batch = Batch(self._items(ring.steps, times, envs), (), probabilities, ())
        return ring._replace(draws=ring.draws + 1, ahead=ahead), batch, (times, envs)

    def _draw_uniformly(self, rng: jax.Array, ring: RingArrays) -> tuple[jax.Array, jax.Array]:
        """Draw places. Draw again where no complete item begins, so that all items have the same probability."""
        # Draw the number of a period: a Transition can begin at each timestep, and a Sequence once in a period.
        oldest = -(-jnp.maximum(ring.head + 1 - self.rows, 0) // self._period)
        is_sequence = isinstance(self._spec.item, Sequence)
        newest = (ring.head - self._length) // self._period if is_sequence else ring.head - 1

        def draw_again(state: tuple[Any, ...]) -> tuple[Any, ...]:
            number, times, envs, is_item = state
            time_rng, env_rng = jax.random.split(jax.random.fold_in(rng, number))
            new_times = jax.random.randint(time_rng, (self._batch_size,), oldest, newest + 1) * self._period
            new_envs = jax.random.randint(env_rng, (self._batch_size,), 0, self._num_envs)
            times, envs = jnp.where(is_item, times, new_times), jnp.where(is_item, envs, new_envs)
            return number + 1, times, envs, self._is_item(ring, times, envs)

        nothing = jnp.zeros(self._batch_size, jnp.int32)
        # Several seeds draw together, even if one of them has no items yet. Its items are not used.
        is_item = jnp.broadcast_to(ring.size == 0, (self._batch_size,))
        state = (jnp.zeros((), jnp.int32), nothing, nothing, is_item)
        return jax.lax.while_loop(lambda state: ~state[3].all(), draw_again, state)[1:3]

    def _is_item(self, ring: RingArrays, times: jax.Array, envs: jax.Array) -> jax.Array:
        """Return a mask [B] of the places where a complete item begins."""
        if isinstance(self._spec.item, Sequence):
            return jnp.ones(len(times), bool)
        types = ring.steps.step_type
        is_complete = times + self._n_step <= ring.head
        for k in range(1, self._n_step):
            at = times + k
            is_complete |= (at <= ring.head) & (types[at % self.rows, envs] == LAST)
        return is_complete & (types[times % self.rows, envs] != LAST)

    def _items(self, steps: StoredSteps, times: jax.Array, envs: jax.Array) -> TransitionBatch | SequenceBatch:
        """Return the items that begin at the given places."""
        item = self._spec.item
        if isinstance(item, Sequence):
            return self._sequences(steps, times, envs)
        return self._transitions(steps, times, envs, np.float32(item.discount))

    def _transitions(self, steps: StoredSteps, times: jax.Array, envs: jax.Array, gamma: np.float32) -> TransitionBatch:
        reward, discount = jnp.zeros(len(times)), jnp.ones(len(times))
        length, goes_on = jnp.zeros(len(times), jnp.int32), jnp.ones(len(times), bool)
        for k in range(self._n_step):
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

    def _sequences(self, steps: StoredSteps, times: jax.Array, envs: jax.Array) -> SequenceBatch:
        rows = (times[:, None] + jnp.arange(self._length + 1)) % self.rows
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

    def set_priorities(self, ring: RingArrays, places: Any, priorities: jax.Array) -> RingArrays:
        """See `DeviceReplay`."""
        if self._tree is None:
            return ring
        times, envs = places
        leaves = times % self.rows * self._num_envs + envs
        values = jnp.maximum(priorities, MIN_PRIORITY) ** self._spec.priority_exponent
        weights = self._tree.set(ring.weights, leaves, values.astype(jnp.float32))
        return ring._replace(weights=weights, highest=jnp.maximum(ring.highest, priorities.max()))

    def divide(self, ring: RingArrays) -> RingArrays:
        """See `DeviceReplay`. Each device has the steps of some environments, and all priorities."""
        others = {name: part for name, part in ring._asdict().items() if name != "steps"}
        return RingArrays(divide_rows(ring.steps, axis=1), **keep_whole(others))


def _put(rows: Tree, row: jax.Array, values: Tree) -> Tree:
    return jax.tree.map(lambda leaf, value: leaf.at[row].set(value), rows, values)


def _rows(tree: Tree, rows: jax.Array, envs: jax.Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf[rows, envs], tree)
