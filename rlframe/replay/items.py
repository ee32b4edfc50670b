"""The conversion of added steps to items, and of sampled items to batches.

timeline.py defines the terms number, block, slot, start and span. `put` stores the contents of a step, except its
observations. Then it adds the items that are complete with this step to the table, the longest item first. `assemble`
gathers the items of a batch.

If all environments of a writer step together (lockstep), the arguments of `put` are blocks of timesteps. Otherwise they
are arrays of numbers. `WriterFragments` accepts blocks and arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.replay.layout import Allocate, OutputArrays, TreeLayout
from rlframe.replay.tables import ItemTable
from rlframe.replay.timeline import Index, Mask, Numbers, Timeline, WriterFragments
from rlframe.replay.tree_store import TreeStore
from rlframe.types import LAST, Sequence, SequenceBatch, Step, StepSpec, Transition, TransitionBatch

# Step types are searched as bytes, because this is ten times as fast as the comparison of an array. It saves time with
# 64 environments.
_LAST_BYTE = int(LAST)
_IS_LAST = bytes(int(t == _LAST_BYTE) for t in range(256))
_IS_NOT_LAST = bytes(int(t != _LAST_BYTE) for t in range(256))


class _Items:
    """Base class of `Transitions` and `Sequences`. Its arrays have one row for each slot."""

    columns: dict[str, str]
    fields: tuple[str, ...]

    def __init__(self, spec: StepSpec, timeline: Timeline, table: ItemTable, allocate: Allocate):
        self._timeline, self._table = timeline, table
        dtypes = {name: np.dtype(dtype) for name, dtype in self.columns.items()}
        self._columns = {name: allocate(name, (timeline.slots, *d.shape), d.base) for name, d in dtypes.items()}
        layouts = {name: TreeLayout(name, getattr(spec, name)) for name in self.fields}
        self._trees = {name: TreeStore(layout, timeline, allocate) for name, layout in layouts.items()}
        self._action = self._trees["action"].only_array  # the only array of the tree, or None
        self._span = self._columns["span"]  # number of the end minus number of the start
        self.params_version = self._columns["params_version"]

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        columns = sum(column.nbytes for column in self._columns.values())
        return columns + sum(tree.nbytes for tree in self._trees.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must contain."""
        arrays = {name: self._timeline.used(column) for name, column in self._columns.items()}
        for tree in self._trees.values():
            arrays.update(tree.arrays())
        return arrays

    def _complete(self, starts: Numbers, index: Index, which: Mask, count: int, shared: bool = False) -> None:
        """Add complete items to the table.

        Args:
            starts: the starts of `count` items.
            index: the slots of these items.
            which: mask of the complete items.
            count: number of items.
            shared: True if the table can already contain other items of the block.
        """
        if isinstance(starts, int):
            self._table.append_block(starts, index, count, which, shared)
        else:
            self._table.append(starts if isinstance(which, bool) else starts[which])

    def _write(self, index: Index, step: Step) -> None:
        self.params_version[index] = step.params_version
        output = step.agent_output
        if self._action is not None:
            self._action[index] = output.action
        else:
            self._trees["action"].write(index, output.action)
        if output.extras:
            self._trees["extras"].write(index, output.extras)


class Transitions(_Items):
    """Items of up to n steps. Rewards are summed when steps are added, so sampling takes the same time for any n.

    Example with n = 3 and two environments. Three steps begin at the blocks 406, 408 and 410. (The last step ends at
    412.) r is the reward of a step, d is its discount, and g is gamma:

            items      step from 406         step from 408             step from 410
            406, 407   r0, d0 g, span 2      + g r1, * d1 g, span 4    + g^2 r2, * d2 g, span 6: complete
            408, 409                         r1, d1 g, span 2          + g r2, * d2 g, span 4
            410, 411                                                   r2, d2 g, span 2

    If the episode of an environment ends at 412, its items 408 (two steps) and 410 (one step) are also complete.
    """

    # Reward and discount are adjacent in memory, because memory accesses limit the speed of sampling.
    columns = {"outcome": "(2,)f4", "span": "i8", "params_version": "i8"}  # noqa: RUF012
    fields = ("action", "extras")

    def __init__(self, item: Transition, spec: StepSpec, timeline: Timeline, table: ItemTable, allocate: Allocate):
        super().__init__(spec, timeline, table, allocate)
        self.period, self.history = 1, item.n_step
        self._n = item.n_step
        self._gamma = np.float32(item.discount)
        self._powers = [np.float32(item.discount**k) for k in range(self._n)]
        self._outcome = self._columns["outcome"]
        self._reward, self._discount = self._outcome[:, 0], self._outcome[:, 1]
        # Multiply one-step discounts by gamma at sampling, because fewer items are sampled than added.
        self._discounts_at_sampling = self._n == 1

    def open(self, index: Index, step_type: np.ndarray) -> None:
        """Do nothing. (Sequences store the type of a fragment's first timestep here.)"""

    def discard(self, fragments: WriterFragments, envs: np.ndarray) -> None:
        """Discard the open fragments of `envs`, so that no later step extends their items."""
        fragments.ages[envs] = 0

    def put(
        self,
        fragments: WriterFragments,
        envs: np.ndarray | None,
        numbers: Numbers,
        next_numbers: Numbers,
        step: Step,
    ) -> None:
        """Store a step from the timesteps `numbers` to the timesteps `next_numbers`.

        Args:
            fragments: the writer's open fragments.
            envs: [B] indices of the environments. None means that all environments step together.
            numbers: numbers of the timesteps at which the step begins.
            next_numbers: numbers of the timesteps at which the step ends.
            step: arrays of [B, ...].
        """
        timeline, after = self._timeline, step.next_timestep
        reward, discount = after.reward, after.discount
        if not self._discounts_at_sampling:
            discount = discount * self._gamma
        count = len(reward)
        index = timeline.index(numbers, count)
        self._reward[index] = reward
        self._discount[index] = discount
        self._span[index] = next_numbers - numbers
        self._write(index, step)
        types = step.timestep.step_type.tobytes()
        acting = np.frombuffer(types.translate(_IS_NOT_LAST), bool) if _LAST_BYTE in types else True
        fragments.record_starts(numbers, envs)
        if self._n == 1:
            self._complete(numbers, index, acting, count)
            return
        fragments.record_acting(acting, envs)
        # Add the reward to the items that began k steps earlier, if they belong to the same episode.
        starts, continues = numbers, acting
        shorter: list[tuple[Numbers, Mask]] = []
        for k in range(1, self._n):
            shorter.append((starts, continues))
            starts, continues = fragments.starts_in_episode(k, envs, timeline.floor)
            index = timeline.index(starts, count)
            self._extend(k, index, next_numbers - starts, reward, discount, continues)
        self._complete(starts, index, continues, count, shared=True)
        next_types = step.next_timestep.step_type.tobytes()
        if _LAST_BYTE in next_types:  # episodes end, so their shorter items are complete
            ended = np.frombuffer(next_types.translate(_IS_LAST), bool)
            self._table.append(np.concatenate([_select(some, which & ended) for some, which in reversed(shorter)]))

    def _extend(
        self, k: int, index: Index, spans: Numbers, reward: np.ndarray, discount: np.ndarray, continues: Mask
    ) -> None:
        """Add the reward to the items in the slots `index`, which began k steps earlier.

        Args:
            continues: mask of the environments that are still in the same episode.
        """
        gained = self._powers[k] * reward
        if not isinstance(continues, bool):
            if isinstance(index, slice):  # writing in place takes half the time
                old_reward, old_discount = self._reward[index], self._discount[index]
                np.add(old_reward, gained, out=old_reward, where=continues)
                np.multiply(old_discount, discount, out=old_discount, where=continues)
                np.copyto(self._span[index], spans, where=continues)
                return
            index, gained, discount = index[continues], gained[continues], discount[continues]
            spans = spans if isinstance(spans, int) else spans[continues]
        self._reward[index] += gained
        self._discount[index] *= discount
        self._span[index] = spans

    def assemble(
        self, slots: np.ndarray, observations: Any, outputs: OutputArrays
    ) -> tuple[TransitionBatch, np.ndarray]:
        """Return a batch of the items that start in `slots` [B], and each item's oldest parameter version [B]."""
        ends = self._timeline.follow(slots, self._span.take(slots, mode="wrap"))
        outcome = self._outcome.take(slots, axis=0, mode="wrap")
        observation, next_observation = observations.read_both(slots, ends, outputs)
        batch = TransitionBatch(
            observation=observation,
            action=self._trees["action"].read(slots, outputs),
            reward=outcome[:, 0].copy(),
            discount=outcome[:, 1] * self._gamma if self._discounts_at_sampling else outcome[:, 1].copy(),
            next_observation=next_observation,
            extras=self._trees["extras"].read(slots, outputs),
        )
        # Versions increase, so the first step has the oldest version.
        return batch, self.params_version.take(slots, mode="wrap")


class Sequences(_Items):
    """Items that are sequences of consecutive steps. Sampling uses the spans to find the next step of each step.

    With a length of 4 and a period of 2, a sequence starts at the positions 0, 2, 4, ... of a fragment. The step at
    position 3 completes the sequence that started at 0. The step at position 5 completes the sequence that started at
    2.
    """

    columns = {"step_type": "u1", "reward": "f4", "discount": "f4", "span": "i8", "params_version": "i8"}  # noqa: RUF012
    fields = ("action", "extras", "agent_state")

    def __init__(self, item: Sequence, spec: StepSpec, timeline: Timeline, table: ItemTable, allocate: Allocate):
        super().__init__(spec, timeline, table, allocate)
        self._length = item.length
        self.period, self.history = item.period, -(-item.length // item.period)

    def open(self, index: Index, step_type: np.ndarray) -> None:
        """Begin a fragment in the slots `index`, and store the type of its first timestep."""
        self._columns["step_type"][index] = step_type

    def discard(self, fragments: WriterFragments, envs: np.ndarray) -> None:
        """Discard the open fragments of `envs`, so that a new sequence starts at the next step."""
        fragments.positions[envs] = 0

    def put(
        self,
        fragments: WriterFragments,
        envs: np.ndarray | None,
        numbers: Numbers,
        next_numbers: Numbers,
        step: Step,
    ) -> None:
        """Store a step from the timesteps `numbers` to the timesteps `next_numbers`. See `Transitions.put`."""
        timeline, after, columns = self._timeline, step.next_timestep, self._columns
        count = len(after.reward)
        index, next_index = timeline.index(numbers, count), timeline.index(next_numbers, count)
        columns["step_type"][next_index] = after.step_type
        columns["reward"][next_index] = after.reward
        columns["discount"][next_index] = after.discount
        self._span[index] = next_numbers - numbers
        self._write(index, step)
        self._trees["agent_state"].write(index, step.agent_state)
        fragments.record_starts(numbers, envs)
        completes = fragments.have_start_before(self._length - 1, envs)
        if completes is not False:
            starts = fragments.starts_before(self._length - 1, envs)
            self._complete(starts, timeline.index(starts, count), completes, count)

    def assemble(self, slots: np.ndarray, observations: Any, outputs: OutputArrays) -> tuple[SequenceBatch, np.ndarray]:
        """Return a batch of the items that start in `slots` [B], and each item's oldest parameter version [B]."""
        path = np.empty((self._length + 1, len(slots)), np.int64)
        path[0] = slots
        for t in range(self._length):
            path[t + 1] = self._timeline.follow(path[t], self._span.take(path[t], mode="wrap"))
        slots = np.ascontiguousarray(path.T)
        before, after = np.ascontiguousarray(slots[:, :-1]), np.ascontiguousarray(slots[:, 1:])
        batch = SequenceBatch(
            observation=observations.read(slots, outputs),
            step_type=self._columns["step_type"].take(slots, mode="wrap"),
            action=self._trees["action"].read(before, outputs),
            reward=self._columns["reward"].take(after, mode="wrap"),
            discount=self._columns["discount"].take(after, mode="wrap"),
            extras=self._trees["extras"].read(before, outputs),
            agent_state=self._trees["agent_state"].read(path[0], outputs),
        )
        # Use the minimum over all steps. With several inferencers, a later step can have an older version.
        return batch, self.params_version.take(before, mode="wrap").min(axis=1)


def _select(starts: Numbers, which: np.ndarray) -> np.ndarray:
    return starts + which.nonzero()[0] if isinstance(starts, int) else starts[which]
