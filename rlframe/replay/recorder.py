"""How a writer's steps enter a ring of timesteps, wherever the ring's memory lies."""

from __future__ import annotations

import numpy as np

from rlframe.errors import UsageError
from rlframe.replay.contents import Rows
from rlframe.replay.layout import TreeLayout, check_step
from rlframe.replay.tables import ItemTable
from rlframe.replay.timeline import Index, Timeline, Writer
from rlframe.types import Step, StepSpec, split_env_ids


class Recorder:
    """Adds the steps of the writers of one ring.

    Attributes:
        marks_origin: whether each slot must say who wrote it.
    """

    def __init__(
        self,
        step_spec: StepSpec,
        timeline: Timeline,
        table: ItemTable,
        rows: Rows,
    ):
        self._layouts = {name: TreeLayout(name, getattr(step_spec, name)) for name in StepSpec._fields}
        self._timeline, self._table, self._items = timeline, table, rows.items
        self._observations, self._origin = rows.observations, rows.origin
        self.marks_origin = False

    def add(self, writer: Writer, envs: np.ndarray | None, step: Step) -> None:
        """Adds a step of the environments `envs` [B] of `writer`; None: of all of them, in order."""
        types, after = step.timestep.step_type.tobytes(), step.next_timestep
        if not writer.checked:
            check_step(self._layouts, step, writer.num_envs if envs is None else len(envs))
            writer.checked = True
        if envs is None and writer.type_bytes == types and writer.block >= self._timeline.head + writer.margin:
            after_types = after.step_type.tobytes()
            new, index = self._take(writer.num_envs, writer)
            if self._observations.single is not None:
                self._observations.single[index] = after.observation
            else:
                self._observations.write(new, index, after.observation, writer.block)
            self._items.put(writer, writer.block, new, step, types, after_types)
            writer.block, writer.index, writer.type_bytes = new, index, after_types
            writer.position += 1
        else:
            self._add_scattered(writer, writer.range if envs is None else envs, step)

    def _add_scattered(self, writer: Writer, envs: np.ndarray, step: Step) -> None:
        """Adds a step of some of a writer's environments, or of ones whose fragments are broken."""
        writer.scatter()
        before, after, count = step.timestep, step.next_timestep, len(envs)
        now = writer.open[envs]
        # What this call may overwrite (two timesteps for each environment) counts as gone.
        kept = (now >= self._timeline.safe(2 * count)) & (writer.types[envs] == before.step_type)
        if not kept.all():
            lost = ~kept
            first, index = self._take(int(np.count_nonzero(lost)), writer)
            now[lost] = first + np.arange(np.count_nonzero(lost))
            rows = self._layouts["observation"].map(before.observation, lost)
            self._observations.write(first, index, rows, None)
            self._items.open(index, before.step_type[lost])
            self._items.discard(writer, envs[lost])
        first, index = self._take(count, writer)
        new = first + np.arange(count)
        self._observations.write(first, index, after.observation, now)
        self._items.put_scattered(writer, envs, now, new, step)
        writer.open[envs], writer.types[envs] = new, after.step_type
        writer.positions[envs] += 1
        if count == writer.num_envs and (envs == writer.range).all():
            writer.gather(self._timeline)

    def _take(self, count: int, writer: Writer) -> tuple[int, Index]:
        """Allocates `count` timesteps, and drops the items that are given up for them."""
        timeline = self._timeline
        first = timeline.head
        if first + count - timeline.floor > timeline.slots:
            for index in timeline.give_up(count):
                self._table.evict(index)
        timeline.head = first + count
        low = first % timeline.slots
        fits = low + count <= timeline.slots
        index = slice(low, low + count) if fits else timeline.index(first, count)
        if self.marks_origin:
            self._origin[index] = writer.origin
        return first, index


def find_writer(writers: dict[int, Writer], env_ids: np.ndarray) -> tuple[Writer, np.ndarray | None]:
    """Returns the writer that `env_ids` belong to, and the environments' indices (None: all in order).

    Raises:
        UsageError: they are not all of one of `writers`.
    """
    given = env_ids.tobytes()
    for writer in writers.values():
        if given == writer.id_bytes:
            return writer, None
    ranks, envs = split_env_ids(np.asarray(env_ids, np.int64))
    owner = writers.get(int(ranks[0])) if len(ranks) else None
    if owner is None or (ranks != ranks[0]).any() or (envs >= owner.num_envs).any():
        claimed = ", ".join(f"{w.rank} ({w.num_envs} environments)" for w in writers.values()) or "none"
        raise UsageError(
            f"add() got the env_ids {env_ids!r}; they must be of one claimed rank. Claimed: {claimed}. "
            "Call claim_rank(num_envs) first and use rlframe.types.global_env_ids(rank, indices)."
        )
    return owner, envs
