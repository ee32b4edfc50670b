"""How steps become items when they are added, and batches when they are sampled.

An item is known by the number of its first timestep. `put` stores what the steps hold beside observations and
tells the table which items they completed, the longest first; `assemble` gathers items.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.replay.layout import Allocate, OutputArrays, TreeLayout
from rlframe.replay.tables import ItemTable
from rlframe.replay.timeline import Fragments, Index, Timeline
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
    """Sums the n-step rewards as they arrive, so that sampling is one gather whatever n is."""

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

    def discard(self, writer: Fragments, envs: np.ndarray) -> None:
        """Forget the open fragments of `envs`: none of their starts is in this episode any more."""
        writer.ages[envs] = 0

    def put(self, writer: Fragments, now: int, new: int, step: Step, types: bytes, after_types: bytes) -> None:
        """Store a step of all the environments of a writer in lockstep."""
        after, count = step.next_timestep, writer.num_envs
        discount = self._store(writer.index, new - now, step)
        acting = np.frombuffer(types.translate(_IS_NOT_LAST), bool) if _LAST_BYTE in types else None
        if self._n == 1:
            self._table.append_block(now, writer.index, count, acting)
            return
        writer.start_blocks[writer.position % self._n] = now
        writer.acting.insert(0, acting)
        writer.acting.pop()
        within, start = acting, now
        unbroken = [acting]
        for k in range(1, self._n):
            within = _both(within, writer.acting[k])
            unbroken.append(within)
            start = writer.start_blocks[(writer.position - k) % self._n]
            if start < self._timeline.floor:
                within = _both(within, start + writer.range >= max(0, self._timeline.floor))
            self._extend(k, self._timeline.index(start, count), new - start, after.reward, discount, within)
        self._table.append_block(start, self._timeline.index(start, count), count, within, shared=True)
        if _LAST_BYTE in after_types:
            ended = np.frombuffer(after_types.translate(_IS_LAST), bool)
            self._finish(writer, ended, unbroken)

    def _extend(
        self, k: int, index: Index, span: int, reward: np.ndarray, discount: np.ndarray, within: np.ndarray | None
    ) -> None:
        """Add the reward to the items that began k steps before, in the episodes that are the same (`within`)."""
        gained = self._powers[k] * reward
        if within is not None and isinstance(index, slice):  # in place, which takes half the time
            old = self._reward[index], self._discount[index]
            np.add(old[0], gained, out=old[0], where=within)
            np.multiply(old[1], discount, out=old[1], where=within)
            np.copyto(self._span[index], span, where=within)
            return
        if within is not None:
            slots = np.asarray(index)  # a block that wraps
            index, gained, discount = slots[within], gained[within], discount[within]
        self._reward[index] += gained
        self._discount[index] *= discount
        self._span[index] = span

    def _finish(self, writer: Fragments, ended: np.ndarray, unbroken: list[np.ndarray | None]) -> None:
        """Complete the items of fewer than n steps of the episodes that `ended`."""
        envs = ended.nonzero()[0]
        shorter = []
        for k in range(min(len(unbroken), self._n - 1) - 1, -1, -1):
            start, within = writer.start_blocks[(writer.position - k) % self._n], unbroken[k]
            shorter.append(start + (envs if within is None else envs[within[envs]]))
        self._table.append(np.concatenate(shorter))

    def put_scattered(self, writer: Fragments, envs: np.ndarray, now: np.ndarray, new: np.ndarray, step: Step) -> None:
        """Store a step of `envs`, taken at the timesteps `now` [B] and answered by `new` [B]."""
        after, slots = step.next_timestep, self._timeline.slots
        positions, ages = writer.positions[envs], writer.ages[envs]
        discount = self._store(now % slots, new - now, step)
        writer.begin(now, envs)
        acting, ended = step.timestep.step_type != LAST, after.step_type == LAST
        completed = []
        for k in range(self._n - 1, -1, -1):
            within = (acting & (ages >= k)).nonzero()[0]
            starts = writer.starts[(positions[within] - k) % self._n, envs[within]]
            if k:
                living = starts >= self._timeline.floor
                within, starts = within[living], starts[living]
                index = starts % slots
                self._reward[index] += self._powers[k] * after.reward[within]
                self._discount[index] *= discount[within]
                self._span[index] = new[within] - starts
            completed.append(starts if k == self._n - 1 else starts[ended[within]])
        writer.ages[envs] = np.where(acting, np.minimum(ages + 1, self._n), 0)
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
    """Contiguous steps, found at sampling time by following the links from step to step."""

    columns = {"step_type": "u1", "reward": "f4", "discount": "f4", "span": "i8", "params_version": "i8"}  # noqa: RUF012
    fields = ("action", "extras", "agent_state")

    def __init__(self, item: Sequence, spec: StepSpec, timeline: Timeline, table: ItemTable, allocate: Allocate):
        super().__init__(spec, timeline, table, allocate)
        self._length = item.length
        self.period, self.history = item.period, -(-item.length // item.period)

    def open(self, index: Index, step_type: np.ndarray) -> None:
        """Begin a fragment in the slots `index`: store the type of its first timestep."""
        self._columns["step_type"][index] = step_type

    def discard(self, writer: Fragments, envs: np.ndarray) -> None:
        """Forget the open fragments of `envs`: the next sequence starts at the next step."""
        writer.positions[envs] = 0

    def put(self, writer: Fragments, now: int, new: int, step: Step, types: bytes, after_types: bytes) -> None:
        """Store a step of all the environments of a writer in lockstep."""
        index, count = writer.index, writer.num_envs
        self._store(index, self._timeline.index(new, count), new - now, step)
        j, rest = divmod(writer.position, self.period)
        if rest == 0:
            writer.start_blocks[j % self.history] = now
        j, rest = divmod(writer.position + 1 - self._length, self.period)
        if j >= 0 and rest == 0:
            start = writer.start_blocks[j % self.history]
            self._table.append_block(start, self._timeline.index(start, count), count, None)

    def put_scattered(self, writer: Fragments, envs: np.ndarray, now: np.ndarray, new: np.ndarray, step: Step) -> None:
        """Store a step of `envs`, taken at the timesteps `now` [B] and answered by `new` [B]."""
        slots = self._timeline.slots
        self._store(now % slots, new % slots, new - now, step)
        writer.begin(now, envs)
        j, rest = np.divmod(writer.positions[envs] + 1 - self._length, self.period)
        done = (j >= 0) & (rest == 0)
        self._table.append(writer.starts[j[done] % self.history, envs[done]])

    def _store(self, index: Index, new_index: Index, span: Any, step: Step) -> None:
        after = step.next_timestep
        self._columns["step_type"][new_index] = after.step_type
        self._columns["reward"][new_index] = after.reward
        self._columns["discount"][new_index] = after.discount
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
