"""How steps become items when they are added, and batches when they are sampled.

An item is known by the number of its first timestep. `put` stores what the steps hold beside observations and
tells the table which items they completed, the longest first; `assemble` gathers items.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.replay.layout import Allocate, OutputArrays, TreeLayout
from rlframe.replay.tables import ItemTable
from rlframe.replay.timeline import Index, Timeline, WriterFragments
from rlframe.replay.tree_store import TreeStore
from rlframe.types import LAST, Sequence, SequenceBatch, Step, StepSpec, Transition, TransitionBatch

# Step types as bytes: looking for a LAST costs a tenth of a comparison of arrays, which matters at 64 environments.
_LAST_BYTE = int(LAST)
_IS_LAST = bytes(int(t == _LAST_BYTE) for t in range(256))
_IS_NOT_LAST = bytes(int(t != _LAST_BYTE) for t in range(256))


class _Items:
    """Base of both kinds of items: columns of scalars and trees, with a row per slot."""

    columns: dict[str, str]
    fields: tuple[str, ...]

    def __init__(self, spec: StepSpec, timeline: Timeline, table: ItemTable, allocate: Allocate):
        self._timeline, self._table = timeline, table
        dtypes = {name: np.dtype(dtype) for name, dtype in self.columns.items()}
        self._columns = {name: allocate(name, (timeline.slots, *d.shape), d.base) for name, d in dtypes.items()}
        layouts = {name: TreeLayout(name, getattr(spec, name)) for name in self.fields}
        self._trees = {name: TreeStore(layout, timeline, allocate) for name, layout in layouts.items()}
        self._action = self._trees["action"].single  # the usual case, without the way through a tree
        self._span = self._columns["span"]  # how many numbers further the item's (or the step's) end lies
        self.params_version = self._columns["params_version"]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when it is full."""
        columns = sum(column.nbytes for column in self._columns.values())
        return columns + sum(tree.nbytes for tree in self._trees.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must hold."""
        arrays = {name: self._timeline.used(column) for name, column in self._columns.items()}
        for tree in self._trees.values():
            arrays.update(tree.arrays())
        return arrays

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
    """Items of up to n steps, whose rewards are summed as they arrive: sampling is one gather for any n.

    With n = 3 and two environments, three steps from the blocks 406, 408 and 410 (the last one to 412) do this, where
    r, d and g are a step's reward, its discount, and gamma:

        items      step from 406         step from 408             step from 410
        406, 407   r0, d0 g, span 2      + g r1, * d1 g, span 4    + g^2 r2, * d2 g, span 6: complete
        408, 409                         r1, d1 g, span 2          + g r2, * d2 g, span 4
        410, 411                                                   r2, d2 g, span 2

    If an environment's episode ends at 412, its items 408 and 410 are complete too, of two steps and of one.
    """

    # Reward and discount side by side: sampling waits for memory, and finds both in one place.
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
        # One-step discounts are multiplied by gamma when they are sampled, which is less often than they are added.
        self._late_gamma = self._n == 1

    def open(self, index: Index, step_type: np.ndarray) -> None:
        """Begin a fragment in the slots `index`: nothing to store."""

    def discard(self, fragments: WriterFragments, envs: np.ndarray) -> None:
        """Forget the open fragments of `envs`: none of their starts is in this episode any more."""
        fragments.ages[envs] = 0

    def put(self, fragments: WriterFragments, next_block: int, step: Step, next_types: bytes) -> None:
        """Store a step of all environments of a writer in lockstep, from its open block to `next_block`."""
        block, types = fragments.open_block, fragments.type_bytes
        count, reward = fragments.num_envs, step.next_timestep.reward
        discount = self._store(fragments.index, next_block - block, step)
        acting = np.frombuffer(types.translate(_IS_NOT_LAST), bool) if _LAST_BYTE in types else None
        if self._n == 1:
            self._table.append_block(block, fragments.index, count, acting)
            return
        fragments.start_blocks[fragments.position % self._n] = block
        fragments.acting.insert(0, acting)
        fragments.acting.pop()
        # The items that began k steps before take the reward in the environments whose episode `continues` since then.
        start_block, continues = block, acting
        continues_since = [acting]
        for k in range(1, self._n):
            continues = _both(continues, fragments.acting[k])
            continues_since.append(continues)
            start_block = fragments.start_blocks[(fragments.position - k) % self._n]
            if start_block < self._timeline.floor:
                continues = _both(continues, start_block + fragments.range >= max(0, self._timeline.floor))
            index, span = self._timeline.index(start_block, count), next_block - start_block
            self._extend(k, index, span, reward, discount, continues)
        self._table.append_block(start_block, index, count, continues, shared=True)
        if _LAST_BYTE in next_types:
            ended = np.frombuffer(next_types.translate(_IS_LAST), bool)
            self._finish(fragments, ended, continues_since)

    def _extend(
        self, k: int, index: Index, span: int, reward: np.ndarray, discount: np.ndarray, continues: np.ndarray | None
    ) -> None:
        """Add the reward to the items that began k steps before, where the episode `continues`."""
        gained = self._powers[k] * reward
        if continues is not None and isinstance(index, slice):  # in place, which takes half the time
            old = self._reward[index], self._discount[index]
            np.add(old[0], gained, out=old[0], where=continues)
            np.multiply(old[1], discount, out=old[1], where=continues)
            np.copyto(self._span[index], span, where=continues)
            return
        if continues is not None:
            slots = np.asarray(index)  # a block that wraps
            index, gained, discount = slots[continues], gained[continues], discount[continues]
        self._reward[index] += gained
        self._discount[index] *= discount
        self._span[index] = span

    def _finish(self, fragments: WriterFragments, ended: np.ndarray, continues_since: list[np.ndarray | None]) -> None:
        """Complete the items of fewer than n steps of the episodes that `ended`."""
        envs = ended.nonzero()[0]
        shorter = []
        for k in range(min(len(continues_since), self._n - 1) - 1, -1, -1):
            start_block, continues = fragments.start_blocks[(fragments.position - k) % self._n], continues_since[k]
            shorter.append(start_block + (envs if continues is None else envs[continues[envs]]))
        self._table.append(np.concatenate(shorter))

    def put_scattered(
        self, fragments: WriterFragments, envs: np.ndarray, numbers: np.ndarray, next_numbers: np.ndarray, step: Step
    ) -> None:
        """Store a step of `envs` [B], from the timesteps `numbers` [B] to `next_numbers` [B]."""
        after, slots = step.next_timestep, self._timeline.slots
        positions, ages = fragments.positions[envs], fragments.ages[envs]
        discount = self._store(numbers % slots, next_numbers - numbers, step)
        fragments.begin(numbers, envs)
        acting, ended = step.timestep.step_type != LAST, after.step_type == LAST
        completed = []
        for k in range(self._n - 1, -1, -1):
            within = (acting & (ages >= k)).nonzero()[0]
            starts = fragments.starts[(positions[within] - k) % self._n, envs[within]]
            if k:
                living = starts >= self._timeline.floor
                within, starts = within[living], starts[living]
                index = starts % slots
                self._reward[index] += self._powers[k] * after.reward[within]
                self._discount[index] *= discount[within]
                self._span[index] = next_numbers[within] - starts
            completed.append(starts if k == self._n - 1 else starts[ended[within]])
        fragments.ages[envs] = np.where(acting, np.minimum(ages + 1, self._n), 0)
        self._table.append(np.concatenate(completed))

    def _store(self, index: Index, span: Any, step: Step) -> np.ndarray:
        """Store what a step holds beside observations; return the discount that items multiply."""
        after = step.next_timestep
        discount = after.discount if self._late_gamma else after.discount * self._gamma
        self._reward[index] = after.reward
        self._discount[index] = discount
        self._span[index] = span
        self._write(index, step)
        return discount

    def assemble(
        self, slots: np.ndarray, observations: Any, outputs: OutputArrays
    ) -> tuple[TransitionBatch, np.ndarray]:
        """Gather the items that start in `slots` [B], and [B] the oldest version that acted in each."""
        ends = self._timeline.follow(slots, self._span.take(slots, mode="wrap"))
        outcome = self._outcome.take(slots, axis=0, mode="wrap")
        observation, next_observation = observations.read_both(slots, ends, outputs)
        batch = TransitionBatch(
            observation=observation,
            action=self._trees["action"].read(slots, outputs),
            reward=outcome[:, 0].copy(),
            discount=outcome[:, 1] * self._gamma if self._late_gamma else outcome[:, 1].copy(),
            next_observation=next_observation,
            extras=self._trees["extras"].read(slots, outputs),
        )
        return batch, self.params_version.take(slots, mode="wrap")  # versions rise, and the action is the first step's


class Sequences(_Items):
    """Contiguous steps, found at sampling time by following the spans from step to step.

    With a length of 4 and a period of 2, a sequence starts at the positions 0, 2, 4, ... of a fragment. The step at
    position 3 completes the one that started at 0, the step at position 5 the one that started at 2.
    """

    columns = {"step_type": "u1", "reward": "f4", "discount": "f4", "span": "i8", "params_version": "i8"}  # noqa: RUF012
    fields = ("action", "extras", "agent_state")

    def __init__(self, item: Sequence, spec: StepSpec, timeline: Timeline, table: ItemTable, allocate: Allocate):
        super().__init__(spec, timeline, table, allocate)
        self._length = item.length
        self.period, self.history = item.period, -(-item.length // item.period)

    def open(self, index: Index, step_type: np.ndarray) -> None:
        """Begin a fragment in the slots `index`: store the type of its first timestep."""
        self._columns["step_type"][index] = step_type

    def discard(self, fragments: WriterFragments, envs: np.ndarray) -> None:
        """Forget the open fragments of `envs`: the next sequence starts at the next step."""
        fragments.positions[envs] = 0

    def put(self, fragments: WriterFragments, next_block: int, step: Step, next_types: bytes) -> None:
        """Store a step of all environments of a writer in lockstep, from its open block to `next_block`."""
        block, count = fragments.open_block, fragments.num_envs
        self._store(fragments.index, self._timeline.index(next_block, count), next_block - block, step)
        nth_start, rest = divmod(fragments.position, self.period)
        if rest == 0:
            fragments.start_blocks[nth_start % self.history] = block
        nth_start, rest = divmod(fragments.position + 1 - self._length, self.period)
        if nth_start >= 0 and rest == 0:
            start_block = fragments.start_blocks[nth_start % self.history]
            self._table.append_block(start_block, self._timeline.index(start_block, count), count, None)

    def put_scattered(
        self, fragments: WriterFragments, envs: np.ndarray, numbers: np.ndarray, next_numbers: np.ndarray, step: Step
    ) -> None:
        """Store a step of `envs` [B], from the timesteps `numbers` [B] to `next_numbers` [B]."""
        slots = self._timeline.slots
        self._store(numbers % slots, next_numbers % slots, next_numbers - numbers, step)
        fragments.begin(numbers, envs)
        nth_start, rest = np.divmod(fragments.positions[envs] + 1 - self._length, self.period)
        completes = (nth_start >= 0) & (rest == 0)
        self._table.append(fragments.starts[nth_start[completes] % self.history, envs[completes]])

    def _store(self, index: Index, next_index: Index, span: Any, step: Step) -> None:
        after = step.next_timestep
        self._columns["step_type"][next_index] = after.step_type
        self._columns["reward"][next_index] = after.reward
        self._columns["discount"][next_index] = after.discount
        self._span[index] = span
        self._write(index, step)
        self._trees["agent_state"].write(index, step.agent_state)

    def assemble(self, slots: np.ndarray, observations: Any, outputs: OutputArrays) -> tuple[SequenceBatch, np.ndarray]:
        """Gather the items that start in `slots` [B], and [B] the oldest version that acted in each."""
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
        # Not the first step's: one inferencer that answers for another may be behind it.
        return batch, self.params_version.take(before, mode="wrap").min(axis=1)


def _both(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return the conjunction of two masks, of which None is all True."""
    if a is None:
        return b
    return a if b is None else a & b
