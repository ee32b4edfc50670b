"""How steps become items when they are added, and batches when they are sampled.

An item is known by the number of its first timestep. `put` stores what the steps hold beside observations and
returns the numbers of the items that they completed, the longest first; `assemble` gathers items.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.replay.layout import TreeLayout
from rlframe.replay.outputs import Outputs
from rlframe.replay.stores import TreeStore
from rlframe.replay.timeline import Index, Numbers, Timeline, Writer
from rlframe.types import LAST, Sequence, SequenceBatch, Step, StepSpec, Transition, TransitionBatch

_LAST_BYTE = int(LAST)


class _Items:
    """What both kinds of items share: columns of scalars and trees, a row per slot."""

    columns: dict[str, str]
    fields: tuple[str, ...]

    def __init__(self, spec: StepSpec, timeline: Timeline):
        self._timeline = timeline
        self._columns = {name: np.zeros(timeline.slots, dtype) for name, dtype in self.columns.items()}
        self._trees = {name: TreeStore(TreeLayout(name, getattr(spec, name)), timeline.slots) for name in self.fields}
        self._span = self._columns["span"]  # how many numbers further the item's (or the step's) end lies
        # Versions only rise, so the first step's is the oldest of an item.
        self.params_version = self._columns["params_version"]

    @classmethod
    def row_bytes(cls, spec: StepSpec) -> int:
        """Bytes that a slot takes here."""
        leaves = [leaf for name in cls.fields for leaf in TreeLayout(name, getattr(spec, name)).leaves]
        return sum(leaf.nbytes for leaf in leaves) + sum(np.dtype(dtype).itemsize for dtype in cls.columns.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint must hold."""
        arrays = dict(self._columns)
        for tree in self._trees.values():
            arrays.update(tree.arrays())
        return arrays

    def _write(self, index: Index, step: Step) -> None:
        self.params_version[index] = step.params_version
        output = step.agent_output
        self._trees["action"].write(index, output.action)
        if output.extras:
            self._trees["extras"].write(index, output.extras)


class Transitions(_Items):
    """Sums the n-step rewards as they arrive, so that sampling is one gather whatever n is."""

    columns = {"reward": "f4", "discount": "f4", "span": "i8", "params_version": "i8"}  # noqa: RUF012
    fields = ("action", "extras")

    def __init__(self, item: Transition, spec: StepSpec, timeline: Timeline):
        super().__init__(spec, timeline)
        self.period, self.history = 1, item.n_step
        self._n = item.n_step
        self._gamma = np.float32(item.discount)
        self._powers = [np.float32(item.discount**k) for k in range(self._n)]
        self._reward, self._discount = self._columns["reward"], self._columns["discount"]

    def open(self, index: Index, step_type: np.ndarray) -> None:
        """A timestep starts a fragment: nothing to keep of it."""

    def discard(self, writer: Writer, envs: np.ndarray) -> None:
        """Forgets the open fragments of `envs`: none of their starts is in this episode any more."""
        writer.ages[envs] = 0
        writer.calm = 0

    def put(self, writer: Writer, envs: np.ndarray | None, now: Numbers, new: Numbers, step: Step) -> list[Numbers]:
        """Stores `step`, taken at the timesteps `now` and answered by `new`; returns the completed items."""
        types, after = step.timestep.step_type, step.next_timestep
        count = len(types)
        index = self._timeline.index(now, count)
        discount = after.discount * self._gamma
        self._reward[index] = after.reward
        self._discount[index] = discount
        self._span[index] = new - now
        self._write(index, step)
        acting = None if _LAST_BYTE not in types.tobytes() else types != LAST
        if self._n == 1:
            return [now if acting is None else _numbers(now, count)[acting]]
        writer.begin(now, envs)
        ended = after.step_type == LAST if _LAST_BYTE in after.step_type.tobytes() else None
        if acting is None and ended is None and envs is None:
            writer.calm += 1
            if writer.calm >= self._n:
                return self._extend_all(writer, new, count, after.reward, discount)
        else:
            writer.calm = 0
        return self._extend(writer, envs, now, new, step, acting, ended, discount)

    def _extend_all(
        self, writer: Writer, new: int, count: int, reward: np.ndarray, discount: np.ndarray
    ) -> list[Numbers]:
        """Adds the reward to the n - 1 steps before, all of the same episodes."""
        start = new
        for k in range(1, self._n):
            start = writer.start(writer.position - k, None)
            index = self._timeline.index(start, count)
            self._reward[index] += self._powers[k] * reward
            self._discount[index] *= discount
            self._span[index] = new - start
        return [start]

    def _extend(
        self,
        writer: Writer,
        envs: np.ndarray | None,
        now: Numbers,
        new: Numbers,
        step: Step,
        acting: np.ndarray | None,
        ended: np.ndarray | None,
        discount: np.ndarray,
    ) -> list[Numbers]:
        """Adds the reward to those of the n - 1 steps before that are of the same episode."""
        rows = slice(None) if envs is None else envs
        position = writer.position if envs is None else writer.positions[envs]
        ages, reward, count = writer.ages[rows], step.next_timestep.reward, len(discount)
        if acting is None:
            acting = np.ones(count, bool)
        new_numbers = _numbers(new, count)
        completed: list[Numbers] = []
        for k in range(self._n - 1, -1, -1):
            within = acting if k == 0 else acting & (ages >= k)
            starts = _numbers(now if k == 0 else writer.start(position - k, envs), count)[within]
            if k:
                index = starts % self._timeline.slots
                self._reward[index] += self._powers[k] * reward[within]
                self._discount[index] *= discount[within]
                self._span[index] = new_numbers[within] - starts
            if k == self._n - 1:
                completed.append(starts)
            elif ended is not None:
                completed.append(starts[ended[within]])
        writer.ages[rows] = np.where(acting, np.minimum(ages + 1, self._n), 0)
        return completed

    def assemble(self, starts: np.ndarray, observations: Any, outputs: Outputs) -> TransitionBatch:
        """Gathers the items `starts` [B]."""
        slots = self._timeline.relative(starts)
        ends = slots + self._span.take(slots, mode="wrap")
        return TransitionBatch(
            observation=observations.read(slots, outputs),
            action=self._trees["action"].read(slots, outputs),
            reward=self._reward.take(slots, mode="wrap"),
            discount=self._discount.take(slots, mode="wrap"),
            next_observation=observations.read(ends, outputs),
            extras=self._trees["extras"].read(slots, outputs),
        )


class Sequences(_Items):
    """Contiguous steps, found at sampling time by following the links from step to step."""

    columns = {"step_type": "u1", "reward": "f4", "discount": "f4", "span": "i8", "params_version": "i8"}  # noqa: RUF012
    fields = ("action", "extras", "agent_state")

    def __init__(self, item: Sequence, spec: StepSpec, timeline: Timeline):
        super().__init__(spec, timeline)
        self._length = item.length
        self.period, self.history = item.period, -(-item.length // item.period)

    def open(self, index: Index, step_type: np.ndarray) -> None:
        """A timestep starts a fragment."""
        self._columns["step_type"][index] = step_type

    def discard(self, writer: Writer, envs: np.ndarray) -> None:
        """Forgets the open fragments of `envs`: the next sequence starts at the next step."""
        writer.positions[envs] = 0

    def put(self, writer: Writer, envs: np.ndarray | None, now: Numbers, new: Numbers, step: Step) -> list[Numbers]:
        """Stores `step`, taken at the timesteps `now` and answered by `new`; returns the completed items."""
        after, count = step.next_timestep, len(step.timestep.step_type)
        index, new_index = self._timeline.index(now, count), self._timeline.index(new, count)
        self._columns["step_type"][new_index] = after.step_type
        self._columns["reward"][new_index] = after.reward
        self._columns["discount"][new_index] = after.discount
        self._span[index] = new - now
        self._write(index, step)
        self._trees["agent_state"].write(index, step.agent_state)
        writer.begin(now, envs)
        position = writer.position if envs is None else writer.positions[envs]
        j, rest = np.divmod(position + 1 - self._length, self.period) if envs is not None else divmod(
            position + 1 - self._length, self.period
        )
        if envs is None:
            return [writer.start(j, None)] if j >= 0 and rest == 0 else []
        done = (j >= 0) & (rest == 0)
        return [writer.start(j[done], envs[done])]

    def assemble(self, starts: np.ndarray, observations: Any, outputs: Outputs) -> SequenceBatch:
        """Gathers the items `starts` [B]."""
        path = np.empty((self._length + 1, len(starts)), np.int64)
        path[0] = self._timeline.relative(starts)
        for t in range(self._length):
            np.add(path[t], self._span.take(path[t], mode="wrap"), out=path[t + 1])
        slots = np.ascontiguousarray(path.T)
        before, after = np.ascontiguousarray(slots[:, :-1]), np.ascontiguousarray(slots[:, 1:])
        return SequenceBatch(
            observation=observations.read(slots, outputs),
            step_type=self._columns["step_type"].take(slots, mode="wrap"),
            action=self._trees["action"].read(before, outputs),
            reward=self._columns["reward"].take(after, mode="wrap"),
            discount=self._columns["discount"].take(after, mode="wrap"),
            extras=self._trees["extras"].read(before, outputs),
            agent_state=self._trees["agent_state"].read(path[0], outputs),
        )


def _numbers(numbers: Numbers, count: int) -> np.ndarray:
    """One number per environment, also of a block."""
    return numbers + np.arange(count) if isinstance(numbers, int) else numbers
